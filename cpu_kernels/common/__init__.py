"""Operands of a side, names and SIMD helpers."""
