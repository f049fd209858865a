"""Calibration: train a method's codebooks once, on a model and a text."""
