"""Cases that each method's own test file declares for the tests that every method must pass.

A file `tests/methods/**/test_<method>.py` may define

- `CONTRACT`: name to `{"keys": ..., "values": ...}`, the configurations that `tests/contract` runs every operation on;
- `KERNEL_PAIRS`: name to `((method, options), (method, options))`, keys and values for the attention kernel;
- `ENCODERS`: `(method, options)` or `(method, options, side)` whose encoders in Triton, C++ and torch must agree.

Options of the latter two may be a function of the head dimension.
"""

import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import torch

from kvcache_compress.codecs.base import Codec, CodecContext
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.config import get_method
from kvcache_compress.modeling.rope import RopeLayout
from kvcache_compress.storage.shared.rope_track import RopeTrack
from support.paths import ROOT


@cache
def _modules() -> tuple[ModuleType, ...]:
    modules = []
    for path in sorted((ROOT / "tests" / "methods").rglob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"method_cases_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        modules.append(module)
    return tuple(modules)


def declared(name: str) -> dict[str, Any]:
    """Merge the dictionaries of this name of all methods."""
    merged: dict[str, Any] = {}
    for module in _modules():
        part = getattr(module, name, {})
        assert not merged.keys() & part.keys(), f"{name}: two methods declare the same case"
        merged |= part
    return merged


def declared_list(name: str) -> list[Any]:
    """Join the lists of this name of all methods."""
    return [item for module in _modules() for item in getattr(module, name, [])]


def make_codec(
    method: str, head_dim: int, side: Any = "keys", seed: int = 0, heads: int = 1, sinks: int = 16, *,
    layer: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", rope: Any = "half",
    **options: Any,
) -> Codec:  # fmt: skip
    """A codec without a cache, not yet prepared; `rope` has the model's rotary pairs, by default those of Llama."""
    layout = half_layout(head_dim) if rope == "half" else rope
    context = CodecContext(side, head_dim, heads, layer, seed, sinks, dtype, torch.device(device), layout)
    codec = get_method(method)
    return codec(codec.Options(**options), context)


def unit_vectors(tokens: int, dim: int, seed: int = 1) -> torch.Tensor:
    """Vectors uniform on the sphere, float32 `[1, 1, tokens, dim]`."""
    x = torch.randn(1, 1, tokens, dim, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def half_layout(head_dim: int) -> RopeLayout:
    """Rotary layout with pairs (i, i + head_dim / 2), as in Llama."""
    half = head_dim // 2
    return RopeLayout(tuple(range(head_dim)), half, tuple(range(half)))


def neighbour_layout(head_dim: int, rotary: int) -> RopeLayout:
    """Rotary layout in which only the first `rotary` pairs of neighbours rotate, as in GLM 4 and GPT-NeoX."""
    rest = range(2 * rotary, head_dim)
    half = len(rest) // 2
    order = (*range(0, 2 * rotary, 2), *rest[:half], *range(1, 2 * rotary, 2), *rest[half:])
    return RopeLayout(order, rotary, tuple(range(rotary)))


def random_track(layout: RopeLayout, batch: int, tokens: int, first: int = 0, stride: int = 1) -> RopeTrack:
    """A track of `tokens` tokens whose positions differ per row, as left padding makes them."""
    from transformers import LlamaConfig

    track = RopeTrack(LlamaConfig(), layout, first, stride)
    positions = torch.arange(tokens).float() + 7.0 * torch.arange(batch)[:, None]
    angles = positions[..., None] * 10_000 ** -(torch.arange(layout.rotary) / layout.rotary)
    track.inputs = (angles.cos(), angles.sin())
    track.extend(0, torch.empty(batch, 1, tokens, 1))
    return track


def bits_per_number(codec: Codec) -> float:
    """Stored bits per number, counting every field."""
    return 8 * bytes_per_token(codec.fields) / codec.context.head_dim
