"""Variants of the kernels whose machine code is tracked, with their launch arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import triton
from transformers import LlamaConfig

from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.bench.layers import build_codec, encoded_side, middle_layer
from kvcache_compress.codecs.base import Codec, MethodOptions, Side
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.config import load_config, preset_names
from kvcache_compress.methods.registry import get_method
from kvcache_compress.storage.checks import LONGEST, PackableChecks
from kvcache_compress.storage.dynamic import DynamicStorage
from kvcache_compress.storage.packed_store import PackedStore
from kvcache_compress.storage.shared.padding import PaddingRecord
from kvcache_compress.storage.shared.rope_track import RopeTrack
from kvcache_compress.storage.side import SideState, Windows
from kvcache_compress.storage.static import StaticStorage
from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels.attention import launch
from kvcache_compress.triton_kernels.attention.kernel import attend_kernel, merge_kernel
from kvcache_compress.triton_kernels.attention.query import map_query_kernel
from kvcache_compress.triton_kernels.decode.spectral import turn_kernel
from kvcache_compress.triton_kernels.encode.launch import flush
from kvcache_compress.triton_kernels.update.append import append

ENCODED_KEYS = ("polarquant-rope-4bit", "qjl-3bit", "polarquant-3.4bit", "spectral-2bit")
"""Presets whose key encoder is tracked in the kernels of steps too; their values use TurboQuant's encoder."""


@dataclass(frozen=True)
class Variant:
    """Pair of codecs and sizes of the tensors: `groups` query heads per key/value head, `count` queries.

    even: True if tokens fill all tiles, so that the kernel needs no masks; mask: a Boolean mask, as of left padding;
    fixed: a static layer, whose numbers of tokens are in memory.
    """

    keys: tuple[str, MethodOptions]
    values: tuple[str, MethodOptions]
    head_dim: int = 128
    groups: int = 4
    count: int = 1
    dtype: torch.dtype = torch.bfloat16
    even: bool = True
    mask: bool = False
    fixed: bool = False


def side_of(method: str, **options: Any) -> tuple[str, MethodOptions]:
    return method, get_method(method).Options(**options)


def attention_variants() -> dict[str, Variant]:
    """Pairs of all presets, and further pairs and sizes that no preset has."""
    variants = {}
    for name in preset_names():
        plan = middle_layer(load_config(name))
        variants[name] = Variant((plan.keys.method, plan.keys.options()), (plan.values.method, plan.values.options()))
    del variants["turboquant-mixed"]
    uniform, four = side_of("turboquant", bits=4, codebook="uniform"), side_of("turboquant", bits=4)
    uniform_two = side_of("turboquant", bits=2, codebook="uniform")
    scalar = {bits: side_of("turboquant", bits=bits, codebook="lloyd_max") for bits in (1, 2, 2.5, 3)}
    prod = {bits: side_of("turboquant", bits=bits, estimator="prod") for bits in (2, 2.5, 3)}
    kivi_side, none = side_of("kivi", bits=4), side_of("none")
    exact = {"dtype": torch.float32}
    for name in ("turboquant-4bit", "turboquant-2bit", "spectral-2bit"):
        variants[f"{name}, mask"] = replace(variants[name], mask=True)
        variants[f"{name}, fixed"] = replace(variants[name], fixed=True, even=False)
    return variants | {
        "uniform-4bit": Variant(uniform, uniform),
        "uniform-2bit": Variant(uniform_two, uniform_two),
        "lloyd-max-2bit": Variant(scalar[2], scalar[2]),
        "lloyd-max-3bit": Variant(scalar[3], scalar[3]),
        "lloyd-max-2.5bit": Variant(scalar[2.5], scalar[2.5]),
        "prod-k3v2": Variant(prod[3], prod[2]),
        "prod-2.5bit": Variant(prod[2.5], prod[2.5]),
        "turboquant-4bit and kivi-4bit": Variant(four, kivi_side),
        "turboquant-6bit and none": Variant(side_of("turboquant", bits=6), none),
        "none and lloyd-max-1bit": Variant(none, scalar[1]),
        "turboquant-4bit, uneven": Variant(four, four, even=False),
        "turboquant-4bit, 16 queries": Variant(four, four, count=16),
        "kivi-4bit, 16 queries": Variant(kivi_side, kivi_side, count=16),
        "turboquant-4bit, D=64": Variant(four, four, 64),
        "kivi-4bit, D=64": Variant(kivi_side, kivi_side, 64),
        "prod-k3v2, D=64": Variant(prod[3], prod[2], 64),
        "turboquant-4bit, D=96": Variant(four, four, 96),
        "turboquant-4bit, D=256": Variant(four, four, 256),
        "kivi-4bit, D=256": Variant(kivi_side, kivi_side, 256),
        "lloyd-max-2.5bit, D=256": Variant(scalar[2.5], scalar[2.5], 256),
        "prod-2.5bit, D=256": Variant(prod[2.5], prod[2.5], 256),
        "prod-k3v2, D=256": Variant(prod[3], prod[2], 256),
        "turboquant-4bit, float32": Variant(four, four, **exact),
        "turboquant-4bit, D=64, float32": Variant(four, four, 64, **exact),
        "kivi-4bit, float32": Variant(kivi_side, kivi_side, **exact),
        "prod-2.5bit, float32": Variant(prod[2.5], prod[2.5], **exact),
        "prod-k3v2, D=64, float32": Variant(prod[3], prod[2], 64, **exact),
    }


