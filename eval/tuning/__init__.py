"""Tune a cache for a model and a budget: measure each side of each layer, allocate bits, and validate the result."""
