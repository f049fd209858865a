"""Peers to compare with: Transformers' `QuantizedCache` with hqq, quanto and fp8.

`QuantizedCache` quantizes the whole first prefill, last tokens included, but returns it unquantized. After that, every
step decodes everything. hqq and quanto collect new tokens in a dense residual. Each time it would reach
`residual_length`, they quantize the *whole* history again, so errors add up. fp8 quantizes new tokens at once, with the
one scale per layer and side that it found in the prefill.

So the size of the steps matters for hqq and quanto. A continuation fed in one pass never sees a second quantization: at
4 bits its KL is half of that with passes of 16 tokens and a short residual. hqq also fails if the number of groups
(heads x tokens x head dimension / group size) is no multiple of the codes in a byte.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel, QuantizedCache

from kvcache_compress.validation import require

from .caches import CacheSpec, Measured

GROUP_SIZE = 64
"""Numbers that share a 16-bit scale and a 16-bit zero point."""
RESIDUAL_LENGTH = 128
"""Tokens after which the dense residual is quantized."""


def fp8_cache() -> CacheSpec:
    """Spec of `QuantizedCache` with fp8: one scale per layer and side, no residual."""
    description = {"class": "QuantizedCache", "backend": "fp8"}
    return CacheSpec("fp8", lambda model: QuantizedCache("fp8", model.config), _measure_quantized, False, description)


def grouped_cache(backend: str, bits: int) -> CacheSpec:
    """Spec of `QuantizedCache` with hqq or optimum-quanto: groups of consecutive numbers of a token.

    At its first use on a machine quanto compiles an extension, which takes about 40 s and a C++ compiler.

    Args:
        backend: `hqq` or `quanto`.
        bits: 1, 2, 3, 4 or 8 for hqq; 2 or 4 for quanto.

    Raises:
        ImportError: The package is not installed.
    """
    module, axis = {"hqq": ("hqq", 1), "quanto": ("optimum.quanto", 0)}[backend]
    require(module, f"caches of {backend}", module, "peers")
    options = {"nbits": bits, "axis_key": axis, "axis_value": axis, "q_group_size": GROUP_SIZE}
    options["residual_length"] = RESIDUAL_LENGTH

    def make(model: PreTrainedModel) -> Cache:
        if backend == "quanto":
            _find_ninja()
        return QuantizedCache(backend, model.config, **options)

    description = {"class": "QuantizedCache", "backend": backend, **options}
    return CacheSpec(f"{backend}-{bits}", make, _measure_quantized, False, description)


PEERS: dict[str, Callable[[], CacheSpec]] = {
    f"{backend}-{bits}": functools.partial(grouped_cache, backend, bits)
    for backend in ("hqq", "quanto")
    for bits in (4, 2)
}
PEERS["fp8"] = fp8_cache


@functools.cache
def _find_ninja() -> None:
    """Let quanto's compiler find ninja, which lies beside the interpreter if the environment is not activated."""
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


def _measure_quantized(cache: Cache) -> Measured:
    """Measure a `QuantizedCache` by all tensors in its quantized fields.

    Scales, zero points and dense tokens count as 16 bits. They have the model's dtype, which is float32 on a CPU only
    for speed.
    """
    packed_bytes = packed_numbers = dense_numbers = packed_tokens = 0
    for layer in cache.layers:
        dense_numbers += layer.keys.numel() + layer.values.numel()
        for stored in (layer._quantized_keys, layer._quantized_values):
            shape = stored.shape if isinstance(stored, torch.Tensor) else stored[0].shape
            if isinstance(stored, tuple) and isinstance(stored[1], dict):  # hqq keeps the shape beside reshaped codes
                shape = torch.Size(stored[1]["shape"])
            packed_tokens = max(packed_tokens, shape[-2])
            packed_numbers += shape.numel()
            packed_bytes += stored_bytes(stored)
    total_bytes = packed_bytes + 2 * dense_numbers
    return Measured(
        packed_tokens=packed_tokens,
        packed_bits=8 * packed_bytes / packed_numbers,
        all_bits=8 * total_bytes / (packed_numbers + dense_numbers),
        total_bytes=total_bytes,
    )


def stored_bytes(stored: Any) -> int:
    """Bytes of all distinct tensors in nested tuples, lists, dictionaries and tensor subclasses.

    Floating-point numbers wider than 16 bits count as 16 bits.
    """
    sizes = {}
    for tensor in _plain_tensors(stored):
        storage = tensor.untyped_storage()
        width = min(tensor.itemsize, 2) if tensor.is_floating_point() else tensor.itemsize
        sizes[storage.data_ptr()] = storage.nbytes() // tensor.itemsize * width
    return sum(sizes.values())


def _plain_tensors(stored: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(stored):
        if hasattr(leaf, "__tensor_flatten__"):
            yield from _plain_tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, torch.Tensor):
            yield leaf
