"""Error messages about user input: one line, and short whatever the input."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from pydantic import BaseModel, ValidationError

LARGEST_INTEGER = 2**63 - 1
_SHORTEST_START = 3
"""Leading characters that a name must share with a known one to be taken for a misspelling of it."""
_MOST_COMPLAINTS = 3
_LONGEST_QUOTE = 250
_LONGEST_LINE = 500
_LONGEST_MESSAGE = 3000
_LONGEST_NAME = 100
"""Characters of a name that are compared or shown."""


class _Quoted(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict = 3, 4
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        """Print a size for integers of thousands of digits, which Python itself refuses to print."""
        return repr(x) if abs(x) <= LARGEST_INTEGER else f"<integer of {x.bit_length()} bits>"


_QUOTED = _Quoted()


def quoted(value: Any) -> str:
    """Shortened `repr` of any value, without building the full one."""
    text = _QUOTED.repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 53]}...{text[-50:]}"


def shortened(text: str, most: int = _LONGEST_MESSAGE) -> str:
    """Shorten a message to `most` characters by leaving out its middle.

    The complaint at its start and the remedy at its end stay.
    """
    end = most // 5
    return text if len(text) <= most else f"{text[: most - end - 5]} ... {text[-end:]}"


def on_one_line(text: str, most: int) -> str:
    """Collapse white space of a text to single blanks, and shorten it to `most` characters."""
    return shortened(" ".join(text.split()), most)


def one_line(error: Exception) -> str:
    """Type and first line of another library's error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_LONGEST_LINE]}" if lines else type(error).__name__


def unknown_key(name: str, where: str, known: Iterable[str]) -> str:
    """Message for an unknown key, with the known ones."""
    return f"unknown key {quoted(name)} {where}: allowed {', '.join(known)}"


def suggestion(name: str, known: Sequence[str]) -> str:
    """Suggest names for an unknown one: the nearest, and all names with the same first word."""
    start = name.lower()[:_LONGEST_NAME]

    def likeness(one: str) -> tuple[int, float]:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(start, one, strict=False)))
        return same, difflib.SequenceMatcher(None, start, one).ratio()

    near = max(known, key=likeness)
    if likeness(near)[0] < _SHORTEST_START:
        found = difflib.get_close_matches(start, known, n=1)
        if not found:
            return f"there are {', '.join(known)}"
        near = found[0]
    family = near.partition("-")[0]
    return f"did you mean {near!r}? There are {', '.join(one for one in known if one.partition('-')[0] == family)}"


def explain(error: ValidationError, where: str, models: Mapping[str, type[BaseModel]], of: str = "") -> str:
    """Format a pydantic error as one line without its headings and links.

    Args:
        error: the error.
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
            lines.append(f"{place}{of}: field required")
        else:
            lines.append(f"{place}={quoted(issue['input'])}{of}: {issue['msg'][0].lower()}{issue['msg'][1:]}")
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
