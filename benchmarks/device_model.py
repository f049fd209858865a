"""Predict the time of decode attention on a GPU from the machine code of its kernel; nothing here is measured.

    t = max(bytes / bandwidth, issue slots, each pipe, the warps' own time / warps resident)

A multiprocessor has four schedulers. Each starts one instruction per clock, and keeps a pipe busy for `CLOCKS` of it.
A warp alone takes the clocks of `sass.py`, memory latency included where its loop waits for it; as many
as fit side by side divide that time. The largest of these is the time, as if all else were hidden behind it: the
prediction is a lower bound, with these assumptions:

- clock rate, bandwidth and latencies as in `H200`, and no conflicts of banks or caches;
- every program takes its share at the same speed; where a processor has more programs than others, all wait for it;
- a kernel that waits for another starts `LAUNCH` after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache_compress.triton_kernels.attention.launch import split_sizes
from kvcache_compress.triton_kernels.common.operands import Tile

HEADS = 8
"""Key/value heads of the shapes in tables, as Llama-3.1-8B has."""
SCHEDULERS = 4
CLOCKS = {"alu": 2.0, "fma": 1.0, "imad": 2.0, "tensor": 6.5, "special": 8.0, "memory": 4.0}
"""Clocks for which one instruction of a warp keeps a pipe of its scheduler busy, on compute capability 9.0.

From the lanes per clock that are named in `sass.PIPES`. Shuffles and shared memory serve one warp, or 128 bytes, per
clock and processor. A product of 16 x 8 x 16 would take 4 clocks at the tensor cores' full rate; `mma` reaches 62 % of
it (Luo et al. 2024, table of Hopper's tensor cores).
"""
LAUNCH = 1.5
"""Microseconds from the end of a kernel to the start of the next one in a CUDA graph: an assumption."""


@dataclass(frozen=True)
class Device:
    """A GPU: multiprocessors, gigahertz, bytes per second, and what a multiprocessor has for its programs."""

    name: str
    processors: int
    gigahertz: float
    bandwidth: float
    registers: int = 65536
    shared_bytes: int = 227 * 1024
    warps: int = 64
    programs: int = 32


H200 = Device("H200", 132, 1.75, 4.8e12)
"""By its datasheet; the clock rate is below the 1.98 GHz that it may reach, as under load."""


@dataclass(frozen=True)
class Prediction:
    """Time of a kernel: microseconds, what bounds it, share of the bandwidth, warps per multiprocessor.

    parts: microseconds that each bound alone would take.
    """

    microseconds: float
    bound: str
    share: float
    warps: int
    parts: dict[str, float]


def resident_warps(row: Mapping[str, Any], warps: int, device: Device = H200) -> int:
    """Warps of a kernel that a multiprocessor holds at a time, of programs of `warps` warps."""
    registers = -(-row["registers"] // 8) * 8 * 32 * warps
    programs = min(
        device.programs,
        device.warps // warps,
        device.registers // registers,
        device.shared_bytes // (row["shared_bytes"] + 1024),
    )
    return warps * programs


def predict(
    row: Mapping[str, Any],
    stored: float,
    *,
    tokens: int,
    heads: int,
    batch: int = 1,
    row_blocks: int = 1,
    device: Device = H200,
) -> Prediction:
    """Predict the attention kernel over packed tokens.

    Args:
        row: figures of `results/kernels.json` of one kernel on one target, with its `loop`.
        stored: bytes of all packed tokens of the layer, of all heads and sequences.
        tokens: packed tokens per sequence.
        heads: key/value heads.
        batch: sequences.
        row_blocks: programs that share a head's query rows (1 up to 8 rows, or 16 on AMD).
    """
    loop = row["loop"]
    warps, programs = loop["warps"], batch * heads * row_blocks
    tile = Tile(loop["tokens"], warps, loop["stages"])
    split_tokens, splits = split_sizes(tokens, tile, programs, device.processors)
    resident = resident_warps(row, warps, device)
    slots = device.processors * resident // warps
    turns = -(-split_tokens // loop["tokens"])
    # Turns of the multiprocessor that has most: programs are dealt out evenly, the rest wait for a place.
    busiest = -(-programs * splits // device.processors) * turns
    running = min(resident, -(-programs * splits // device.processors) * warps)
    waves = -(-programs * splits // slots)
    clock = device.gigahertz * 1e3
    per_scheduler = busiest * warps / SCHEDULERS / clock
    pipes = loop["pipes"]
    parts = {pipe: per_scheduler * pipes[pipe] * clocks for pipe, clocks in CLOCKS.items()}
    parts["fma"] = per_scheduler * (pipes["fma"] + pipes["imad"])  # both halves of one pipe
    parts["issue"] = per_scheduler * sum(pipes.values())
    parts["latency"] = max(busiest * warps / running, turns * waves) * loop["clocks"] / clock
    parts["bytes"] = stored / device.bandwidth * 1e6
    bound = max(parts, key=lambda part: parts[part])
    return Prediction(parts[bound], bound, parts["bytes"] / parts[bound], resident, parts)


def rows(path: Path = Path(__file__).parent / "results" / "kernels.json", target: str = "sm_90") -> dict[str, Any]:
    """Figures of all kernels on one target, by name."""
    kernels = json.loads(path.read_text())["kernels"]
    return {name: targets[target] for name, targets in kernels.items() if target in targets}
