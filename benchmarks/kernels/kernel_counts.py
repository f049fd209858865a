"""Count what attention's kernels execute and ask of memory, in an emulator of a GPU; needs no GPU.

    python benchmarks/kernels/kernel_counts.py                           # measure, print a table and write the results
    python benchmarks/kernels/kernel_counts.py --only turboquant-4bit    # measure one preset, write nothing
    python benchmarks/kernels/kernel_counts.py --table                   # print the committed counts

Triton compiles the kernels of a decode step for sm_90, and the tests' emulator (`tests/support/ptx`) executes the PTX.
The step has one query, 4 query heads per key head, a head dimension of 128, and bfloat16. Kernels whose work grows with
the packed tokens run twice, over different numbers of them in one split. The difference per token leaves out what a
launch does only once. Other kernels are counted per launch, for the results file alone.

The worst places are lines of Triton whose accesses need more global-memory sectors, or more shared-memory wavefronts,
than necessary. They are printed and stored.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from kvcache_compress.bench.layers import encoded_side, middle_layer, named_config
from kvcache_compress.codecs.base import SIDES
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.eval.provenance.results import write_json
from kvcache_compress.methods.commvq.codec import CommVQCodec
from kvcache_compress.methods.commvq.residual import ResidualBooks
from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels.attention import launch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks" / "pages")]

from support.ptx.counts import CLASSES, SECTOR, class_of  # noqa: E402 - found by the line above
from support.ptx.launch import Emulator, Launched, emulate  # noqa: E402
from tables import markdown_table  # noqa: E402

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


Counts = dict[str, Any]
"""Counts of a kernel: per packed token and key head if it is `GROWING`, else per launch for `HEADS` key heads.

- `instructions`: instructions of warps, by class.
- `touched`, `needed`: global-memory sectors that accesses touch, and that would hold as many bytes.
- `turns`, `least`: shared-memory wavefronts, and how many there would be without bank conflicts.
- `worst`: lines of Triton with most sectors and wavefronts beyond that.
"""
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


def views(preset: str, tokens: int) -> list[View]:
    """Keys and values of a layer with this many packed tokens."""
    plan = middle_layer(named_config(preset))
    return [encoded_side(plan, side, HEAD_DIM, torch.bfloat16, heads=HEADS, packed=tokens) for side in SIDES]


def stored_bytes(preset: str) -> float:
    """Stored bytes of a packed token's key and value in one head."""
    return sum(bytes_per_token(view.codec.fields) for view in views(preset, 128))


def launches(preset: str, tokens: int, emulator: Emulator) -> list[Launched]:
    """Launches of attention over this many packed tokens."""
    torch.manual_seed(0)
    keys, values = views(preset, tokens)
    for codec in (keys.codec, values.codec):
        # Files are mapped at any address, a GPU's memory is aligned.
        if isinstance(codec, CommVQCodec) and isinstance(codec.books, ResidualBooks):
            codec.books = replace(codec.books, books=codec.books.books.clone())
    query = torch.randn(1, HEADS * GROUPS, 1, HEAD_DIM).to(torch.bfloat16)
    emulator.launches.clear()
    with mock.patch.object(launch, "split_sizes", lambda packed, *_: (packed, 1)):
        launch.attend(AttentionCall.of(query, scaling=HEAD_DIM**-0.5), keys, values)
    return list(emulator.launches)


def counted(after: Launched, before: Launched | None, share: int) -> Counts:
    """Counts of a launch less those of the one before, divided by `share`."""
    classes, accesses, excess = (Counter[str]() for _ in range(3))
    classes.update(dict.fromkeys(CLASSES, 0))
    for number, instruction in enumerate(after.program.instructions):
        executed = after.executed[number] - (0 if before is None else before.executed[number])
        classes[class_of(instruction.op)] += int(executed)
        each = {
            kind: getattr(after.meter, kind)[number] - (0 if before is None else getattr(before.meter, kind)[number])
            for kind in ("requests", "touched", "needed", "turns", "least")
        }
        accesses.update(each)
        requests, touched, needed, turns, least = each.values()
        place = f"{instruction.source.rpartition(':')[0]} {instruction.op}"
        if requests and touched > needed:
            text = f"{touched / requests:.0f} per access where {needed / requests:.0f} would do"
            excess[f"sectors, {text}: {place}"] += touched - needed
        if turns > least > 0:
            excess[f"turns, {turns / least:.1f} times the least: {place}"] += turns - least
    figures = {kind: accesses[kind] / share for kind in ("touched", "needed", "turns", "least")}
    worst = [f"{count / share:,.2f} more {text}" for text, count in excess.most_common(5)]
    return {"instructions": {kind: count / share for kind, count in classes.items()}, **figures, "worst": worst}


def markdown(table: Table) -> str:
    """Markdown table, a line for each kernel whose work grows with the tokens."""
    lines = []
    for name, kernels in table.items():
        stored = stored_bytes(name)
        for kernel in filter(kernels.__contains__, GROWING):
            row = kernels[kernel]
            warps = [sum(row["instructions"].values()), *row["instructions"].values()]
            cells = [f"{name}, {kernel.removesuffix('_kernel')}"]
            cells += [f"{32 * count / (2 * HEAD_DIM):.2f}" for count in warps]
            cells.append(f"{stored:.0f} / {SECTOR * row['touched']:,.0f}")
            cells += [f"{row['touched'] / row['needed']:.2f}", f"{row['turns'] / row['least']:.2f}"]
            lines.append(cells)
    return markdown_table(["kernel", "all", *CLASSES, "bytes", "sectors", "turns"], lines)


def load() -> Table:
    table: Table = json.loads(RESULTS.read_text())["kernels"]
    return table


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Some of {', '.join(PRESETS)}; nothing is written.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Measure nothing; print the committed counts.")] = False,
) -> None:
    """Count instructions and memory accesses of attention's kernels; print a table and, without --only, write them."""
    if table:
        print(markdown(load()))
        return
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise typer.BadParameter("TRITON_INTERPRET=1 is set: kernels would be interpreted, not compiled")
    emulator = emulate(TARGET)
    emulator.counting = True
    measured: Table = {}
    for name in only or PRESETS:
        measured[name] = measure(name, emulator)
        for kernel, counts in measured[name].items():
            print(f"{name}, {kernel}", *counts["worst"], sep="\n  ", flush=True)
    print(markdown(measured))
    if not only:
        about = {"hardware": f"none: compiled for {TARGET} and emulated", "kernels": measured}
        write_json(RESULTS, about, torch.device("cpu"))


if __name__ == "__main__":
    typer.run(main)
