"""Spectral keys: codes along the directions in which errors of keys cost attention most."""

from . import codec as codec
