"""Track the machine code of every kernel, compiled ahead of time; needs no GPU.

    python benchmarks/machine_code.py --output benchmarks/results/kernels.json   # all variants
    python benchmarks/machine_code.py --table                                    # the committed figures as Markdown
    python benchmarks/machine_code.py --check                                    # compile again and compare
    python benchmarks/machine_code.py --update --only kivi-2bit --target sm_90   # replace some of the committed figures

The tracked figure is instructions per element: SASS instructions of the loop over packed tokens times the lanes that
execute them, divided by the cached numbers that one iteration consumes, `BLOCK * (Dk + Dv)`. The rescaling of the sums,
which a branch skips unless a larger logit arrives, is not counted. The kernel also has loops over the dense segments:
to tell them apart it is compiled a second time with no sinks and no tail, as constants, which leaves only the packed
loop; the loop of the real kernel with the closest length is the packed one. CommVQ's has inner loops over rounds, whose
instructions are counted once per round.

Kernels whose source has not changed, and their machine code, come from Triton's cache (`TRITON_CACHE_DIR`).
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import platform
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import device_model
import sass
import torch
import typer
from compile_kernels import TARGETS, MachineCode, compile_for, launching_for
from kernel_variants import (
    NAMES,
    attention_launches,
    attention_variants,
    encode_launches,
    encode_variants,
    step_launches,
    stored_bytes,
)

from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.triton_kernels.attention import kernel as attention
from kvcache_compress.triton_kernels.decode import commvq

RESULTS = Path(__file__).parent / "results" / "kernels.json"
TOLERANCE = 0.05
"""Largest growth of the instructions per element that passes `--check`."""
KNOWN_STACK = {
    "prod-2.5bit, D=256": 528,
    "prod-2.5bit, float32": 48,
    "lloyd-max-2.5bit, D=256": 88,
    "kivi-4bit, D=256": 48,
    "encode keys of polarquant-3.4bit": 8,
    "encode values of polarquant-3.4bit": 8,
    "turboquant-3.5bit": 8,
    "turboquant-k3v2": 8,
    "write slots turboquant-2bit": 16,
    "commvq-paper": 24,
}
"""Stack bytes allowed by variant. Queries and sums of two or four components, 512 numbers in all, or 256 in float32 (on
sm_100 only), spill registers. The 8 bytes of an encoder are not a spill (158 registers, no load or store of the stack
by its name): only their address is taken, once. On sm_80 the step that encodes trellis codes keeps three numbers on
the stack from its start to its end, and attention over trellis codes keeps two at 3.5 bits on sm_90 and with `k3v2` on
sm_100. KIVI at D = 256 keeps up to twelve numbers, none of them in its loops. Keys of
CommVQ keep six on sm_100 beside values of the paper's encoder."""


LATENCY = 700
"""Clocks until a read of memory is there, under load: an assumption of the clocks in `LoopFigures`."""


@dataclass(frozen=True)
class LoopFigures:
    """One turn of the loop over packed tokens, as a warp executes it.

    Attributes:
        tokens: packed tokens of a turn.
        bytes: stored bytes of a token's keys and values in one head.
        warps, stages: of a program, and of the pipeline.
        instructions: instructions, and `pipes`: those of each pipe (`sass.py`).
        clocks: clocks of a warp alone, and `clocks_without_memory`: the same if memory answered at once.
    """

    tokens: int
    bytes: float
    warps: int
    stages: int
    instructions: int
    pipes: dict[str, int]
    clocks: int
    clocks_without_memory: int


