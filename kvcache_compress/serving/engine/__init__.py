"""Continuous batching of Transformers (5.19 to 5.24) with compressed pages. All that knows how it works inside."""
