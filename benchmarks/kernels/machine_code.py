"""Compile every kernel ahead of time for GPUs that need not be present, and refuse those that spill registers.

    python benchmarks/kernels/machine_code.py                                     # all of them, `make kernels`
    python benchmarks/kernels/machine_code.py --only kivi-2bit --target sm_90     # those of one preset

Kernels whose source has not changed come from Triton's cache (`TRITON_CACHE_DIR`).
"""

import copy
import math
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
import triton
import typer
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kvcache_compress import CompressedCache
from kvcache_compress.attention.interface import attention_forward, fused_name
from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.bench.layers import VARIANTS, Shape, single_layer, use_backend
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.config import preset_names
from kvcache_compress.storage.adaptive.eras import Era
from kvcache_compress.storage.paged import PagedStorage, Request, Step
from kvcache_compress.triton_kernels.common import plan

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WINDOWS = {"sink_tokens": 16, "recent_tokens": 64}
TOKENS = 719
"""Tokens of a prompt after which the second step is the first that packs tokens, for groups of up to 128."""
ATTENTION = ("map_query_kernel", "turn_kernel", "attend_kernel", "merge_kernel")


class Case(NamedTuple):
    """A cache and the calls of it whose kernels are compiled.

    Attributes:
        config: sides of the cache; the name of the case is a preset if it is None.
        head_dim, dtype: of keys and values; there are 2 key/value heads, and 4 query heads for each.
        queries: tokens of a step.
        everything: also compile the kernels that encode prompts and add tokens, not attention's alone.
        static: also compile the steps of a static cache, and attention over pages.
        eras: two eras of keys.
    """

    config: dict[str, Any] | None = None
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    queries: int = 1
    everything: bool = False
    static: bool = False
    eras: bool = False


def _pair(keys: dict[str, Any], values: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"keys": keys, "values": values or keys}


def _turboquant(bits: float, **options: Any) -> dict[str, Any]:
    return {"method": "turboquant", "bits": bits, **options}


_LLOYD, _PROD = {"codebook": "lloyd_max"}, {"estimator": "prod"}
_FOUR, _KIVI = _pair(_turboquant(4)), _pair({"method": "kivi", "bits": 4})
_K3V2 = _pair(_turboquant(3), _turboquant(2))
_PROD_K3V2, _PROD_2_5 = _pair(_turboquant(3, **_PROD), _turboquant(2, **_PROD)), _pair(_turboquant(2.5, **_PROD))
STATIC = (
    "turboquant-4bit", "turboquant-2bit", "polarquant-rope-4bit", "qjl-3bit", "polarquant-3.4bit", "spectral-2bit",
)  # fmt: skip
"""Presets whose steps with a static cache are compiled: one for each kind of encoder."""
CASES = {
    **{
        name: Case(everything=True, static=name in STATIC)
        for name in (*preset_names(), *VARIANTS)
        if name != "turboquant-mixed"
    },
    **{f"lloyd-max-{bits}bit": Case(_pair(_turboquant(bits, **_LLOYD)), everything=True) for bits in (2, 2.5, 3)},
    "uniform-2bit": Case(_pair(_turboquant(2, codebook="uniform")), everything=True),
    "prod-k3v2": Case(_PROD_K3V2),
    "prod-2.5bit": Case(_PROD_2_5),
    "turboquant-4bit and kivi-4bit": Case(_pair(_FOUR["keys"], _KIVI["keys"])),
    **{f"turboquant-{bits}bit and none": Case(_pair(_turboquant(bits), {"method": "none"})) for bits in (2, 6)},
    "none and lloyd-max-1bit": Case(_pair({"method": "none"}, _turboquant(1, **_LLOYD))),
    **{
        f"{name}, eras": Case(_pair(keys, _turboquant(4)), eras=True)
        for name, keys in {
            "turboquant-4bit": _FOUR["keys"], "turboquant-2bit": _turboquant(2), "qjl-3bit": {"method": "qjl"},
            "polarquant-3.4bit": {"method": "polarquant_recursive"}, "spectral-2bit": {"method": "spectral", "bits": 2},
        }.items()
    },
    **{
        f"spectral-{keys}bit and turboquant-{values}bit": Case(
            _pair({"method": "spectral", "bits": keys}, _turboquant(values)), everything=True
        )
        for keys, values in ((1, 1), (1.5, 3), (3.5, 5), (5, 6), (6, 3))  # widths that bits by layer may choose
    },
    "turboquant-4bit, 16 queries": Case(_FOUR, queries=16),
    "kivi-4bit, 16 queries": Case(_KIVI, queries=16),
    "turboquant-2bit, 16 queries": Case(_pair(_turboquant(2)), queries=16),
    "turboquant-4bit, D=256, 16 queries": Case(_FOUR, 256, queries=16),
    "spectral-2bit, 16 queries": Case(_pair({"method": "spectral", "bits": 2}, _turboquant(2)), queries=16),
    **{
        f"{name}, D={head_dim}": Case(config, head_dim)
        for head_dim, configs in {
            64: {
                "turboquant-4bit": _FOUR, "kivi-4bit": _KIVI, "prod-k3v2": _PROD_K3V2, "turboquant-k3v2": _K3V2,
                "spectral-k2v3": _pair({"method": "spectral", "bits": 2}, _turboquant(3)),
            },
            96: {"turboquant-4bit": _FOUR},
            256: {
                "turboquant-4bit": _FOUR, "kivi-4bit": _KIVI, "prod-k3v2": _PROD_K3V2, "prod-2.5bit": _PROD_2_5,
                "lloyd-max-2.5bit": _pair(_turboquant(2.5, **_LLOYD)),
                "turboquant-k3v2": _K3V2, "qjl and turboquant-3bit": _pair({"method": "qjl"}, _turboquant(3)),
                "spectral-k3v2": _pair({"method": "spectral", "bits": 3}, _turboquant(2)),
            },
        }.items()
        for name, config in configs.items()
    },
    **{
        f"{name}, float32": Case(config, dtype=torch.float32)
        for name, config in {"turboquant-4bit": _FOUR, "kivi-4bit": _KIVI, "prod-2.5bit": _PROD_2_5}.items()
    },
    "encode norms, D=64": Case(_pair(_turboquant(3, scalar="norm")), 64, everything=True),
    "encode unbiased, D=256": Case(_pair(_turboquant(6, scalar="unbiased")), 256, everything=True),
}  # fmt: skip
KNOWN_STACK = {
    "prod-2.5bit, float32: attend_kernel": 40,
    "lloyd-max-2.5bit, D=256: attend_kernel": 8,
    "commvq-paper: attend_kernel": 24,
    "commvq-1bit: attend_kernel": 8,
    "kivi-4bit, D=64: merge_kernel": 8,
    "polarquant-3.4bit: encode_kernel": 8,
    "turboquant-2bit: step_kernel": 32,
    "qjl-3bit: step_kernel": 32,
    "spectral-2bit: step_kernel": 8,
    "spectral-2bit, 16 queries: attend_kernel": 16,
}
"""Known stack bytes of a kernel; more of them fail.

Steps keep up to eight numbers there while they encode (sm_80), the encoder only an address. Attention of 16 masked
queries to spectral keys reads one number per tile (sm_100). The rest is unexamined."""


