"""Checks of what users pass: strict options, devices, sizes with a unit, optional packages, and error messages.

Messages are one line, and short whatever the input.
"""

from __future__ import annotations

import importlib
import numbers
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

if TYPE_CHECKING:
    import torch

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
_MOST_COMPLAINTS = 3
_LONGEST_QUOTE = 250
_LONGEST_LINE = 500
_LONGEST_MESSAGE = 3000
_LONGEST_NAME = 100
_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZES |= {letter + end: 1024**power for power, letter in enumerate("kmgt", 1) for end in ("", "ib")}


class StrictOptions(BaseModel):
    """Options without unknown keys, whose values must have exactly the declared types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _usual_numbers(cls, value: Any) -> Any:
        """Convert NumPy numbers to Python's."""
        return python_number(value)


def python_number(value: Any) -> Any:
    """Convert a NumPy integer or real number to Python's; return anything else unchanged."""
    if isinstance(value, (int, float)) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def usable_device(device: torch.device | str | None) -> torch.device:
    """Resolve a device by its name; None is the CPU."""
    import torch

    try:
        found = torch.empty(0, device="cpu" if device is None else device).device
        reason = "it holds no data" if found.type == "meta" else None
    except (RuntimeError, AssertionError, TypeError, ValueError, ImportError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
    if reason is not None:
        raise ValueError(f"device={quoted(device)} is unavailable: {reason}")
    return found


def parse_size(given: str, name: str) -> int:
    """Read a number with a unit: `2GB` is 2 · 10⁹ bytes, `1.5GiB` 1.5 · 2³⁰, and `128K` tokens are 131,072."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-zA-Z]{0,3})\s*", given)
    unit = None if match is None else _SIZES.get(match[2].lower())
    if match is None or unit is None or float(match[1]) <= 0 or (unit == 1 and not float(match[1]).is_integer()):
        raise ValueError(f"{name}={quoted(given)}: must be a size such as 2GB, 1.5GiB or 128K")
    return max(1, round(float(match[1]) * unit))


def size_text(size: float) -> str:
    """Write bytes in KiB, MiB or GiB: `512.0 MiB`, `8.57 GiB`."""
    unit, power = ("GiB", 30) if size >= 2**30 else ("MiB", 20) if size >= 2**20 else ("KiB", 10)
    number = size / 2**power
    return f"{number:.{2 if number < 100 else 1}f} {unit}"


def require(module: str, purpose: str, package: str, extra: str = "eval") -> ModuleType:
    """Import a module of an optional package, which `purpose`, a plural, needs and an extra of ours installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{purpose} need {package}: pip install "kvcache-compress[{extra}]" ({error})') from error


_QUOTED = reprlib.Repr()
_QUOTED.maxlevel, _QUOTED.maxdict = 3, 4
_QUOTED.maxstring = _QUOTED.maxother = 200


def quoted(value: Any) -> str:
    """Shortened `repr` of any value, without building the full one."""
    return shortened(_QUOTED.repr(value), _LONGEST_QUOTE)


def shortened(text: str, most: int = _LONGEST_MESSAGE) -> str:
    """Shorten a message to `most` characters by leaving out its middle.

    The complaint at its start and the remedy at its end stay.
    """
    end = most // 5
    return text if len(text) <= most else f"{text[: most - end - 5]} ... {text[-end:]}"


def one_line(error: Exception) -> str:
    """Type and first line of another library's error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_LONGEST_LINE]}" if lines else type(error).__name__


def unknown_key(name: str, where: str, known: Iterable[str]) -> str:
    """Message for an unknown key, with the known ones."""
    return f"unknown key {quoted(name)} {where}: must be one of {', '.join(known)}"


def explain(error: ValidationError, where: str, models: Mapping[str, type[BaseModel]], of: str = "") -> str:
    """Format a pydantic error as one line without its headings and links.

    Args:
        where: place of unknown keys, such as `in the config`.
        models: model with the known keys by the first part of a location; `""` for all other locations.
        of: text after the name of a wrong option, such as ` for turboquant`.
    """
    lines = []
    for issue in error.errors(include_url=False):
        parts = [str(part)[:_LONGEST_NAME] for part in issue["loc"]]
        place = ".".join(part for part in parts if not part.startswith("<"))
        if issue["type"] == "extra_forbidden":
            model = models.get(parts[0], models[""])
            lines.append(unknown_key(place, where, model.model_fields))
        elif issue["type"] == "value_error":
            lines.append(_placed(place, str(issue["ctx"]["error"])))
        elif issue["type"] == "missing":
            lines.append(f"{place}{of}: is required")
        else:
            problem = issue["msg"].replace("Input should", "must", 1)
            lines.append(f"{place}={quoted(issue['input'])}{of}: {problem[0].lower()}{problem[1:]}")
    distinct = list(dict.fromkeys(lines))
    more = len(distinct) - _MOST_COMPLAINTS
    return "; ".join(distinct[:_MOST_COMPLAINTS]) + (f"; and {more} more" if more > 0 else "")


def _placed(place: str, complaint: str) -> str:
    """Prefix a validator's complaint with the location it checked, unless the complaint names it already."""
    outer, _, last = place.rpartition(".")
    if not place or complaint.startswith(f"{place}.") or complaint.startswith(f"{place}="):
        return complaint
    if re.match(rf"{re.escape(last)}\b", complaint):  # the complaint begins with the field's name
        return f"{outer}.{complaint}" if outer else complaint
    return f"{place}.{complaint}" if re.match(r"\w+=", complaint) else f"{place}: {complaint}"
