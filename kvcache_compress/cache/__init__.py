"""Caches and their layers, as Transformers uses them."""
