"""Statistics by era and bits by layer, both chosen from the cached text."""
