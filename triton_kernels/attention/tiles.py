"""Choose the tile of the attention kernel: as measured on a device like this one, or else by a rule.

`tiles.json` holds the tiles that `benchmarks/tune.py` measured, by compute capability and kernel, with their times. A
kernel is named after everything it is compiled for: the device functions of both sides, their parameters and the widths
of their tiles. Entries are for at most 16 query rows, as in decode steps; more rows make other kernels.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby
from pathlib import Path

import torch

from kvcache_compress.files.text import parse_json
from kvcache_compress.triton_kernels.common.operands import KernelSide, Tile
from kvcache_compress.triton_kernels.common.plan import portable

TABLE = Path(__file__).with_name("tiles.json")
TOKENS, WARPS, STAGES = (16, 32, 64, 128), (1, 2, 4, 8), (1, 2, 3, 4)
"""Allowed members of a tile, unless a side supports fewer tokens; 16 is the depth of the tensor cores' operands."""
USUAL_TOKENS = 64
"""Most tokens of a candidate, unless the rule has more: levels and weights of more tokens take many registers."""
MEASURED_ROWS = 16
"""Most query rows of a program that the entries hold for."""


Measured = dict[str, dict[str, Tile]]
"""Tiles by compute capability and name of the kernel."""


def tile_shape(k_side: KernelSide, v_side: KernelSide, exact: bool, rows: int, capability: str | None) -> Tile:
    """Tile for `rows` query rows of a head on a device of this compute capability; `exact` for float32."""
    if k_side.tile is not None:
        return k_side.tile
    entries = measured().get(capability or "")
    found = entries.get(kernel_name(k_side, v_side, exact)) if entries and rows <= MEASURED_ROWS else None
    return found or rule(k_side, v_side, exact)


def rule(k_side: KernelSide, v_side: KernelSide, exact: bool) -> Tile:
    """Tile with which levels and accumulators of both sides stay in registers, according to the compiler.

    One warp if that is enough: the 16 rows of the tensor cores' tile cannot be split, so more warps repeat work.
    """
    if exact:
        return Tile(16, 8, 2)
    widest = max(*k_side.widths, *v_side.widths)
    warps = max(k_side.warps, v_side.warps, widest // 16 if widest > 128 else 1)
    return Tile(min(k_side.tokens, v_side.tokens), min(warps, 8), 3)


def candidates(k_side: KernelSide, v_side: KernelSide) -> list[Tile]:
    """Tiles to measure: all that both sides support and that are not far larger than the rule's."""
    most = min(k_side.most_tokens, v_side.most_tokens, max(USUAL_TOKENS, rule(k_side, v_side, False).tokens))
    return [Tile(tokens, warps, stages) for tokens in TOKENS if tokens <= most for warps in WARPS for stages in STAGES]


def kernel_name(k_side: KernelSide, v_side: KernelSide, exact: bool) -> str:
    """Name of the attention kernel for this pair of sides, stable between runs: operand dtype, score, accumulate."""
    operands = "float32" if exact else "float16"
    return f"{operands}: {_named(k_side)}; {_named(v_side)}"


def _named(side: KernelSide) -> str:
    widths = "+".join(f"{len(list(same))}x{width}" for width, same in groupby(side.widths))
    meta = repr(side.meta).removeprefix(type(side.meta).__name__)
    return f"{side.function.fn.__module__.rpartition('.')[2]}.{side.function.fn.__name__}{meta} {widths}"


@cache
def capability_of(device: torch.device) -> str | None:
    """Compute capability of an NVIDIA GPU, such as "9.0"; None for other devices, which have no measured tiles."""
    if device.type != "cuda" or portable():
        return None
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


@cache
def measured() -> Measured:
    """Tiles of `tiles.json`, read once."""
    return read_tiles(TABLE.read_text(encoding="utf-8"))


def read_tiles(text: str) -> Measured:
    """Parse the tiles of a table that `make tune-gpu` wrote.

    Raises:
        ValueError: not such a table, or a tile that no kernel supports.
    """
    try:
        entries = {
            capability: {name: Tile(**entry["tile"]) for name, entry in kernels.items()}
            for capability, kernels in parse_json(text, "its text").items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{TABLE.name}: no table of tiles ({type(error).__name__}: {error})") from error
    for capability, kernels in entries.items():
        for name, tile in kernels.items():
            for field, value, allowed in zip(Tile._fields, tile, (TOKENS, WARPS, STAGES), strict=True):
                if value not in allowed:
                    choices = ", ".join(map(str, allowed))
                    raise ValueError(f"{TABLE.name}, {capability}, {name}: {field}={value}: allowed {choices}")
    return entries
