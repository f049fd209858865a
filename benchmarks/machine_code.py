"""Machine code of every kernel, compiled ahead of time; needs no GPU.

    python benchmarks/machine_code.py --output benchmarks/results/kernels.json   # all variants, about forty minutes
    python benchmarks/machine_code.py --table                                    # the committed figures as Markdown
    python benchmarks/machine_code.py --check                                    # compile again and compare

The tracked figure is instructions per element: SASS instructions of the loop over packed tokens times the lanes that
execute them, divided by the cached numbers that one turn of the loop consumes, `BLOCK * (Dk + Dv)`; the rescaling of
the sums, which a branch skips unless a larger logit came, is not counted. The kernel has
loops over the dense segments as well. To tell them apart it is compiled a second time with no sinks and no tail, as
constants, which leaves the packed loop alone; the loop of the real kernel whose length comes nearest is the packed one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_compress.bench.layers import build_codec, encoded_side, middle_layer
from kvcache_compress.checks import LONGEST
from kvcache_compress.codec import MethodOptions, Side
from kvcache_compress.config import load_config, preset_names
from kvcache_compress.fixed_step import StepBuffers, Windows
from kvcache_compress.registry import get_method
from kvcache_compress.side import SideState
from kvcache_compress.slots import Slots
from kvcache_compress.store import PackedStore
from kvcache_compress.triton_kernels import aot, attention, launch
from kvcache_compress.triton_kernels.append import append_arguments, append_inputs, append_kernel
from kvcache_compress.triton_kernels.encode import exact_precision, flush
from kvcache_compress.triton_kernels.query import map_query_arguments, map_query_kernel
from kvcache_compress.view import SideSegments

RESULTS = Path(__file__).parent / "results" / "kernels.json"
TOLERANCE = 0.05
"""Largest growth of the instructions per element that `--check` lets pass."""
KNOWN_STACK = {"prod-2.5bit, D=256": 528, "prod-2.5bit, float32": 48, "turboquant-2.5bit, D=256": 88}
"""Variants that spill, and the bytes that are allowed: queries and sums of two or four components, 512 numbers in all,
or 256 of float32 (on sm_100 only), take more registers than there are."""


@dataclass(frozen=True)
class Variant:
    """A pair of codecs and the tensors that it meets: `groups` query heads per head, `count` queries.

    even: whether tokens fill the tiles, so that the kernel needs no masks.
    """

    keys: tuple[str, MethodOptions]
    values: tuple[str, MethodOptions]
    head_dim: int = 128
    groups: int = 4
    count: int = 1
    dtype: torch.dtype = torch.bfloat16
    even: bool = True


@dataclass(frozen=True)
class Figures:
    """Resources of one kernel on one target; Triton brings no disassembler for AMD's, so those have no instructions."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions_per_element: float | None = None


Table = dict[str, dict[str, Figures]]
"""Figures by variant and target."""


def side_of(method: str, **options: Any) -> tuple[str, MethodOptions]:
    return method, get_method(method).Options(**options)


