"""Bit planes in registers, operands of a side, and repeated launches."""