@dataclass(frozen=True)
class Figures:
    """Resources of one kernel on one target; no instructions on AMD, for which Triton has no disassembler."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions_per_element: float | None = None
    loop: LoopFigures | None = None


Table = dict[str, dict[str, Figures]]
"""Figures by variant and target."""


def packed_loop(
    kernel: Any, arguments: dict[str, Any], stored: float, code: MachineCode, target: str
) -> LoopFigures | None:
    """The loop over packed tokens of `stored` bytes each, inner loops over rounds included."""
    turns = inner_turns(arguments)
    candidates = [loop for loop in code.loops if len(loop.inner) == len(turns)]
    if not candidates:
        return None
    alone = compile_for(kernel, {**arguments, "n_sinks": 0, "n_tail": 0}, target, constant=("n_sinks", "n_tail")).loops
    if len(alone) != 1 or len(alone[0].inner) != len(turns):
        return None
    path = min(candidates, key=lambda loop: abs(loop.instructions - alone[0].instructions)).path(turns)
    return LoopFigures(
        arguments["BLOCK"], stored, code.warps, arguments["num_stages"],
        len(path), sass.pipes(path), sass.clocks(path, LATENCY), sass.clocks(path, 0),
    )  # fmt: skip


def inner_turns(arguments: dict[str, Any]) -> list[int]:
    """Iterations of the loops inside the one over packed tokens.

    CommVQ has two per tile of keys and group of values, over runs of rounds and over the rounds left, here as many as
    fit.
    """
    turns = []
    if arguments["SCORE"] is commvq.score:
        books = arguments["K"].meta
        turns += _turns(books, 2 * books.bits) * (len(arguments["K"].widths) // 2)
    if arguments["ACCUMULATE"] is commvq.accumulate:
        books = arguments["V"].meta
        turns += _turns(books, books.bits) * books.groups
    return turns


def _turns(books: Any, bits: int) -> list[int]:
    rounds, turn = 8 * books.row // (bits * books.groups), commvq.rounds_at_once(bits)
    return [rounds // turn, rounds % turn]


def measure(targets: list[str], only: list[str]) -> Table:
    """Compile the variants named in `only` for `targets`, or else all variants for several targets at a time."""
    workers = min(len(targets), os.cpu_count() or 1)
    if only or workers == 1:
        tables = [measure_target(target, only) for target in targets]
    else:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            tables = list(pool.map(measure_target, targets, [only] * len(targets)))
    return {
        name: {target: table[name] for target, table in zip(targets, tables, strict=True) if name in table}
        for name in dict.fromkeys(name for table in tables for name in table)
    }


def measure_target(target: str, only: list[str]) -> dict[str, Figures]:
    """Figures by variant on one target."""
    torch.manual_seed(0)
    table: dict[str, Figures] = {}

    def add(name: str, kernel: Any, arguments: dict[str, Any], stored: float = 0) -> None:
        code = compile_for(kernel, arguments, target)
        looped = kernel is attention.attend_kernel
        loop = packed_loop(kernel, arguments, stored, code, target) if looped else None
        density = None
        if loop is not None:
            numbers = loop.tokens * sum(arguments[side].dim for side in ("K", "V"))
            density = round(loop.instructions * 32 * loop.warps / numbers, 2)
        table[name] = Figures(code.registers, code.stack_bytes, code.shared_bytes, density, loop)

    with launching_for(target):
        for name, variant in attention_variants().items():
            if not only or any(f"{part}{name}" in only for part in NAMES.values()):
                for part, call in attention_launches(variant).items():
                    add(f"{part}{name}", *call, stored_bytes(variant))
        for name, call in step_launches().items():
            if not only or name in only:
                add(name, *call)
        for name, encoder in encode_variants().items():
            if not only or name in only:
                for number, (kernel, arguments) in enumerate(encode_launches(*encoder)):
                    add(name if number == 0 else f"{name}, {number + 1}", kernel, arguments)
    return table


def problems(table: Table, committed: Table) -> list[str]:
    """Problems that fail `--check`: stack on CUDA targets, variants without committed figures, and slower loops."""
    messages = []
    for name, targets in table.items():
        for target, now in targets.items():
            if target.startswith("sm_") and now.stack_bytes > KNOWN_STACK.get(name, 0):
                messages.append(f"{name} on {target}: {now.stack_bytes} bytes of stack")
            before = committed.get(name, {}).get(target)
            if before is None:
                messages.append(f"{name} on {target}: no committed figures")
            elif before.instructions_per_element and not now.instructions_per_element:
                messages.append(f"{name} on {target}: its loop was not found")
            elif now.instructions_per_element and before.instructions_per_element:
                growth = now.instructions_per_element / before.instructions_per_element - 1
                if growth > TOLERANCE:
                    messages.append(f"{name} on {target}: {growth:.0%} more instructions per element")
    return messages


def load(path: Path) -> Table:
    kernels = json.loads(path.read_text())["kernels"]
    return {
        name: {
            target: Figures(**figures | {"loop": (loop := figures.get("loop")) and LoopFigures(**loop)})
            for target, figures in targets.items()
        }
        for name, targets in kernels.items()
    }


def save(table: Table, path: Path) -> None:
    versions = {name: importlib.metadata.version(name) for name in ("triton", "torch")}
    content = {
        "command": "python benchmarks/machine_code.py --output benchmarks/results/kernels.json",
        "hardware": "none: compiled ahead of time",
        "versions": {"python": platform.python_version(), **versions},
        "kernels": {
            name: {target: _without_none(asdict(targets[target])) for target in TARGETS if target in targets}
            for name, targets in table.items()
        },
    }
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def _without_none(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if value is not None}


def markdown(table: Table) -> str:
    """Markdown table, a line per variant: `registers / shared KiB / instructions per element` on each target."""
    targets = list(next(iter(table.values())))
    lines = [f"| kernel | {' | '.join(targets)} |", f"|---|{'---|' * len(targets)}"]
    for name, row in table.items():
        cells = []
        for figures in row.values():
            parts = [str(figures.registers), f"{figures.shared_bytes / 1024:.0f}"]
            if figures.instructions_per_element:
                parts.append(f"**{figures.instructions_per_element:.1f}**")
            cells.append(" / ".join(parts) + (f" (stack {figures.stack_bytes})" if figures.stack_bytes else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pipes_table(table: Table, target: str = "sm_90") -> str:
    """Markdown table, a line per loop over packed tokens on one target: what it takes of a processor, and its speed.

    Numbers of a pipe are instructions per cached number, so that a budget is `lanes per clock / that`.
    """
    shapes = {"1 x 8K": (1, 8192), "1 x 128K": (1, 131072), "8 x 32K": (8, 32768), "32 x 32K": (32, 32768)}
    kinds = [*sass.PIPES, "other"]
    columns = ["kernel", "registers", "warps", "stages", *kinds, "clocks", *shapes, "bound"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, targets in table.items():
        figures = targets.get(target)
        if figures is None or figures.loop is None or not figures.instructions_per_element:
            continue
        loop, row = figures.loop, asdict(figures)
        per_number = figures.instructions_per_element / loop.instructions
        cells = [name, figures.registers, device_model.resident_warps(row, loop.warps), loop.stages]
        cells += [f"{count * per_number:.2f}" for count in loop.pipes.values()]
        cells.append(f"{loop.clocks_without_memory} / {loop.clocks}")
        for batch, tokens in shapes.values():
            stored = batch * device_model.HEADS * tokens * loop.bytes
            prediction = device_model.predict(row, stored, tokens=tokens, heads=device_model.HEADS, batch=batch)
            cells.append(f"{prediction.share:.0%}")
        lines.append(f"| {' | '.join(map(str, [*cells, prediction.bound]))} |")
    return "\n".join(lines)


def main(
    output: Annotated[Path | None, typer.Option(help="Compile everything and write the figures here.")] = None,
    update: Annotated[bool, typer.Option("--update", help="Replace committed figures by what is compiled.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compile and compare with the committed figures.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Print the committed figures as Markdown.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Names of the variants to compile.")] = None,
    target: Annotated[list[str] | None, typer.Option(help=f"Targets, of {', '.join(TARGETS)}.")] = None,
) -> None:
    """Compile the kernels ahead of time and record registers, stack, shared memory and instructions per element."""
    if table:
        committed = load(RESULTS)
        print(f"{markdown(committed)}\n\n{pipes_table(committed)}")
        return
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise typer.BadParameter("TRITON_INTERPRET=1 is set: the interpreter has no machine code")
    measured = measure(target or list(TARGETS), only or [])
    if output is not None:
        save(measured, output)
    if update:
        committed = load(RESULTS)
        save(committed | {name: committed.get(name, {}) | targets for name, targets in measured.items()}, RESULTS)
    if check:
        committed = load(RESULTS)
        messages = problems(measured, committed)
        missing = [] if only else [name for name in committed if name not in measured]
        messages += [f"{name}: committed, but no longer a variant" for name in missing]
        print("\n".join(messages) or f"{len(measured)} kernels as committed")
        raise typer.Exit(1 if messages else 0)


if __name__ == "__main__":
    typer.run(main)
