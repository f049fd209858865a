"""Continuous batching of Transformers with compressed pages."""
