"""Compile kernels ahead of time for GPUs that need not be present, and read their machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from sass import Loop, loops, read
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

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


@dataclass(frozen=True)
class MachineCode:
    """Resources of a compiled kernel; registers and stack per thread."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    loops: tuple[Loop, ...]
    """Outermost loops; empty on AMD targets."""
    warps: int


def launching_for(target: str) -> AbstractContextManager[Any]:
    """Context in which launches have the arguments that they have on one of `TARGETS`."""
    return mock.patch.object(plan, "PORTABLE", TARGETS[target].backend == "hip")


def captured_launches(call: Callable[[], Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Record kernel and arguments of every launch that `call` makes, running none; `call` sees empty results."""
    launches: list[tuple[Any, dict[str, Any]]] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((kernel, dict(zip((p.name for p in kernel.params), args, strict=False)) | kwargs))

    with mock.patch.object(triton.JITFunction, "run", record):
        call()
    return launches


def compile_for(kernel: Any, arguments: dict[str, Any], target: str, constant: tuple[str, ...] = ()) -> MachineCode:
    """Compile `kernel` as a launch with `arguments` would, for one of `TARGETS`.

    As at a launch, integers equal to 1 become constants, and multiples of 16 and aligned pointers are marked as
    divisible, unless the kernel opts out. The arguments named in `constant` become constants as well.
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
        if parameter.is_constexpr or parameter.name in constant or (specialize and type(value) is int and value == 1):
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
    warps = compiled.metadata.num_warps
    if "cubin" not in compiled.asm:
        registers, stack = (
            int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1])
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
        return MachineCode(registers, stack, compiled.metadata.shared, (), warps)
    listing = _listing(compiled)
    counts = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", listing)
    if counts is None:
        raise RuntimeError(f"cuobjdump gave no resource usage for {target}: {listing[:200]}")
    registers, stack, local = (int(number) for number in counts.groups())
    return MachineCode(registers, stack + local, compiled.metadata.shared, loops(read(listing)), warps)


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


def _listing(compiled: Any) -> str:
    """Resource usage and machine code as `cuobjdump` prints them, kept beside the kernel in Triton's cache."""
    cache = get_cache_manager(compiled.hash)
    kept = cache.get_file("listing.sass")
    if kept is not None:
        return Path(kept).read_text(encoding="utf-8")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        options = "--dump-resource-usage", "--dump-sass"
        listing = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout
    cache.put(listing, "listing.sass", binary=False)
    return listing
