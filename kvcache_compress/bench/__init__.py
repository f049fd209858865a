"""How fast: decode attention over a compressed layer, and whole models, beside the uncompressed cache."""