def captured_launches(call: Callable[[], Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Record kernel and arguments of every launch that `call` makes, running none; `call` sees empty results."""
    launches: list[tuple[Any, dict[str, Any]]] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((kernel, dict(zip((p.name for p in kernel.params), args, strict=False)) | kwargs))

    with mock.patch.object(triton.JITFunction, "run", record):
        call()
    return launches


def side_view(variant: Variant, side: Side) -> View:
    method, options = variant.keys if side == "keys" else variant.values
    return encoded_side(method, options, side, variant.head_dim, variant.dtype)


def stored_bytes(variant: Variant) -> float:
    """Stored bytes of a packed token's key and value in one head."""
    both: tuple[Side, Side] = ("keys", "values")
    return sum(bytes_per_token(side_view(variant, side).codec.fields) for side in both)


NAMES = {attend_kernel: "", map_query_kernel: "map query ", turn_kernel: "turn ", merge_kernel: "merge "}
"""Prefix of a variant's name for the figures of each kernel."""


def attention_launches(variant: Variant) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Kernels of an attention call and their arguments; merges are for many splits.

    Their keys are put before the variant's name, see `NAMES`.
    """
    keys, values = side_view(variant, "keys"), side_view(variant, "values")
    query = torch.zeros(1, 2 * variant.groups, variant.count, variant.head_dim, dtype=variant.dtype)
    sizes = launch.sizes_of(query, keys, values)
    mask = torch.ones(1, 1, 1, keys.tokens, dtype=torch.bool) if variant.mask or variant.fixed else None
    inputs, kind = launch.attend_inputs(query, keys, values, mask, sizes.split_tokens)
    out = torch.empty(1, variant.count, 2 * variant.groups, variant.head_dim, dtype=variant.dtype)
    calls = launch.attention_calls(query, keys, values, inputs, kind, sizes, out, scaling=0.1)
    attend, merge = calls[-2][2], calls[-1][2]
    attend["EVEN"] &= variant.even
    if variant.fixed:
        attend["MASKING"] = attend["MASKING"]._replace(packed=False)
        for *_, arguments in calls[1:-1]:
            arguments |= {"BOUNDED": True, "p_packed": torch.zeros((), dtype=torch.int64)}
    shape = merge["p_acc"].shape
    merge |= {"p_acc": merge["p_acc"].new_empty(*shape[:2], launch.MAX_SPLITS, *shape[3:]), "splits": launch.MAX_SPLITS}
    return {NAMES[kernel]: (kernel, arguments) for kernel, _, arguments in calls}


def track_of(codec: Codec, tokens: torch.Tensor) -> RopeTrack | None:
    """cos and sin of the groups of a layer that packs `tokens` `[B, H, T, D]`, if the codec needs them."""
    if codec.rope_use(codec.options, codec.context.side) != "factors":
        return None
    track = RopeTrack(LlamaConfig(head_dim=tokens.shape[3]), codec.context.rope, 0, codec.group)  # type: ignore[arg-type]
    track.extend(0, tokens)
    return track


def flush_launch(keys: tuple[str, MethodOptions]) -> tuple[Any, dict[str, Any]]:
    """The kernel that encodes the tokens that leave a tail, and its arguments."""
    codec = build_codec(*keys, "keys", 128, 2, torch.bfloat16)
    leaving = max(32, codec.group)
    tail = torch.randn(1, 2, leaving + 64, 128).bfloat16()
    codec.prepare(tail)
    fields = PackedStore(codec.fields, 1, 2, tail.device).writable_buffers(leaving, growing=True)
    good, encoder = torch.ones(4, dtype=torch.int32), codec.kernel_encoder
    assert encoder is not None
    track = track_of(codec, tail)
    rows = None if track is None else track.buffer
    call = functools.partial(flush, encoder, tail, leaving, 64, fields, 0, torch.empty_like(tail), good, LONGEST, rows)
    ((kernel, arguments),) = captured_launches(call)
    return kernel, arguments


def static_step_launches(
    keys: tuple[str, MethodOptions], values: tuple[str, MethodOptions]
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The kernels that only steps of static layers use, and their arguments."""
    sides: dict[Side, SideState] = {}
    tokens = torch.randn(1, 2, 512, 128).bfloat16()
    both: tuple[Side, Side] = ("keys", "values")
    codecs = {side: build_codec(*(keys if side == "keys" else values), side, 128, 2, torch.bfloat16) for side in both}
    group = codecs["keys"].group
    windows = Windows(sinks=16, recent=64, flush=max(32, group), group=group, capacity=464)
    for side, codec in codecs.items():
        track = track_of(codec, tokens)
        sides[side] = SideState(codec, tokens, windows, BACKENDS["triton"], track, PaddingRecord())
        codec.prepare(tokens)
        sides[side].prepared = True
    storage = StaticStorage(DynamicStorage(sides, windows, PackableChecks(0), BACKENDS["triton"]))

    def step() -> None:
        storage.backend.step(storage.buffers, sides, dict.fromkeys(both, tokens[:, :, :1]), None)
        query = tokens[:, :, :1].repeat(1, 2, 1, 1)
        launch.attend(AttentionCall.of(query, scaling=0.1), *storage.views())

    names = {"write_slots_kernel": "write slots", "map_step_kernel": "map step"}
    launches = ((kernel.__name__, (kernel, arguments)) for kernel, arguments in captured_launches(step))
    return {names[name]: call for name, call in launches if name in names}


def step_launches() -> dict[str, tuple[Any, dict[str, Any]]]:
    """The kernels of decode steps other than attention, and their arguments."""
    two, four = side_of("turboquant", bits=2), side_of("turboquant", bits=4)
    fresh, tail = (torch.zeros(1, 2, 1, 128, dtype=torch.bfloat16) for _ in range(2))
    steps = {
        "append": captured_launches(lambda: append(fresh, fresh, tail, tail, 0))[0],
        "flush": flush_launch(four),
    }
    steps |= static_step_launches(four, four)
    steps["flush turboquant-2bit"] = flush_launch(two)
    steps["write slots turboquant-2bit"] = static_step_launches(two, two)["write slots"]
    for name in ENCODED_KEYS:
        plan = middle_layer(load_config(name))
        keys = plan.keys.method, plan.keys.options()
        steps[f"flush {name}"] = flush_launch(keys)
        steps[f"write slots {name}"] = static_step_launches(keys, four)["write slots"]
    return steps


def encode_variants() -> dict[str, tuple[Side, str, MethodOptions, int]]:
    """Encoders of every method, from its presets (each codec once), and further scalars and sizes."""
    variants: dict[str, tuple[Side, str, MethodOptions, int]] = {}
    known: list[tuple[Side, MethodOptions]] = []
    pairs = [(name, variant) for name, variant in attention_variants().items() if variant.head_dim == 128]
    sides: list[tuple[str, Side, str, MethodOptions]] = [(name, "keys", *variant.keys) for name, variant in pairs]
    sides += [(name, "values", *variant.values) for name, variant in pairs]
    # Named after a preset of the same method, if there is one.
    for name, side, method, options in sorted(sides, key=lambda item: not item[0].startswith(item[2].split("_")[0])):
        if method != "none" and (side, options) not in known:
            known.append((side, options))
            variants[f"encode {side} of {name}"] = (side, method, options, 128)
    for bits, scalar, width in ((3, "norm", 64), (6, "least_squares", 256)):
        name = f"encode turboquant-{bits}bit {scalar}, D={width}"
        variants[name] = ("keys", *side_of("turboquant", bits=bits, scalar=scalar), width)
    return variants


def encode_launches(side: Side, method: str, options: MethodOptions, head_dim: int) -> list[tuple[Any, dict[str, Any]]]:
    """The kernels that encode 512 tokens, and their arguments."""
    codec = build_codec(method, options, side, head_dim, 2, torch.bfloat16)
    tokens = torch.randn(1, 2, 512, head_dim).bfloat16()
    codec.prepare(tokens)
    track = track_of(codec, tokens)
    rope = None if track is None else track.read(0, 512)
    return captured_launches(lambda: BACKENDS["triton"].encoded(codec, tokens, rope))
