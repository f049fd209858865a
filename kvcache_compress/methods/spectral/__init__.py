"""Spectral keys: codes along the directions in which the errors of keys cost attention most."""

from . import codec

__all__ = ["codec"]
