"""Sizes with a unit: bytes and tokens, read and written."""

from __future__ import annotations

import re

from .messages import quoted

SUFFIXES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
SUFFIXES |= {letter + end: 1024**power for power, letter in enumerate("kmgt", 1) for end in ("", "ib")}


def parse_size(given: str, name: str) -> int:
    """Read a number with a unit: `2GB` is 2 · 10⁹ bytes, `1.5GiB` 1.5 · 2³⁰, and `128K` tokens are 131,072.

    Raises:
        ValueError: no such number.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-zA-Z]{0,3})\s*", given)
    unit = None if match is None else SUFFIXES.get(match[2].lower())
    if match is None or unit is None or float(match[1]) <= 0 or (unit == 1 and not float(match[1]).is_integer()):
        raise ValueError(f"{name}={quoted(given)}: allowed numbers such as 2GB, 1.5GiB or 128K")
    return max(1, round(float(match[1]) * unit))


def size_text(size: float) -> str:
    """Write bytes in KiB, MiB or GiB: `512.0 MiB`, `8.57 GiB`."""
    unit, power = next(
        pair for pair in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if size >= 2 ** pair[1] or pair[1] == 10
    )
    number = size / 2**power
    return f"{number:.{2 if number < 100 else 1}f} {unit}"
