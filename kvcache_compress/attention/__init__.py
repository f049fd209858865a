"""Attention over compressed layers: the registered function, the choice of a path, and the paths in torch."""
