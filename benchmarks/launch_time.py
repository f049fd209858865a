"""Measure the host time of one layer's decode step, without a GPU: everything but the driver's own work.

    python benchmarks/launch_time.py              # attention, the cache's update, and a layer's complete step
    python benchmarks/launch_time.py --profile    # also a profile of the complete step
    python benchmarks/launch_time.py --max-cache-len 16384    # of a static cache, without a CUDA graph

Triton compiles for sm_90 and launches by its own launcher, over a `libcuda` whose functions do nothing; tensors are on
the CPU, where a PyTorch operator takes about as long as its launch on a GPU would. A C compiler is needed.
"""

from __future__ import annotations

import cProfile
import ctypes
import os
import pstats
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import triton
import typer
from transformers import LlamaConfig

from kvcache_compress import CompressedCache
from kvcache_compress.attention.interface import AttentionName, attention_forward
from kvcache_compress.bench.layers import SHAPES, Shape, encoded_side, middle_layer, use_backend
from kvcache_compress.codecs.device import interpreting
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.config import load_config
from kvcache_compress.storage.checks import PackableChecks

LAYER = 4
"""Layer, of eight, to which no preset's rule for the first or last layers applies."""
STUB = r"""
#include <stdint.h>
#define NOTHING(name) int name(void) { return 0; }
#define HANDLE(name) int name(void **handle) { *handle = (void *)1; return 0; }
NOTHING(cuInit) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxSetLimit) NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig) NOTHING(cuModuleUnload) NOTHING(cuPointerGetAttributes)
NOTHING(cuTensorMapEncodeTiled) NOTHING(cuTensorMapEncodeIm2col) NOTHING(cuOccupancyMaxActiveClusters)
HANDLE(cuCtxGetCurrent) HANDLE(cuDevicePrimaryCtxRetain) HANDLE(cuModuleLoadData) HANDLE(cuModuleGetFunction)
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(uintptr_t *size, int limit) { *size = 0; return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; } /* shared memory */
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "none"; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuPointerGetAttribute(uintptr_t *data, int attribute, uintptr_t pointer) { *data = pointer; return 0; }
static long launched;
int cuLaunchKernelEx(void) { launched++; return 0; }
long launches(void) { return launched; }
"""
"""The functions of `libcuda` that Triton's NVIDIA backend links or looks up, and a count of launches."""


def use_stub(folder: Path) -> ctypes.CDLL:
    """Build the stub in `folder`, make Triton launch through it, and return the loaded library."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver

    library = folder / "libcuda.so.1"
    source = folder / "stub.c"
    source.write_text(STUB)
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    (folder / "libcuda.so").symlink_to(library.name)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    # Later lookups of this name find this library, even if a GPU's driver is installed.
    stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    class Driver:
        utils, launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def allocate_default_profile_scratch(self, size: int, alignment: int, stream: int) -> None:
            return None

    driver.set_active(Driver())
    return stub


def attention_call(preset: str, shape: Shape, tokens: int) -> Callable[[], Any]:
    """Attention over `tokens` packed tokens and the preset's dense windows, as a function to time."""
    from kvcache_compress.triton_kernels.attention import launch

    plan = middle_layer(load_config(preset))
    keys, values = (
        encoded_side(
            plan.side(side).method, plan.side(side).options(), side, shape.head_dim, torch.bfloat16,
            heads=shape.kv_heads, packed=tokens, windows=(plan.sink_tokens, plan.recent_tokens), codes="random",
        )
        for side in ("keys", "values")
    )  # fmt: skip
    query = torch.randn(1, shape.query_heads, 1, shape.head_dim, dtype=torch.bfloat16)
    return lambda: launch.attend(AttentionCall.of(query, scaling=shape.head_dim**-0.5), keys, values)


