"""Calibration: what a method learns from a model and a text, once."""

from .calibrate import CommVQSettings, calibrate_commvq

__all__ = ["CommVQSettings", "calibrate_commvq"]
