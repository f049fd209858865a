"""Provenance of results: model, text, options, machine and code."""
