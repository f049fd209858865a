"""Words for what is wrong with an input: short whatever the input, and on one line."""

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
"""Characters that a name must begin with as a known one does, to be taken for it whatever follows."""
_MOST_COMPLAINTS = 3
_LONGEST_QUOTE = 250
_LONGEST_LINE = 500
_LONGEST_MESSAGE = 3000
_LONGEST_NAME = 100
"""Characters that are looked at, or shown of a key."""


class _Quoted(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict = 3, 4
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        """Python itself refuses to print integers of thousands of digits."""
        return repr(x) if abs(x) <= LARGEST_INTEGER else f"<integer of {x.bit_length()} bits>"


_QUOTED = _Quoted()


def quoted(value: Any) -> str:
    """`repr` of any value, cut short before it is made."""
    text = _QUOTED.repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 53]}...{text[-50:]}"


def shortened(text: str, most: int = _LONGEST_MESSAGE) -> str:
    """A message that may repeat what was typed: without its middle beyond `most` characters, so that both the
    complaint at its start and the remedy at its end stay.
    """
    end = most // 5
    return text if len(text) <= most else f"{text[: most - end - 5]} ... {text[-end:]}"


def on_one_line(text: str, most: int) -> str:
    """A foreign text for the middle of a message: its white space as single blanks, at most `most` characters."""
    return shortened(" ".join(text.split()), most)


def one_line(error: Exception) -> str:
    """The kind and the first line of an error that is not ours."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_LONGEST_LINE]}" if lines else type(error).__name__


def unknown_key(name: str, where: str, known: Iterable[str]) -> str:
    return f"unknown key {quoted(name)} {where}: allowed {', '.join(known)}"


def suggestion(name: str, known: Sequence[str]) -> str:
    """What to take for an unknown name: the nearest, and all of its family, the names with the same first word."""
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
    """Pydantic's complaints as one line without its headings and links.

    Args:
        error: the complaints.
        where: the name of what has unknown keys, such as `in the config`.
        models: whose keys are known under the first part of a place; that of `""` for all other places.
        of: said behind the name of a wrong option, such as ` for turboquant`.
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
    """A validator's complaint with the place of the section that it checked, unless it names that itself."""
    outer, _, last = place.rpartition(".")
    if not place or complaint.startswith(f"{place}.") or complaint.startswith(f"{place}="):
        return complaint
    if re.match(rf"{re.escape(last)}\b", complaint):  # of a single field
        return f"{outer}.{complaint}" if outer else complaint
    return f"{place}.{complaint}" if re.match(r"\w+=", complaint) else f"{place}: {complaint}"
