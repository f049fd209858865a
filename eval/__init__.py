"""Evaluation: functions first, thin command lines over them."""
