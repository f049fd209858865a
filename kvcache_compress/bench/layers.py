"""Compressed keys and values of one layer for measurements, of any shape, without a model."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.cache.estimate import MODELS
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.codecs.base import CodecContext, Side
from kvcache_compress.config import CompressionConfig, LayerPlan, load_config
from kvcache_compress.methods.commvq.codebook_file import CENTRES, group_count, rounds_for, write_codebooks
from kvcache_compress.modeling.rope import RopeLayout
from kvcache_compress.storage.adaptive.eras import Era
from kvcache_compress.storage.packed_store import PackedStore
from kvcache_compress.storage.shared.rope_track import RopeTrack
from kvcache_compress.storage.static import StaticStorage
from kvcache_compress.storage.view import View


class Shape(NamedTuple):
    """Shape of a model's attention: query heads, key/value heads and head dimension."""

    query_heads: int
    kv_heads: int
    head_dim: int


SHAPES = {name: Shape(*sizes[1:]) for name, sizes in MODELS.items()}

_UNIFORM = {"method": "turboquant", "bits": 4, "codebook": "uniform"}
VARIANTS = {"uniform-4bit": {"keys": _UNIFORM, "values": _UNIFORM, "sink_tokens": 16, "recent_tokens": 64}}
"""Configurations measured in addition to the presets: uniform levels, which decode in fewer instructions."""


def named_config(name: str | dict[str, Any]) -> CompressionConfig:
    """Config of one of `VARIANTS`, of `none` (our kernels over uncompressed tokens), or of what `load_config` takes."""
    known: dict[str, Any] = VARIANTS | {"none": {"keys": "none", "values": "none"}}
    return load_config(known.get(name, name) if isinstance(name, str) else name)


def middle_layer(config: CompressionConfig) -> LayerPlan:
    """Plan of a preset for a layer in the middle, where rules for the first or last layers do not apply."""
    return config.plan(["full_attention"] * 8)[4]


def single_layer(preset: str | dict[str, Any], shape: Shape) -> tuple[LlamaConfig, CompressionConfig]:
    """Config of a one-layer model of this shape, and cache config that treats it as the preset's `middle_layer`.

    CommVQ gets random codebooks of the same size as calibrated ones.
    """
    plan = middle_layer(named_config(preset))
    decoder = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=shape.query_heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, hidden_size=shape.query_heads * shape.head_dim,
    )  # fmt: skip
    windows = {"sink_tokens": plan.sink_tokens, "recent_tokens": plan.recent_tokens}
    config = load_config({"keys": plan.keys, "values": plan.values, **windows})
    if plan.keys.method == "commvq":
        options = plan.keys.options()
        config = config.with_files(codebooks=random_codebooks(shape.head_dim, shape.kv_heads, options))
    return decoder, config


@cache
def random_codebooks(head_dim: int, heads: int, options: Any) -> str:
    """Path of random codebooks for CommVQ's options; with the paper's scalar they have its encoder of values."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * head_dim}
    config = LlamaConfig(num_hidden_layers=1, head_dim=head_dim, **sizes)
    groups = group_count(head_dim)
    sides: tuple[tuple[Side, tuple[int, ...]], ...]
    sides = ("keys", (head_dim // (2 * groups), 2)), ("values", (head_dim // groups,))
    tensors = {}
    for side, shape in sides:
        rounds = rounds_for(options.bits, side, head_dim, groups)
        tensors[f"{side}.0.codebooks"] = torch.randn(heads, groups, rounds, CENTRES, *shape) / head_dim
    if options.scalar == "norm":
        del tensors["values.0.codebooks"]
        width = heads * head_dim
        stored = round(options.bits * width)
        shapes = {"weight1": (width, width), "bias1": (width,), "weight2": (stored, width), "bias2": (stored,)}
        shapes["codebook"] = (stored, width)
        tensors |= {f"values.0.{name}": torch.randn(shape) / head_dim for name, shape in shapes.items()}
    path = Path(tempfile.mkdtemp()) / "random.safetensors"
    write_codebooks(path, config, tensors)
    return str(path)


def encoded_side(
    plan: LayerPlan, side: Side, head_dim: int, dtype: torch.dtype, *, heads: int, packed: int,
    windows: tuple[int, int] = (16, 17), codes: Literal["encoded", "random"] = "encoded", batch: int = 1,
    device: torch.device | None = None,
) -> View:  # fmt: skip
    """View of one side of a layer, as in a step of decoding.

    It has `packed` compressed tokens, a multiple of the method's group, and `windows` dense ones before and after them.
    `codes` are `encoded` from random tokens, or, for lengths that would take long to encode, `random`.
    """
    device = device or torch.device("cpu")
    first, last = windows
    half = head_dim // 2
    rope = RopeLayout(tuple(range(head_dim)), half, tuple(range(half)))  # halves are paired
    chosen, backend = plan.side(side), BACKENDS["torch"]
    options: Any = chosen.options()
    if chosen.method == "commvq":
        options = options.model_copy(update={"codebooks": random_codebooks(head_dim, heads, options)})
    context = CodecContext(side, head_dim, heads, 0, 0, 16, dtype, device, rope)
    codec = backend.bind(chosen.codec()(options, context))
    count = max(packed if codes == "encoded" else 128, *windows)
    tokens = torch.randn(batch, heads, count, head_dim, device=device).to(dtype)
    codec.prepare(tokens)
    track = None
    if codec.rope_use(options, side) == "factors":
        config = LlamaConfig(head_dim=head_dim, max_position_embeddings=1 << 20)
        track = RopeTrack(config, codec.context.rope, first, codec.group)  # type: ignore[arg-type]
        # Given as by a model; no row is padded here.
        positions = torch.arange(first + packed + last, device=device)[None]
        track.inputs = LlamaRotaryEmbedding(config).to(device)(torch.zeros(1, device=device), positions)
        track.extend(0, torch.empty(1, 1, first + packed + last, 1, device=device).expand(batch, -1, -1, -1))
    store = PackedStore(codec.fields, batch, heads, device)
    if codes == "encoded":
        factors = None if track is None else track.read(0, packed)
        store.append(backend.encoded(codec, tokens[:, :, :packed], factors), packed, growing=True)
    else:
        store.make_static(packed)
        store.tokens = packed
        for buffer in store.buffers:
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
            else:
                buffer.random_()
    sinks, tail = tokens[:, :, :first].contiguous(), tokens[:, :, :last].contiguous()
    return View(sinks, store, packed, tail, last, (Era(0, codec),), track, backend=backend)


def use_backend(layer: CompressedLayer, name: str) -> None:
    """Make a layer encode and attend on this backend from now on, instead of its config's."""
    layer.backend = backend = BACKENDS[name]
    with layer.edited() as storage:
        for state in storage.sides.values():
            state.eras = tuple(Era(era.start, backend.bind(era.codec)) for era in state.eras)
            state.backend = backend
        storage.backend = backend
    if layer.max_cache_len and layer.storage is storage and backend.has_static_steps(layer.device):
        layer.storage = StaticStorage(storage)
