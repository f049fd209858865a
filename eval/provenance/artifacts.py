"""Files of a measurement: plots, and JSON with the circumstances it was made in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcache_compress.files.atomic import whole_file

from .results import circumstances, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path, dpi: int = 110, **options: Any) -> None:
    """Write a PNG with these options of matplotlib; see `whole_file`."""
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=dpi, **options)


def write_json(path: Path, fields: dict[str, Any], device: torch.device, *packages: str) -> None:
    """Write a result and its circumstances: command, date, commit, versions (also of `packages`), hardware.

    Lists of numbers take one line each.
    """
    text = json.dumps(circumstances(device, *packages) | fields, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, re.sub(r"\[[-+\d.e,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text) + "\n")
