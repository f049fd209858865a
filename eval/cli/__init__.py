"""Commands of `kvcache-compress eval`."""
