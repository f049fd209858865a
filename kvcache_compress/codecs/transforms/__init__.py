"""Transforms of keys and values before quantization."""
