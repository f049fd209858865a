"""Count the instructions that attention's kernels execute, in an emulator of a GPU; needs no GPU.

    python benchmarks/kernels/kernel_counts.py                           # measure, and print a table
    python benchmarks/kernels/kernel_counts.py --only turboquant-4bit    # measure one preset again
    python benchmarks/kernels/kernel_counts.py --table                   # print the committed counts

Triton compiles the kernels of a decode step for sm_90, and the tests' emulator (`tests/support/ptx`) executes the PTX.
The step has one query, 4 query heads per key head, a head dimension of 128, and bfloat16. Kernels whose work grows with
the packed tokens run twice, over different numbers of them in one split. The difference per token leaves out what a
launch does only once. Other kernels are counted per launch, and only the results file has them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from kvcache_compress.bench.layers import encoded_side, middle_layer, named_config
from kvcache_compress.codecs.base import Side
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.methods.commvq.codec import CommVQCodec
from kvcache_compress.triton_kernels.attention import launch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from support.ptx.counts import CLASSES, class_of  # noqa: E402 - found by the line above
from support.ptx.launch import Emulator, Launched, emulate  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "kernel_counts.json"
PRESETS = (
    *(f"turboquant-{bits}bit" for bits in (4, 3, 2)), "uniform-4bit", "kivi-4bit", "kivi-2bit",
    "polarquant-rope-4bit", "polarquant-3.4bit", "qjl-3bit", *(f"spectral-{bits}bit" for bits in (4, 3, 2)),
    "commvq-2bit",
)  # fmt: skip
TARGET = "sm_90"
HEADS, GROUPS, HEAD_DIM = 2, 4, 128
TOKENS = (1024, 2048)
"""Packed tokens of the two runs: whole programs of `turn_kernel`."""
GROWING = ("turn_kernel", "attend_kernel")
"""Kernels whose work grows with the tokens."""


Counts = dict[str, float]
"""Instructions of warps by class: per packed token and key head if a kernel is `GROWING`, else per launch."""
Table = dict[str, dict[str, Counts]]
"""Counts by variant and kernel."""


def measure(preset: str, emulator: Emulator) -> dict[str, Counts]:
    """Counts of each kernel of a decode step's attention.

    Raises:
        RuntimeError: a launch has findings, or Triton compiles another kernel for more tokens.
    """
    found = {}
    for before, after in zip(*(launches(preset, tokens, emulator) for tokens in TOKENS), strict=True):
        if before.findings or after.findings or before.program is not after.program:
            raise RuntimeError("\n".join([f"{after.name} cannot be counted", *before.report(), *after.report()]))
        if after.name in GROWING:
            found[after.name] = counted(after, before, (TOKENS[1] - TOKENS[0]) * HEADS)
        else:
            found[after.name] = counted(after, None, 1)
    return found


def launches(preset: str, tokens: int, emulator: Emulator) -> list[Launched]:
    """Launches of attention over this many packed tokens."""
    torch.manual_seed(0)
    plan = middle_layer(named_config(preset))
    both: tuple[tuple[Side, Any], ...] = ("keys", plan.keys), ("values", plan.values)
    keys, values = (
        encoded_side(own.method, own.options(), side, HEAD_DIM, torch.bfloat16, heads=HEADS, packed=tokens)
        for side, own in both
    )
    for codec in (keys.codec, values.codec):
        if isinstance(codec, CommVQCodec) and codec.books:  # files are mapped at any address, a GPU's memory is aligned
            codec.books = replace(codec.books, books=codec.books.books.clone())
    query = torch.randn(1, HEADS * GROUPS, 1, HEAD_DIM).to(torch.bfloat16)
    emulator.launches.clear()
    with mock.patch.object(launch, "split_sizes", lambda packed, *_: (packed, 1)):
        launch.attend(AttentionCall.of(query, scaling=HEAD_DIM**-0.5), keys, values)
    return list(emulator.launches)


def counted(after: Launched, before: Launched | None, share: int) -> Counts:
    """Instructions of a launch less those of the one before, divided by `share`."""
    classes = Counter(dict.fromkeys(CLASSES, 0))
    executed = after.executed if before is None else after.executed - before.executed
    for instruction, count in zip(after.program.instructions, executed.tolist(), strict=True):
        classes[class_of(instruction.op)] += count
    return {kind: count / share for kind, count in classes.items()}


def markdown(table: Table) -> str:
    """Markdown table, a line for each kernel whose work grows with the tokens."""
    columns = ["kernel", "all", *CLASSES]
    lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for name, kernels in table.items():
        for kernel in filter(kernels.__contains__, GROWING):
            warps = [sum(kernels[kernel].values()), *kernels[kernel].values()]
            cells = [f"{name}, {kernel.removesuffix('_kernel')}"]
            cells += [f"{32 * count / (2 * HEAD_DIM):.2f}" for count in warps]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def load() -> Table:
    table: Table = json.loads(RESULTS.read_text())["kernels"]
    return table


def save(table: Table) -> None:
    content = {
        "command": "python benchmarks/kernels/kernel_counts.py",
        "hardware": f"none: compiled for {TARGET} and emulated",
        "versions": {"python": platform.python_version(), "triton": importlib.metadata.version("triton")},
        "kernels": table,
    }
    write_atomically(RESULTS, json.dumps(content, indent=1) + "\n")


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Which to measure, of {', '.join(PRESETS)}.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Measure nothing; print the committed counts.")] = False,
) -> None:
    """Count instructions of attention's kernels; write the results and print a table."""
    if table:
        print(markdown(load()))
        return
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise typer.BadParameter("TRITON_INTERPRET=1 is set: kernels would be interpreted, not compiled")
    emulator = emulate(TARGET)
    measured = load() if only else {}
    for name in only or PRESETS:
        measured[name] = measure(name, emulator)
    print(markdown(measured))
    save({name: measured[name] for name in PRESETS})


if __name__ == "__main__":
    typer.run(main)
