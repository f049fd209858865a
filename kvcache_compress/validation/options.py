"""Base of all options, which refuses wrong types instead of converting them."""

from __future__ import annotations

import numbers
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from .messages import LARGEST_INTEGER, quoted

_Item = TypeVar("_Item")
AnyPath = Annotated[Path, Field(strict=False)]
"""Type of a path that may be passed as a string."""
AnyTuple = Annotated[tuple[_Item, ...], Field(strict=False)]
"""Type of a tuple that may be passed as a list."""
AnyList = Annotated[list[_Item], Field(strict=False)]
"""Type of a list that may be passed as a tuple."""
MOST_TOKENS = 2**31 - 1
"""Largest number of tokens in any option, as positions may be 32-bit integers."""
LARGEST_SEED = 2**31 - 1
Seed: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST_SEED)]


class StrictOptions(BaseModel):
    """Options without unknown keys, whose values must have exactly the declared types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _usual_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert NumPy numbers to Python's, and refuse integers too large to be printed."""
        items = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(item, int) and abs(item) > LARGEST_INTEGER for item in items):
            raise ValueError(f"{info.field_name}={quoted(value)}: allowed are integers up to {LARGEST_INTEGER}")
        return python_number(value)


def python_number(value: Any) -> Any:
    """Convert a NumPy integer or real number to Python's; return anything else unchanged."""
    if isinstance(value, (int, float)) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value