def attention_variants() -> dict[str, Variant]:
    """Every preset's pair, and the pairs and sizes that presets do not reach."""
    variants = {}
    for name in preset_names():
        plan = middle_layer(load_config(name))
        variants[name] = Variant((plan.keys.method, plan.keys.options()), (plan.values.method, plan.values.options()))
    del variants["turboquant-mixed"]
    uniform, four = side_of("turboquant", bits=4, codebook="uniform"), side_of("turboquant", bits=4)
    prod = {bits: side_of("turboquant", bits=bits, estimator="prod") for bits in (2, 2.5, 3)}
    kivi_side, none = side_of("kivi", bits=4), side_of("none")
    table = side_of("polarquant_rope", radius_scale="channel", reconstruction="edge", score_function="table")
    exact = {"dtype": torch.float32}
    return variants | {
        "uniform-4bit": Variant(uniform, uniform),
        "prod-k3v2": Variant(prod[3], prod[2]),
        "prod-2.5bit": Variant(prod[2.5], prod[2.5]),
        "turboquant-4bit and kivi-4bit": Variant(four, kivi_side),
        "turboquant-6bit and none": Variant(side_of("turboquant", bits=6), none),
        "none and turboquant-1bit": Variant(none, side_of("turboquant", bits=1)),
        "polarquant-rope-paper-m4n4, table": Variant(table, none),
        "turboquant-4bit, uneven": Variant(four, four, even=False),
        "turboquant-4bit, 16 queries": Variant(four, four, count=16),
        "kivi-4bit, 16 queries": Variant(kivi_side, kivi_side, count=16),
        "turboquant-4bit, D=64": Variant(four, four, 64),
        "kivi-4bit, D=64": Variant(kivi_side, kivi_side, 64),
        "prod-k3v2, D=64": Variant(prod[3], prod[2], 64),
        "turboquant-4bit, D=96": Variant(four, four, 96),
        "turboquant-4bit, D=256": Variant(four, four, 256),
        "kivi-4bit, D=256": Variant(kivi_side, kivi_side, 256),
        "turboquant-2.5bit, D=256": Variant(side_of("turboquant", bits=2.5), side_of("turboquant", bits=2.5), 256),
        "prod-2.5bit, D=256": Variant(prod[2.5], prod[2.5], 256),
        "prod-k3v2, D=256": Variant(prod[3], prod[2], 256),
        "turboquant-4bit, float32": Variant(four, four, **exact),
        "turboquant-4bit, D=64, float32": Variant(four, four, 64, **exact),
        "kivi-4bit, float32": Variant(kivi_side, kivi_side, **exact),
        "prod-2.5bit, float32": Variant(prod[2.5], prod[2.5], **exact),
        "prod-k3v2, D=64, float32": Variant(prod[3], prod[2], 64, **exact),
    }


def segments(variant: Variant, side: Side) -> SideSegments:
    method, options = variant.keys if side == "keys" else variant.values
    return encoded_side(method, options, side, variant.head_dim, variant.dtype)


