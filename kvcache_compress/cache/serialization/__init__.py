"""Saved caches: one safetensors file per cache."""
