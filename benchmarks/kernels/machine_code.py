"""Compile every kernel ahead of time for GPUs that need not be present, and refuse registers that spill to memory.

    python benchmarks/kernels/machine_code.py --output benchmarks/results/kernels.json    # all variants, `make kernels`
    python benchmarks/kernels/machine_code.py --only kivi-2bit --target sm_90             # one of them

Kernels whose source has not changed come from Triton's cache (`TRITON_CACHE_DIR`).
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import triton
import typer
from kernel_variants import (
    NAMES,
    attention_launches,
    attention_variants,
    encode_launches,
    encode_variants,
    step_launches,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.triton_kernels.common import plan

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8",
}  # fmt: skip


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
"""Known stack bytes of a variant; more of them fail.

Queries and sums of two or four components, 512 numbers in all, or 256 in float32 (on sm_100 only), spill registers. The
8 bytes of an encoder are not a spill (158 registers, no load or store of the stack by its name): only their address is
taken, once. On sm_80 the step that encodes trellis codes keeps three numbers on the stack from its start to its end,
and attention over trellis codes keeps two at 3.5 bits on sm_90 and with `k3v2` on sm_100. KIVI at D = 256 keeps up to
twelve numbers, none of them in its loops. Keys of CommVQ keep six on sm_100 beside values of the paper's encoder."""


@dataclass(frozen=True)
class Figures:
    """Resources of a kernel on one target; registers and stack of each thread."""

    registers: int
    stack_bytes: int
    shared_bytes: int


Table = dict[str, dict[str, Figures]]
"""Figures by variant and target."""


def launching_for(target: str) -> AbstractContextManager[Any]:
    """Context in which launches have the arguments that they have on one of `TARGETS`."""
    return mock.patch.object(plan, "PORTABLE", TARGETS[target].backend == "hip")


def compile_for(kernel: Any, arguments: dict[str, Any], target: str) -> Figures:
    """Compile `kernel` as a launch with `arguments` would, for one of `TARGETS`.

    As at a launch, integers equal to 1 become constants, and multiples of 16 and aligned pointers are marked as
    divisible, unless the kernel opts out.
    """
    options = {
        name: arguments[name]
        for name in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
        if name in arguments
    }
    constants, signature, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        specialize = not parameter.do_not_specialize
        if parameter.is_constexpr or (specialize and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_of(value)
        items = (
            [((index, i), item) for i, item in enumerate(value)] if isinstance(value, tuple) else [((index,), value)]
        )
        specialize &= not parameter.do_not_specialize_on_alignment
        attributes |= {path: [["tt.divisibility", 16]] for path, item in items if specialize and _divisible(item)}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    plan.check_lanes(f"{kernel.__name__} for {target}", compiled.asm)
    check_sums(f"{kernel.__name__} for {target}", compiled.asm.get("ptx", ""))
    if "cubin" not in compiled.asm:
        registers, stack = (
            int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1])
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
        return Figures(registers, stack, compiled.metadata.shared)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", listing)
    if counts is None:
        raise RuntimeError(f"cuobjdump gave no resource usage for {target}: {listing[:200]}")
    registers, stack, local = (int(number) for number in counts.groups())
    return Figures(registers, stack + local, compiled.metadata.shared)


def check_sums(name: str, ptx: str) -> None:
    """Raise `RuntimeError` if a lane adds an unrounded product to what another lane sent it.

    The other lane does the reverse, so their sums of the same two products differ (`launch_options`).
    """
    sent = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)", ptx))
    if not sent.isdisjoint(re.findall(r"fma\.rn\.\w+\s+%\w+, \S+, \S+, (%\w+);", ptx)):
        raise RuntimeError(f"{name} sums unrounded products over lanes: launch it with fusion=False")


def _divisible(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return type(value) is int and value % 16 == 0


def _type_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, tuple):
        return tuple(_type_of(item) for item in value)
    return "fp32" if isinstance(value, float) else "i32"


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
    with launching_for(target):
        for name, variant in attention_variants().items():
            if not only or any(f"{part}{name}" in only for part in NAMES.values()):
                for part, call in attention_launches(variant).items():
                    table[f"{part}{name}"] = compile_for(*call, target)
        for name, call in step_launches().items():
            if not only or name in only:
                table[name] = compile_for(*call, target)
        for name, encoder in encode_variants().items():
            if not only or name in only:
                for number, call in enumerate(encode_launches(*encoder)):
                    table[name if number == 0 else f"{name}, {number + 1}"] = compile_for(*call, target)
    return table


def spills(table: Table) -> list[str]:
    """Variants that use more of the stack on a CUDA target than `KNOWN_STACK` allows."""
    return [
        f"{name} on {target}: {figures.stack_bytes} bytes of stack"
        for name, row in table.items()
        for target, figures in row.items()
        if target.startswith("sm_") and figures.stack_bytes > KNOWN_STACK.get(name, 0)
    ]


def save(table: Table, path: Path) -> None:
    """Write the figures as JSON, a line for each variant."""
    content = {
        "command": "python benchmarks/kernels/machine_code.py --output benchmarks/results/kernels.json",
        "hardware": "none: compiled ahead of time",
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("triton", "torch")},
    }
    head = json.dumps(content, indent=1).removesuffix("\n}")
    rows = (
        f"  {json.dumps(name)}: {json.dumps({t: asdict(f) for t, f in row.items()})}" for name, row in table.items()
    )
    write_atomically(path, f'{head},\n "kernels": {{\n' + ",\n".join(rows) + "\n }\n}\n")


def main(
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Names of the variants to compile; all by default.")] = None,
    target: Annotated[list[str] | None, typer.Option(help=f"Targets, of {', '.join(TARGETS)}.")] = None,
) -> None:
    """Compile the kernels ahead of time; fail if registers spill."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise typer.BadParameter("TRITON_INTERPRET=1 is set: the interpreter has no machine code")
    measured = measure(target or list(TARGETS), only or [])
    for name, row in measured.items():
        texts = (f"{t} {f.registers} registers, {f.shared_bytes / 1024:.0f} KiB shared" for t, f in row.items())
        print(f"{name}: {'; '.join(texts)}")
    if output is not None:
        save(measured, output)
    messages = spills(measured)
    print("\n".join(messages) or f"{len(measured)} kernels, no spills but the known ones")
    raise typer.Exit(1 if messages else 0)


if __name__ == "__main__":
    typer.run(main)
