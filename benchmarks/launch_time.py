"""Measure the Python time of one layer's decode step, without a GPU: everything but the driver's own work.

    python benchmarks/launch_time.py
    python benchmarks/launch_time.py --preset kivi-4bit --max-cache-len 16384    # static, without a CUDA graph

Triton compiles for sm_90 and launches by its own launcher, over a `libcuda` whose functions do nothing; tensors are on
the CPU, where a PyTorch operator takes about as long as its launch on a GPU would. A C compiler is needed.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from kvcache_compress import CompressedCache
from kvcache_compress.attention.interface import attention_forward, fused_name
from kvcache_compress.bench.layers import SHAPES, single_layer, use_backend
from kvcache_compress.codecs.device import interpreting
from kvcache_compress.storage.checks import PackableChecks

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
    library, source = folder / "libcuda.so.1", folder / "stub.c"
    source.write_text(STUB)
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    (folder / "libcuda.so").symlink_to(library.name)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    # Later lookups of this name find this library, even if a GPU's driver is installed.
    stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    active = SimpleNamespace(utils=nvidia.CudaUtils(), launcher_cls=nvidia.CudaLauncher)
    active.get_current_device, active.get_current_stream = lambda: 0, lambda device: 0
    active.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    active.allocate_default_profile_scratch = lambda size, alignment, stream: None
    driver.set_active(active)
    return stub


@torch.inference_mode()
def main(
    preset: Annotated[str, typer.Option(help="Preset of the cache.")] = "turboquant-4bit",
    tokens: Annotated[int, typer.Option(help="Packed tokens to begin with.")] = 8192,
    steps: Annotated[int, typer.Option(help="Steps that are timed; tokens are packed every 32.")] = 4480,
    max_cache_len: Annotated[int | None, typer.Option(help="Capacity of a static cache.")] = None,
) -> None:
    """Time the Python part of a decode step of one layer with 32 query and 8 key/value heads of 128."""
    if interpreting():
        raise typer.BadParameter("kernels must be compiled: unset TRITON_INTERPRET")
    torch.set_num_threads(1)
    shape = SHAPES["llama-3.1-8b"]
    config, chosen = single_layer(preset, shape)
    config._attn_implementation = fused_name("sdpa")
    cache = CompressedCache(config, chosen.changed(max_cache_len=max_cache_len))
    module: Any = SimpleNamespace(config=config, is_causal=True)
    count = chosen.sink_tokens + tokens + chosen.recent_tokens
    keys, values = torch.randn(2, 1, shape.kv_heads, count, shape.head_dim, dtype=torch.bfloat16)
    cache.update(keys, values, 0)
    use_backend(cache.layers[0], "triton")  # only now: torch must encode the prompt, as the stub computes nothing
    keys, values = keys[:, :, :1].contiguous(), values[:, :, :1].contiguous()
    query = torch.randn(1, shape.query_heads, 1, shape.head_dim, dtype=torch.bfloat16)

    def step() -> float:
        begun = time.thread_time()
        views = cache.update(keys, values, 0)
        attention_forward(module, query, views[0], views[1], None, scaling=shape.head_dim**-0.5, position_ids=None)
        return (time.thread_time() - begun) * 1e6

    # The stub computes nothing, so uninitialised results may be NaN.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(PackableChecks, "_raise_unless"):
        launches = use_stub(Path(folder)).launches
        for _ in range(64):  # compiles all kernels, and ends just after tokens are packed
            step()
        before = launches()
        times = [step() for _ in range(steps)]
        mean, median, made = statistics.fmean(times), statistics.median(times), (launches() - before) / steps
    print(f"{preset}, {tokens} packed tokens: {mean:.1f} us, median {median:.1f} us, {made:.2f} launches")


if __name__ == "__main__":
    typer.run(main)