def attention_arguments(variant: Variant, amd: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Arguments of `attend_kernel`, of `merge_kernel` for many splits, and of `map_query_kernel`, as launched."""
    keys, values = segments(variant, "keys"), segments(variant, "values")
    query = torch.zeros(1, 2 * variant.groups, variant.count, variant.head_dim, dtype=variant.dtype)
    _, mapping = map_query_arguments(query, keys.codec.kernel_side(), 2, 0.1)
    sizes = launch.sizes_of(query, keys, values)
    inputs = launch.attend_inputs(query, keys, values, None, sizes.split_tokens)
    _, attend = launch.attend_arguments(
        query, keys, values, *inputs, mapping, sizes, scaling=0.1, softcap=None, amd=amd
    )
    attend["EVEN"] &= variant.even
    out = torch.empty(1, variant.count, 2 * variant.groups, variant.head_dim, dtype=variant.dtype)
    return attend, launch.merge_arguments(query, keys, values, None, attend, launch.MAX_SPLITS, out)[1], mapping


def step_append_arguments() -> dict[str, Any]:
    """Arguments of `append_kernel` for a token's keys and values."""
    fresh, room = (torch.zeros(1, 2, 1, 128, dtype=torch.bfloat16) for _ in range(2))
    return append_arguments(append_inputs(fresh, fresh, room, room, 0))


def flush_launch() -> tuple[Any, dict[str, Any]]:
    """What encodes the tokens that leave a tail, and its arguments."""
    codec = build_codec(*side_of("turboquant", bits=4), "keys", 128, 2, torch.bfloat16)
    tail = torch.randn(1, 2, 96, 128).bfloat16()
    codec.prepare(tail)
    fields = PackedStore(codec.fields, 1, 2, tail.device).room(32, growing=True)
    good, encoder = torch.ones(4, dtype=torch.int32), codec.kernel_encoder()
    assert encoder is not None
    call = functools.partial(flush, encoder, tail, 32, 64, fields, 0, torch.empty_like(tail), good, LONGEST)
    ((kernel, arguments),) = aot.captured_launches(call)
    return kernel, arguments


def fixed_step_launches(keys: tuple[str, MethodOptions]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The kernels of a step of fixed capacity that a growing cache does without, and their arguments."""
    sides: dict[Side, SideState] = {}
    tokens = torch.randn(1, 2, 512, 128).bfloat16()
    both: tuple[Side, Side] = ("keys", "values")
    for side in both:
        method = keys if side == "keys" else side_of("turboquant", bits=4)
        codec = build_codec(*method, side, 128, 2, torch.bfloat16)
        sides[side] = SideState(codec, tokens, 96, None)
        sides[side].prepare(tokens)
        sides[side].store.fix(512)
    buffers = StepBuffers(sides, Windows(16, 480, 112, 64, 32, 496))
    slots = Slots(16, 480, 112, 496, buffers.length, buffers.packed)
    layer = (
        SideSegments(buffers.sinks[side], state.store, 480, buffers.ring[side], 112, state.codec, None, buffers.packed)
        for side, state in sides.items()
    )

    def step() -> None:
        buffers.step(sides, dict.fromkeys(both, tokens[:, :, :1]), "triton", None)
        launch.attend(tokens[:, :, :1].repeat(1, 2, 1, 1), *layer, None, scaling=0.1, slots=slots)

    names = {"write_slots_kernel": "write slots", "store_groups_kernel": "store groups", "map_step_kernel": "map step"}
    launches = ((kernel.__name__, (kernel, arguments)) for kernel, arguments in aot.captured_launches(step))
    return {names[name]: call for name, call in launches if name in names}


def encode_variants() -> dict[str, tuple[Side, str, MethodOptions, int]]:
    """Every method's encoders, from its presets (the same codec once), and scalars and sizes beyond them."""
    variants: dict[str, tuple[Side, str, MethodOptions, int]] = {}
    known: list[tuple[Side, MethodOptions]] = []
    pairs = [(name, variant) for name, variant in attention_variants().items() if variant.head_dim == 128]
    sides: list[tuple[str, Side, str, MethodOptions]] = [(name, "keys", *variant.keys) for name, variant in pairs]
    sides += [(name, "values", *variant.values) for name, variant in pairs]
    # Named after a preset of the method itself, where there is one.
    for name, side, method, options in sorted(sides, key=lambda item: not item[0].startswith(item[2].split("_")[0])):
        if method != "none" and (side, options) not in known:
            known.append((side, options))
            variants[f"encode {side} of {name}"] = (side, method, options, 128)
    for bits, scalar, width in ((3, "norm", 64), (6, "least_squares", 256)):
        name = f"encode turboquant-{bits}bit {scalar}, D={width}"
        variants[name] = ("keys", *side_of("turboquant", bits=bits, scalar=scalar), width)
    return variants


def encode_launches(side: Side, method: str, options: MethodOptions, head_dim: int) -> list[tuple[Any, dict[str, Any]]]:
    """Kernels that encode 512 tokens launches, and their arguments."""
    codec = build_codec(method, options, side, head_dim, 2, torch.bfloat16)
    tokens = torch.randn(1, 2, 512, head_dim).bfloat16()
    codec.prepare(tokens)
    rope = (torch.ones(1, 512, head_dim // 2), torch.zeros(1, 512, head_dim // 2))
    return aot.captured_launches(lambda: codec.encode(tokens, rope, "triton"))


def packed_loop(arguments: dict[str, Any], code: aot.MachineCode, target: str) -> float | None:
    """Instructions per cached element of the loop over packed tokens; None where it has loops of its own inside."""
    if not code.loops:
        return None
    alone = aot.compile_for(
        attention.attend_kernel, {**arguments, "n_sinks": 0, "n_tail": 0}, target, constant=("n_sinks", "n_tail")
    )
    if len(alone.loops) > 1:
        return None
    length = min(code.loops, key=lambda loop: abs(loop - max(alone.loops)))
    return round(length * 32 * code.warps / (arguments["BLOCK"] * (arguments["DK"] + arguments["DV"])), 2)


def measure(targets: list[str], only: list[str]) -> Table:
    """Compiles the variants whose names are in `only` (all where it is empty) for `targets`."""
    table: Table = {}

    def add(name: str, target: str, kernel: Any, arguments: dict[str, Any]) -> None:
        if arguments.get("PRECISION") == exact_precision(amd=False):
            arguments = arguments | {"PRECISION": exact_precision(amd=target.startswith("gfx"))}
        code = aot.compile_for(kernel, arguments, target)
        density = packed_loop(arguments, code, target) if kernel is attention.attend_kernel else None
        table.setdefault(name, {})[target] = Figures(code.registers, code.stack_bytes, code.shared_bytes, density)

    steps = fixed_step_launches(side_of("turboquant", bits=4)) | {"flush": flush_launch()}
    steps["store groups"] = fixed_step_launches(side_of("qjl"))["store groups"]
    for target in targets:
        for name, variant in attention_variants().items():
            names = name, f"merge {name}", f"map query {name}"
            if not only or any(part in only for part in names):
                kernels = attention.attend_kernel, attention.merge_kernel, map_query_kernel
                arguments = attention_arguments(variant, amd=target.startswith("gfx"))
                for part, kernel, given in zip(names, kernels, arguments, strict=True):
                    add(part, target, kernel, given)
        if not only or "append" in only:
            add("append", target, append_kernel, step_append_arguments())
        for name, call in steps.items():
            if not only or name in only:
                add(name, target, *call)
        for name, encoder in encode_variants().items():
            if not only or name in only:
                for number, (kernel, arguments) in enumerate(encode_launches(*encoder)):
                    add(name if number == 0 else f"{name}, {number + 1}", target, kernel, arguments)
    return table


def problems(table: Table, committed: Table) -> list[str]:
    """What `--check` refuses: stack on CUDA targets, figures missing from the committed ones, and slower loops."""
    found = []
    for name, targets in table.items():
        for target, now in targets.items():
            if target.startswith("sm_") and now.stack_bytes > KNOWN_STACK.get(name, 0):
                found.append(f"{name} on {target}: {now.stack_bytes} bytes of stack")
            before = committed.get(name, {}).get(target)
            if before is None:
                found.append(f"{name} on {target}: no committed figures")
            elif now.instructions_per_element and before.instructions_per_element:
                growth = now.instructions_per_element / before.instructions_per_element - 1
                if growth > TOLERANCE:
                    found.append(f"{name} on {target}: {growth:.0%} more instructions per element")
    return found


def load(path: Path) -> Table:
    kernels = json.loads(path.read_text())["kernels"]
    return {
        name: {target: Figures(**figures) for target, figures in targets.items()} for name, targets in kernels.items()
    }


def save(table: Table, path: Path) -> None:
    versions = {name: importlib.metadata.version(name) for name in ("triton", "torch")}
    content = {
        "command": "python benchmarks/machine_code.py --output benchmarks/results/kernels.json",
        "hardware": "none: compiled ahead of time",
        "versions": {"python": platform.python_version(), **versions},
        "kernels": {
            name: {target: asdict(figures) for target, figures in targets.items()} for name, targets in table.items()
        },
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def markdown(table: Table) -> str:
    """One line per variant: `registers / shared KiB / instructions per element` on each target."""
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


def main(
    output: Annotated[Path | None, typer.Option(help="Compile everything and write the figures here.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Compile and compare with the committed figures.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Print the committed figures as Markdown.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Names of the variants to compile.")] = None,
    target: Annotated[list[str] | None, typer.Option(help=f"Targets, of {', '.join(aot.TARGETS)}.")] = None,
) -> None:
    """Compiles the kernels ahead of time and records registers, stack, shared memory and instructions per element."""
    if table:
        print(markdown(load(RESULTS)))
        return
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise typer.BadParameter("TRITON_INTERPRET=1 is set: the interpreter has no machine code")
    torch.manual_seed(0)
    measured = measure(target or list(aot.TARGETS), only or [])
    if output is not None:
        save(measured, output)
    if check:
        committed = load(RESULTS)
        found = problems(measured, committed)
        missing = [] if only else [name for name in committed if name not in measured]
        found += [f"{name}: committed, but no variant any more" for name in missing]
        print("\n".join(found) or f"{len(measured)} kernels as committed")
        raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
