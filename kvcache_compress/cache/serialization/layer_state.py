"""State of a compressed layer in a file: sizes, tensors, and a sample of decoded tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.storage.side import MAX_DRAFT_TOKENS, SideState

CHECKED_TOKENS = 8
CHECK_TOLERANCE = 1e-3
"""Relative error (RMS) up to which decoded tokens count as equal: devices and releases of torch round differently."""
Shape = tuple[torch.dtype, tuple[int, ...]]


class StrictModel(BaseModel):
    """Base of a file's parts, which allow no unknown keys and convert no types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LayerState(StrictModel):
    """Sizes of a compressed layer, in tokens per sequence; `prepared` is True if its codecs have their statistics."""

    batch: int = Field(ge=0, lt=2**31)
    heads: int = Field(ge=1, lt=2**16)
    head_dims: dict[Side, Annotated[int, Field(ge=1, lt=2**13)]] = Field(min_length=2)
    dtypes: dict[Side, Literal["float64", "float32", "float16", "bfloat16"]] = Field(min_length=2)
    sinks: NonNegativeInt
    packed: NonNegativeInt
    tail: NonNegativeInt
    prepared: bool

    @property
    def tokens(self) -> int:
        return self.sinks + self.packed + self.tail


def layer_state(layer: CompressedLayer) -> LayerState | None:
    """Sizes of a layer; None before its first tokens."""
    sides = layer.sides
    if not sides:
        return None
    keys = sides["keys"]
    batch, heads, sinks, _ = keys.sinks.shape
    return LayerState(
        batch=batch, heads=heads, sinks=sinks, packed=layer.packed_tokens, tail=keys.tail.tokens,
        prepared=keys.prepared,
        head_dims={side: state.sinks.shape[3] for side, state in sides.items()},
        dtypes={side: _name(state.sinks.dtype) for side, state in sides.items()},
    )  # fmt: skip


def _name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")


def layer_tensors(layer: CompressedLayer) -> dict[str, torch.Tensor]:
    """Tensors of a layer by their names in the file, without its prefix."""
    held: dict[str, torch.Tensor] = {}
    for side, state in layer.sides.items():
        held |= {f"{side}.{name}": tensor for name, tensor in state.tensors().items()}
        if state.store.tokens:
            held[f"{side}.check"] = _first_decoded(state, layer.group)
    return held


