"""Calibration of any method: texts, observed attention, the frame of the command."""
