"""Tune the attention kernel's tile on a device: find tiles that are right and faster than the rule's.

Each tile is compared with plain attention, and timed in turns with the rule's tile. `triton.autotune`
does not fit: it neither checks results nor sees spills, keeps its choice for one process or by a hash, and a tile
changes more than its kernel: the number of splits, hence the memory between kernels, and the merge.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from kvcache_compress.bench.compare import compare_views
from kvcache_compress.bench.decode import random_view
from kvcache_compress.bench.layers import Shape, encoded_side, middle_layer, named_config
from kvcache_compress.bench.timing import median_ms
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.files.text import parse_json, read_text
from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels.attention import tiles

from .jobs import TUNING, Job, is_missing

BATCH, TOKENS = 8, 32_768
"""Sequences and tokens with which tiles are timed; `SMALL` without a GPU."""
SMALL = (1, 64)
INPUTS = 3
"""Number of sets of random codes and queries with which each tile is timed."""
AT_A_TIME = 6
"""Tiles of a case that are planned before those of the next one."""
MARGIN = 0.03
"""Share by which a tile must be faster than the rule's, with all inputs, to be entered in the table."""
WARPS_AND_STAGES_IN_SMALL = (1, 2)
"""Warps and stages of the tiles that are tried in Triton's interpreter, which ignores both."""


@dataclass(frozen=True)
class TileTime:
    """Time of a tile for one preset and shape, compared with the rule's tile.

    Attributes:
        cache: preset.
        shape: name of the model's shape.
        tokens: packed tokens of each sequence.
        block, warps, stages: the tile.
        registers: registers per thread; None in Triton's interpreter.
        milliseconds, rule_milliseconds: time of attention with this tile and with the rule's, medians over the inputs;
            None if it was not timed.
        ratio: ratio of both times, the worst of all inputs.
        attention_error: relative error of attention, the worst of all inputs.
        error: why the tile cannot be chosen.
    """

    cache: str
    shape: str
    batch: int
    tokens: int
    block: int
    warps: int
    stages: int
    registers: int | None = None
    milliseconds: float | None = None
    rule_milliseconds: float | None = None
    ratio: float | None = None
    attention_error: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Case:
    """Preset and shape to tune: the kernel that they run, its tile by the rule, and the other tiles to try."""

    cache: str
    shape: str
    kernel: str
    rule: Any
    others: tuple[Any, ...]
    complete: bool = True
    """True if `others` are all tiles that both sides support."""

    def job(self, part: str, tile: Any, size: tuple[int, int]) -> Job:
        """Job of a tile at `size` sequences and tokens; `part` is `try` or `tile`."""
        return Job(part, (self.cache, self.shape, *size, *tile))


def plan_cases(
    presets: Sequence[str],
    shapes: Mapping[str, Shape],
    small: bool = False,
    most: int | None = None,
    capability: str | None = None,
) -> list[Case]:
    """Cases to tune: for each kernel and shape, the first preset that runs it.

    Its tiles, at most `most`, begin with that of the table for this compute capability, then those most like the
    rule's.
    """
    cases: dict[tuple[str, str], Case] = {}
    for preset in presets:
        plan = middle_layer(named_config(preset))
        for name, shape in shapes.items():
            keys, values = (
                encoded_side(
                    plan.side(side).method, plan.side(side).options(), side, shape.head_dim, torch.bfloat16,
                    heads=shape.kv_heads, codes="random",
                ).codec.kernel_side
                for side in ("keys", "values")
            )  # fmt: skip
            kernel, rule = tiles.kernel_name(keys, values, False), tiles.rule(keys, values, False)
            known = tiles.tile_shape(keys, values, False, 1, capability)
            others = [tile for tile in tiles.candidates(keys, values) if tile != rule]
            if small:
                others = [tile for tile in others if tile[1:] == WARPS_AND_STAGES_IN_SMALL]
            others.sort(key=lambda tile: (tile != known, _distance(tile, rule)))
            complete = most is None or most >= len(others)
            cases.setdefault((kernel, name), Case(preset, name, kernel, rule, tuple(others[:most]), complete))
    return list(cases.values())


def _distance(tile: Sequence[int], rule: Sequence[int]) -> float:
    """Doublings between two tiles' tokens and warps, and half as much for each stage of difference."""
    (tokens, warps, stages), (by_tokens, by_warps, by_stages) = tile, rule
    return abs(math.log2(tokens / by_tokens)) + abs(math.log2(warps / by_warps)) + abs(stages - by_stages) / 2


def plan_tiles(cases: Sequence[Case], size: tuple[int, int]) -> list[Job]:
    """Jobs of all tiles, tries first; a few tiles of every case before more, so that little time serves all."""
    ranks = range(0, max((len(case.others) for case in cases), default=0), AT_A_TIME)
    chosen = [(case, tile) for first in ranks for case in cases for tile in case.others[first : first + AT_A_TIME]]
    return [case.job(part, tile, size) for part in TUNING for case, tile in chosen]


