"""How fast: decode attention over a compressed layer, encoding, and whole models, beside the uncompressed cache."""