class Figures(NamedTuple):
    """Resources of a kernel on one target; stack and registers of each thread."""

    stack_bytes: int
    registers: int
    shared_bytes: int


Table = dict[str, Figures]
"""Figures by the name of a case and of a kernel; the largest, where a case has several variants of one kernel."""


@contextmanager
def compiling(target: str, kernels: Collection[str] | None) -> Iterator[list[Any]]:
    """Compile launches in this context for a target, of some kernels or all, and run none: results are uninitialised.

    Plans made for another target are forgotten.
    """
    compiled, run = [], triton.JITFunction.run

    def record(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        if kernels is None or kernel.__name__ in kernels:
            compiled.append(run(kernel, *args, warmup=True, **kwargs))

    own = TARGETS[target]
    # A driver for a device that is not there; Triton keeps compiled kernels by device.
    device = {"get_current_device": lambda: own.arch, "get_current_stream": lambda _: 0}
    driver.set_active(SimpleNamespace(**device, get_current_target=lambda: own))
    with (
        mock.patch.object(plan, "PORTABLE", own.backend == "hip"),
        mock.patch.dict(plan._plans, clear=True),
        mock.patch.object(triton.JITFunction, "run", record),
    ):
        yield compiled


@torch.inference_mode()
def compiled_kernels(name: str, target: str) -> list[Any]:
    """Compiled kernels of a case: of its prompt, and of two steps each in growing and static caches."""
    case = CASES[name]
    model, config = single_layer(case.config or name, Shape(8, 2, case.head_dim))
    config = config.changed(**WINDOWS)
    model._attn_implementation = fused_name("sdpa")  # so that the cache hands over views
    module: Any = SimpleNamespace(config=model, is_causal=True, num_key_value_groups=4)

    def random(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, case.head_dim).to(case.dtype)

    found: list[Any] = []
    for capacity in (None, 2048) if case.static else (None,):
        cache = CompressedCache(model, config.changed(max_cache_len=capacity, backend="torch"))
        keys, values = cache.update(random(2, TOKENS), random(2, TOKENS), 0)
        attention_forward(module, random(8, TOKENS), keys, values, None, scaling=0.1)
        layer = cache.layers[0]
        use_backend(layer, "triton")
        with compiling(target, None if case.everything else ATTENTION) as compiled:
            for masked in (False, True):
                keys, values = cache.update(random(2, case.queries), random(2, case.queries), 0)
                if case.eras:
                    keys = replace(keys, eras=(*keys.eras, Era(layer.flush_tokens, copy.copy(keys.codec))))
                mask = torch.ones(1, 1, case.queries, keys.tokens, dtype=torch.bool) if masked else None
                keys.attend(AttentionCall.of(random(8, case.queries), mask, scaling=0.1), values)
            for state in layer.sides.values() if case.everything else ():
                tokens = random(2, 4 * layer.flush_tokens)
                BACKENDS["triton"].encoded(state.codec, tokens, state.rope(0, tokens.shape[2]))
        found += compiled
        if case.static and capacity is None:
            found += paged_kernels(layer, random(8, 1), target)
    return found


def paged_kernels(layer: CompressedLayer, query: torch.Tensor, target: str) -> list[Any]:
    """Compiled kernels of a decode step over pages, with a layer's codecs."""
    assert layer.storage is not None
    codecs, windows = {side: state.codec for side, state in layer.sides.items()}, layer.storage.windows
    page, heads, blocks = math.lcm(64, windows.group), layer.sides["keys"].sinks.shape[1], list(range(4))

    def zeros(*shape: int, dtype: torch.dtype = query.dtype) -> torch.Tensor:
        return torch.zeros(len(blocks), heads, *shape, dtype=dtype)

    pools = {
        side: tuple(zeros(page // x.tokens, *x.shape, dtype=x.dtype) for x in codec.fields)
        for side, codec in codecs.items()
    }
    dim, ring = query.shape[3], windows.recent + windows.flush
    sinks, tails = ({side: zeros(count, dim) for side in codecs} for count in (windows.sinks, ring))
    storage = PagedStorage(codecs, pools, sinks, tails, windows, page, BACKENDS["triton"], layer.track)
    request = Request(0, blocks, windows.sinks + 2 * page + windows.recent, 2 * page)
    step = Step([(request, 1)], windows, page, query.device)
    fresh = query[:, :heads]
    with compiling(target, (*ATTENTION, "step_kernel")) as compiled:
        storage.append(step, fresh, fresh)
        storage.attend(step, AttentionCall.of(query, scaling=0.1))
    return compiled


def figures_of(compiled: Any, target: str) -> Figures:
    """Check a compiled kernel and read its resources."""
    plan.check_lanes(f"{compiled.name} for {target}", compiled.asm)
    check_sums(f"{compiled.name} for {target}", compiled.asm.get("ptx", ""))
    if "cubin" not in compiled.asm:
        registers, stack = (
            int(re.findall(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[0])
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
        return Figures(stack, registers, compiled.metadata.shared)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", listing)
    if counts is None:
        raise RuntimeError(f"cuobjdump gave no resource usage for {target}: {listing[:200]}")
    registers, stack, local = (int(number) for number in counts.groups())
    return Figures(stack + local, registers, compiled.metadata.shared)


def check_sums(name: str, ptx: str) -> None:
    """Raise `RuntimeError` if a lane adds an unrounded product to what another lane sent it.

    The other lane does the reverse, so their sums of the same two products differ (`launch_options`).
    """
    sent = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)", ptx))
    if not sent.isdisjoint(re.findall(r"fma\.rn\.\w+\s+%\w+, \S+, \S+, (%\w+);", ptx)):
        raise RuntimeError(f"{name} sums unrounded products over lanes: launch it with fusion=False")


def measure(target: str, names: list[str]) -> Table:
    """Figures of the kernels of these cases on one target."""
    torch.manual_seed(0)
    table: Table = {}
    for name in names:
        for compiled in compiled_kernels(name, target):
            key, found = f"{name}: {compiled.name}", figures_of(compiled, target)
            table[key] = Figures(*map(max, found, table.get(key, found)))
    return table


def main(
    only: Annotated[list[str] | None, typer.Option(help="Cases to compile, such as presets; all by default.")] = None,
    target: Annotated[list[str] | None, typer.Option(help=f"Targets, of {', '.join(TARGETS)}.")] = None,
) -> None:
    """Compile the kernels ahead of time; fail if registers spill, or on gfx942 if shared memory is too small."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise typer.BadParameter("TRITON_INTERPRET=1 is set: the interpreter has no machine code")
    names, targets = only or list(CASES), target or list(TARGETS)
    workers, context = min(len(targets), os.cpu_count() or 1), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        tables = dict(zip(targets, pool.map(measure, targets, [names] * len(targets)), strict=True))
    messages = []
    for one, table in tables.items():
        for name, figures in table.items():
            stack, shared = f"{figures.stack_bytes} bytes of stack", f"{figures.shared_bytes / 1024:.0f} KiB shared"
            print(f"{one}, {name}: {figures.registers} registers, {shared}, {stack}")
            if one.startswith("sm_") and figures.stack_bytes > KNOWN_STACK.get(name, 0):
                messages.append(f"{one}, {name}: {stack}")
            if one == "gfx942" and figures.shared_bytes > 64 * 1024:
                messages.append(f"{one}, {name}: {shared}, but a program gets 64 KiB")
    print("\n".join(messages) or f"{sum(map(len, tables.values()))} kernels, no spills but the known ones")
    raise typer.Exit(1 if messages else 0)


if __name__ == "__main__":
    typer.run(main)
