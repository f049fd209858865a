"""Back end for CPUs: C++ kernels, compiled when first used."""

import inspect
import logging
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from kvcache_compress.codecs.base import Codec, Side
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.cpu_kernels import build
from kvcache_compress.cpu_kernels.attention import launch
from kvcache_compress.cpu_kernels.encode import launch as encode
from kvcache_compress.storage.view import View

from .torch import TorchBackend

_warn_once = cache(logging.getLogger(__name__).warning)
_NATIVE = SimpleNamespace(**dict(inspect.getmembers(encode, inspect.isfunction)))
"""The C++ encoders by name, in a namespace because a module cannot be copied."""
MAX_QUERIES = 128
"""Most queries of a chunk; beyond it, PyTorch's attention over decoded tiles is faster."""


class CppBackend(TorchBackend):
    """Attention and encoders in C++."""

    name = "cpp"
    always_tiles = True
    attends_to_pages = True

    def problem(self) -> str | None:
        """Compile the C++ code if needed; return why it is unavailable, or None."""
        problem: str | None = build.problem()
        if problem:
            _warn_once("the C++ kernels are unavailable, so compressed caches are slower on this CPU: %s", problem)
        return problem

    def runs_on(self, device: torch.device, asked: bool = False) -> bool:
        return device.type == "cpu"

    def supports(self, codec: type[Codec], options: Any, side: Side) -> bool:
        return codec.has_kernels("cpu_side", options, side)

    def bind(self, codec: Codec) -> Codec:
        return codec.with_native(_NATIVE)

    def takes(self, call: AttentionCall, keys: View, values: View) -> bool:
        if super().takes(call, keys, values):
            return True
        few = call.query.shape[2] <= MAX_QUERIES
        return few and call.query.dtype == torch.float32 and values.codec.chunks_on_cpp

    def attend(self, call: AttentionCall, keys: View, values: View) -> torch.Tensor:
        if not keys.packed:  # codecs may lack their statistics
            return super().attend(call, keys, values)
        return launch.attend(call, keys, values)

    def attend_to_pages(
        self, call: AttentionCall, keys: View, values: View, rows: torch.Tensor, page: int
    ) -> torch.Tensor:
        return launch.attend(call, keys, values, rows, page)
