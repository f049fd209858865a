"""Encoders, one file per method, and their launcher."""
