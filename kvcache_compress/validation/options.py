"""Base of all options: what is given is taken as it is, or refused."""

from __future__ import annotations

import numbers
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from .messages import LARGEST_INTEGER, quoted

_Item = TypeVar("_Item")
AnyPath = Annotated[Path, Field(strict=False)]
"""A path, also as a text."""
AnyTuple = Annotated[tuple[_Item, ...], Field(strict=False)]
"""A tuple, also as a list."""
AnyList = Annotated[list[_Item], Field(strict=False)]
"""A list, also as a tuple."""
MOST_TOKENS = 2**31 - 1
"""Of any count of tokens: positions and tensors' sizes go no further everywhere."""
LARGEST_SEED = 2**31 - 1
Seed: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST_SEED)]


class StrictOptions(BaseModel):
    """Fields of exactly their types, so that no `yes` becomes a number and no number a text; no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _usual_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """NumPy's as Python's; none so wide that it could not be printed."""
        items = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(item, int) and abs(item) > LARGEST_INTEGER for item in items):
            raise ValueError(f"{info.field_name}={quoted(value)}: allowed are integers up to {LARGEST_INTEGER}")
        return python_number(value)


def python_number(value: Any) -> Any:
    """An integer or a real number of NumPy's as Python's; all else as it is."""
    if isinstance(value, (int, float)) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value