@lru_cache(maxsize=1)
def _views(
    preset: str, shape: Shape, batch: int, tokens: int, device: torch.device, inputs: int
) -> tuple[tuple[View, View, torch.Tensor], ...]:
    """Layers and queries of a case, cached because its tiles are tried one after the other."""
    return tuple(random_view(preset, shape, batch, tokens, device, torch.bfloat16) for _ in range(inputs))


def try_tile(
    preset: str,
    name: str,
    shape: Shape,
    batch: int,
    tokens: int,
    device: torch.device,
    tile: tuple[int, int, int],
    *,
    timed: bool,
    repeats: int = 20,
    timer: Callable[..., float] = median_ms,
) -> TileTime:
    """Compare attention over `tokens` packed tokens with this tile; if `timed`, time it in turns with the rule's.

    Raises:
        ValueError: attention is wrong, or registers spill.
    """
    scaling, errors, times = shape.head_dim**-0.5, [], []
    for keys, values, query in _views(preset, shape, batch, tokens, device, INPUTS if timed else 1):
        k_side, v_side = keys.codec.kernel_side, values.codec.kernel_side
        assert k_side is not None
        assert v_side is not None

        def attend(keys: View = keys, values: View = values, query: torch.Tensor = query) -> torch.Tensor:
            return keys.attend(AttentionCall.of(query, scaling=scaling), values)

        k_side.use_tile(tiles.Tile(*tile))
        error, problem = compare_views(keys, values, query, scaling)
        if problem is not None or error is None:
            raise ValueError(problem)
        errors.append(error)
        registers = _registers(k_side)
        if timed:
            ours = timer(attend, device, repeats)
            k_side.use_tile(tiles.rule(k_side, v_side, False))
            times.append((ours, timer(attend, device, repeats)))
    if not times:
        return TileTime(preset, name, batch, tokens, *tile, registers, attention_error=max(errors))
    ours, rules = (statistics.median(column) for column in zip(*times, strict=True))
    return TileTime(
        preset, name, batch, tokens, *tile, registers, ours, rules, max(x / y for x, y in times), max(errors)
    )


def _registers(k_side: Any) -> int | None:
    """Registers per thread of the attention kernel that was launched last; raises `ValueError` if it spills."""
    (plan,) = k_side.plans.values()
    compiled = next(launch.compiled for launch in plan.launches if launch.kernel.__name__ == "attend_kernel")
    if compiled is None:
        return None
    if compiled.n_spills:
        raise ValueError(f"{4 * compiled.n_spills} bytes of a thread's registers spill to memory")
    return int(compiled.n_regs)


def best_tiles(
    cases: Sequence[Case], rows: Mapping[Job, Mapping[str, Any]], size: tuple[int, int]
) -> dict[str, dict[str, Any] | None]:
    """Entries of the table by kernel; None for a kernel whose best tile is the rule's or hardly better.

    A tile must be faster than the rule's by `MARGIN` in each case of its kernel, with all inputs. A kernel is left out
    if no tile pays that was measured, unless all were.
    """
    entries: dict[str, dict[str, Any] | None] = {}
    for kernel, group in groupby(sorted(cases, key=lambda case: case.kernel), lambda case: case.kernel):
        kernel_cases = list(group)
        first = kernel_cases[0]
        table = {tile: [rows[case.job("tile", tile, size)] for case in kernel_cases] for tile in first.others}
        reached = {tile: times for tile, times in table.items() if not any(map(is_missing, times))}
        right = {tile: times for tile, times in reached.items() if all(row.get("error") is None for row in times)}
        if not right:
            continue
        ratios = {tile: max(row["ratio"] for row in times) for tile, times in right.items()}
        best = min(ratios, key=lambda tile: ratios[tile])
        if ratios[best] < 1 - MARGIN:
            figures = ("cache", "shape", "batch", "tokens", "milliseconds", "rule_milliseconds", "ratio")
            measured = [{name: row[name] for name in figures} for row in right[best]]
            entries[kernel] = {"tile": best._asdict(), "rule": first.rule._asdict(), "measured": measured}
        elif first.complete and len(reached) == len(table):
            entries[kernel] = None
    return entries


def update_table(
    path: Path, capability: str, entries: Mapping[str, dict[str, Any] | None], where: Mapping[str, Any]
) -> None:
    """Set or remove `entries` in the table at `path`, leaving all others; `where` is added to each."""
    table = parse_json(read_text(path), str(path)) if path.is_file() else {}
    kernels = table.pop(capability, {})
    for kernel, entry in entries.items():
        kernels.pop(kernel, None)
        if entry is not None:
            kernels[kernel] = entry | dict(where)
    if kernels:
        table[capability] = dict(sorted(kernels.items()))
    text = json.dumps(dict(sorted(table.items())), indent=1) + "\n"
    tiles.read_tiles(text)
    write_atomically(path, text)
