"""Kernels that store the tokens of a decode step."""