def _first_decoded(state: SideState, group: int) -> torch.Tensor:
    """Decode the first packed tokens of the first sequence, float32 `[1, H, up to 8, D]`."""
    whole = -(-CHECKED_TOKENS // group) * group
    return state.decode(0, min(state.store.tokens, whole))[:1, :, :CHECKED_TOKENS]


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Name of a tensor with NaN or infinity, or None; tensors of 8 bits, which no cache has, are not checked."""
    wide = (name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.itemsize > 1)
    return next((name for name in wide if not tensors[name].isfinite().all()), None)


def restore_layer(
    layer: CompressedLayer,
    state: LayerState,
    tensors: Mapping[str, torch.Tensor],
    rope: torch.Tensor | None,
    device: torch.device,
) -> None:
    """Fill a new layer from a file's state and tensors; `rope` has the rows of the layer's track.

    Raises:
        ValueError: Sizes or tensors do not fit the layer or each other.
    """
    _check_counts(layer, state, rope)
    _check_dense(state, tensors)
    rows = torch.empty(state.batch, state.heads, 0, 0, device=device)
    keys, values = (
        rows.new_empty(*rows.shape[:3], state.head_dims[side], dtype=getattr(torch, state.dtypes[side]))
        for side in SIDES
    )
    try:
        layer.lazy_initialization(keys, values)
    except RuntimeError as error:
        raise ValueError(f"damaged, or too large for the memory: {str(error).splitlines()[0]}") from None
    _check_capacity(layer, state)
    if layer.track is not None and rope is not None:
        layer.track.restore(rope.to(device), state.tokens)
    with layer.edited() as storage:
        _restore_sides(layer, storage.sides, state, tensors)


def _restore_sides(
    layer: CompressedLayer, own_sides: Mapping[Side, SideState], state: LayerState, tensors: Mapping[str, torch.Tensor]
) -> None:
    sides = list(own_sides.items())
    expected = {f"{side}.{name}": shape for side, own in sides for name, shape in _shapes(own, state, tensors, side)}
    expect(expected, tensors)
    for side, own in sides:
        held = {name.removeprefix(f"{side}."): x for name, x in tensors.items() if name.startswith(f"{side}.")}
        own.restore(held, state.packed, state.prepared)
    for side, own in sides if state.packed else ():
        # In float64, since numbers of a damaged file may overflow float32 when squared.
        saved, decoded = tensors[f"{side}.check"].double(), _first_decoded(own, layer.group).cpu()
        if not (decoded - saved).norm() <= CHECK_TOLERANCE * saved.norm():
            raise ValueError(
                f"its {side} do not decode as they did when it was saved: the codebooks have changed, or this "
                "release's codecs differ"
            )


def _check_counts(layer: CompressedLayer, state: LayerState, rope: torch.Tensor | None) -> None:
    """Raise `ValueError` for counts that contradict the config or each other."""
    sinks, tokens = layer.plan.sink_tokens, state.tokens
    if state.sinks > sinks or (state.sinks < sinks and tokens > state.sinks):
        raise ValueError(f"damaged: {state.sinks} sinks of {tokens} tokens, where the config has sink_tokens={sinks}")
    if state.packed and not state.prepared:
        raise ValueError("damaged: packed tokens without statistics")
    if (track := layer.track) is not None and tokens:
        shape = (state.batch, track.rows(tokens), track.buffer.shape[2])
        expect({track.name: (track.buffer.dtype, shape)}, {track.name: rope})


def _check_dense(state: LayerState, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare the header's sizes with the file's tensors, before any memory is allocated for them."""
    dense = {
        f"{side}.{part}": (getattr(torch, state.dtypes[side]), (state.batch, state.heads, count, state.head_dims[side]))
        for side in SIDES
        for part, count in (("sinks", state.sinks), ("tail", state.tail))
    }
    expect(dense, {name: tensors.get(name) for name in dense})
    rows = (state.batch, state.heads)
    for name, x in tensors.items():
        if ".packed." in name and (x.ndim < 3 or x.shape[:2] != rows or bool(x.shape[2]) != bool(state.packed)):
            raise ValueError(f"damaged: {name} is {list(x.shape)}, not {list(rows)} with {state.packed} tokens")


def _check_capacity(layer: CompressedLayer, state: LayerState) -> None:
    """Raise `ValueError` for counts that exceed the initialized layer's groups, windows or capacity."""
    if state.packed % layer.group:
        raise ValueError(f"damaged: {state.packed} packed tokens, in groups of {layer.group}")
    assert layer.storage is not None
    capacity, longest = layer.max_cache_len, layer.storage.windows.tail_capacity + MAX_DRAFT_TOKENS
    if capacity is not None and (state.tokens > capacity or state.tail > longest):
        raise ValueError(f"damaged: {state.tokens} tokens, {state.tail} of them dense, for {capacity}")


def _shapes(
    own: SideState, state: LayerState, tensors: Mapping[str, torch.Tensor], side: Side
) -> Iterator[tuple[str, Shape]]:
    """Name, dtype and shape of every tensor of a side in this state."""
    batch, heads, _, dim = own.sinks.shape
    for name, count in (("sinks", state.sinks), ("tail", state.tail)):
        yield name, (own.sinks.dtype, (batch, heads, count, dim))
    for field in own.store.fields:
        yield f"packed.{field.name}", (field.dtype, (batch, heads, state.packed // field.tokens, *field.shape))
    if state.prepared:
        sample = own.codec.measure(own.sinks.new_zeros(1, heads, 1, dim))
        optional = own.codec.optional_statistics().items()
        sample |= {name: x for name, x in optional if f"{side}.statistics.{name}" in tensors}
        yield from ((f"statistics.{name}", (x.dtype, tuple(x.shape))) for name, x in sample.items())
    if state.packed:
        yield "check", (torch.float32, (min(batch, 1), heads, min(state.packed, CHECKED_TOKENS), dim))


def expect(expected: Mapping[str, Shape], found: Mapping[str, torch.Tensor | None]) -> None:
    """Raise `ValueError` for tensors that are missing, superfluous, or of another dtype or shape."""
    saved = {name: (x.dtype, tuple(x.shape)) for name, x in found.items() if x is not None}
    for name in sorted(expected.keys() | saved.keys()):
        if name not in saved or name not in expected:
            raise ValueError(f"damaged: {'no' if name in expected else 'a superfluous'} tensor {name!r}")
        if saved[name] != expected[name]:
            (dtype, shape), (wanted, form) = saved[name], expected[name]
            raise ValueError(f"damaged: {name} is {_name(dtype)} {list(shape)}, not {_name(wanted)} {list(form)}")