def layer_calls(
    preset: str, shape: Shape, tokens: int, capacity: int | None
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Functions to time: `update` of a filled cache, and `update` followed by the model's attention function."""
    config = LlamaConfig(
        num_hidden_layers=2 * LAYER, num_attention_heads=shape.query_heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, hidden_size=shape.query_heads * shape.head_dim, max_position_embeddings=1 << 20,
    )  # fmt: skip
    config._attn_implementation = AttentionName("sdpa")
    chosen = load_config(preset)
    cache = CompressedCache(config, chosen.model_copy(update={"max_cache_len": capacity}))
    module = SimpleNamespace(config=config, is_causal=True, training=False)

    def states(heads: int, count: int) -> torch.Tensor:
        return torch.randn(1, heads, count, shape.head_dim, dtype=torch.bfloat16)

    plan = middle_layer(chosen)
    prompt = plan.sink_tokens + tokens + plan.recent_tokens
    cache.update(states(shape.kv_heads, prompt), states(shape.kv_heads, prompt), LAYER)
    use_backend(cache.layers[LAYER], "triton")  # only now: torch must encode the prompt, as the stub computes nothing
    keys, values, query = states(shape.kv_heads, 1), states(shape.kv_heads, 1), states(shape.query_heads, 1)

    def update() -> tuple[Any, Any]:
        return cache.update(keys, values, LAYER)

    def step() -> None:
        attention_forward(module, query, *update(), None, scaling=shape.head_dim**-0.5, position_ids=None)

    return update, step


def microseconds(call: Callable[[], Any], calls: int, rounds: int) -> tuple[float, float]:
    """Thread time of a call in microseconds: median over rounds of the mean of `calls`, and median of all calls.

    The mean includes steps that encode tokens, the median is that of a step that does not.
    """
    times = []
    for _ in range(calls * rounds):
        begun = time.thread_time()
        call()
        times.append((time.thread_time() - begun) * 1e6)
    means = (statistics.fmean(times[at : at + calls]) for at in range(0, len(times), calls))
    return statistics.median(means), statistics.median(times)


def print_profile(call: Callable[[], Any], calls: int, most: int = 40) -> None:
    """Print functions by their own time per call, which profiling about doubles."""
    profiler = cProfile.Profile()
    profiler.runcall(lambda: [call() for _ in range(calls)])
    statistics_by_function = pstats.Stats(profiler).strip_dirs().stats  # type: ignore[attr-defined]
    print("    own us   with callees   times per step")
    ranked = sorted(statistics_by_function.items(), key=lambda item: -item[1][2])
    for (file, line, name), (_, times, own, total, _) in ranked[:most]:
        where = name if line == 0 else f"{file}:{line} {name}"
        print(f"{own / calls * 1e6:10.2f} {total / calls * 1e6:14.2f} {times / calls:16.2f}   {where}")


@torch.inference_mode()
def main(
    preset: Annotated[str, typer.Option(help="Preset of the cache.")] = "turboquant-4bit",
    tokens: Annotated[int, typer.Option(help="Packed tokens to begin with.")] = 8192,
    calls: Annotated[int, typer.Option(help="Steps per round; tokens are encoded every 32.")] = 640,
    rounds: Annotated[int, typer.Option(help="Rounds of which the median is taken.")] = 7,
    max_cache_len: Annotated[int | None, typer.Option(help="Capacity of a static cache.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print cProfile's breakdown of the whole step.")] = False,
) -> None:
    """Time the host's part of a decode step of one layer with 32 query and 8 key/value heads of 128."""
    if interpreting() or shutil.which("cc") is None:
        raise typer.BadParameter("needs a C compiler, cc, and kernels that are compiled: unset TRITON_INTERPRET")
    torch.set_num_threads(1)
    shape = SHAPES["llama-3.1-8b"]
    # The stub computes nothing, so uninitialised results may be NaN.
    unchecked = mock.patch.object(PackableChecks, "_raise_unless")
    with tempfile.TemporaryDirectory() as folder, unchecked:
        stub = use_stub(Path(folder))
        update, step = layer_calls(preset, shape, tokens, max_cache_len)
        named = {"attention alone": attention_call(preset, shape, tokens), "update alone": update, "whole step": step}
        print(f"{preset}, {tokens} packed tokens, Triton {triton.__version__}, torch {torch.__version__}")
        for name, call in named.items():
            for _ in range(64):  # compiles all kernels, and ends just after a flush
                call()
            before = stub.launches()
            mean, median = microseconds(call, calls, rounds)
            made = (stub.launches() - before) / (calls * rounds)
            print(f"{name:16} {mean:7.1f} us, median {median:7.1f} us, {made:.2f} launches")
        if profile:
            print_profile(step, calls)


if __name__ == "__main__":
    typer.run(main)
