"""Fixtures of the kernels' tests."""

from segment_makers import make_codec, make_side, poison  # noqa: F401
