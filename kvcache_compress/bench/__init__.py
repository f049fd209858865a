"""Benchmarks: time decode attention and models with compressed caches, compared with the uncompressed cache."""
