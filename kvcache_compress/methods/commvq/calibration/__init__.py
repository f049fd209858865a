"""Calibration: train a method's codebooks once, on a model and a text."""

from .calibrate import CommVQSettings, calibrate_commvq

__all__ = ["CommVQSettings", "calibrate_commvq"]
