"""Compression of a model's `generate` and continuous batching, the prefix store, and the server."""
