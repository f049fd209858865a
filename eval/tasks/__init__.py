"""Benchmarks: samples, and a score per sample and cache."""
