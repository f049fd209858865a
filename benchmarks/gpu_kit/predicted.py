"""Predicted times of decode rows, from `device_model.py`, beside which the measured ones are put."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import device_model

from kvcache_compress.bench.layers import SHAPES, middle_layer, named_config
from kvcache_compress.codecs.layout import bytes_per_token

KERNEL = "attend_kernel"
"""Name of the kernel whose time is predicted: queries are mapped before it, and its splits merged after it."""
BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes per second by the datasheets of GPUs with the same processor."""


def predicted_ms(row: Mapping[str, Any], accelerator: str | None = None) -> tuple[float, str] | None:
    """Predicted milliseconds of a row's attention kernel and what bounds it, or None without a prediction.

    Predictions exist for shapes of 128 channels and up to eight query heads per key/value head, for the presets whose
    machine code is in `results/kernels.json`, masked and fixed ones included.
    """
    shape = SHAPES.get(row["shape"])
    name = row["cache"] + ("" if row["call"] == "plain" else f", {row['call']}")
    kernel = _kernels().get(name)
    if shape is None or shape.head_dim != 128 or kernel is None or "loop" not in kernel:
        return None
    plan = middle_layer(named_config(row["cache"]))
    per_token = sum(bytes_per_token(plan.layout(side, shape.head_dim)) for side in ("keys", "values"))
    chip = next((chip for chip in BANDWIDTHS if chip in (accelerator or "")), "H200")
    device = replace(device_model.H200, name=chip, bandwidth=BANDWIDTHS[chip])
    found = device_model.predict(
        kernel, per_token * row["batch"] * row["tokens"] * shape.kv_heads,
        tokens=row["tokens"], heads=shape.kv_heads, batch=row["batch"], device=device,
    )  # fmt: skip
    return found.microseconds / 1000, found.bound


@cache
def _kernels() -> dict[str, Any]:
    return device_model.rows()
