"""Memory report of a cache: tokens, bytes, and bits per number with everything counted.

Bytes are the bytes held. The ratio compares with a full cache in the model's own dtype. Bits count numbers in the
model's own dtype (dense tokens, sides of method `none`) as 16 bits, so that models of different dtypes compare.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from kvcache_compress.storage.shared.rope_track import RopeTrack
from kvcache_compress.validation import size_text

from .layer import CompressedLayer


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a layer or of a cache, over the whole batch."""

    fields: dict[str, int]
    """Bytes in use by stored field, such as `keys.codes0`; `dense` counts the sinks and the tail."""
    dense_tokens: int = 0
    """Dense tokens per sequence, the largest number of any layer."""
    packed_tokens: int = 0
    """Packed tokens per sequence, the largest number of any layer."""
    numbers: int = 0
    """Cached numbers, over all layers, heads and sequences."""
    packed_numbers: int = 0
    packed_bytes: int = 0
    """Bytes of packed tokens: codes, scales, norms, zero points, padding; 16 bits per number of method `none`."""
    allocated_bytes: int = 0
    """Bytes held for tokens, including unused capacity."""
    constant_bytes: int = 0
    """Bytes that do not depend on the number of tokens: rotations, codebooks, means."""
    full_bytes: int = 0
    """Bytes of the same tokens in a full cache of the model's own dtype."""
    wider_bytes: int = 0
    """Bytes beyond 16 bits per number in all buffers of the model's own dtype, including unused capacity."""
    dtype: str = ""
    """Name of the model's own dtype; empty before the first tokens."""

    @property
    def used_bytes(self) -> int:
        return sum(self.fields.values())

    @property
    def total_bytes(self) -> int:
        """Bytes held: allocated buffers and constants."""
        return self.allocated_bytes + self.constant_bytes

    @property
    def total_bytes_at_16(self) -> int:
        """Bytes held, with numbers in the model's own dtype counted as 16 bits."""
        return self.total_bytes - self.wider_bytes

    @property
    def packed_bits_per_number(self) -> float:
        """Bits per packed number."""
        return 8 * self.packed_bytes / self.packed_numbers if self.packed_numbers else float("nan")

    @property
    def bits_per_number(self) -> float:
        """Bits per cached number over all that is held, dense tokens at 16 bits."""
        return 8 * self.total_bytes_at_16 / self.numbers if self.numbers else float("nan")

    @property
    def ratio(self) -> float:
        """Size of a full cache in the model's own dtype divided by this size, with everything counted."""
        return self.full_bytes / self.total_bytes if self.total_bytes else float("nan")


@dataclass(frozen=True, kw_only=True)
class LayerMemory(Memory):
    """Memory of one layer."""

    layer: int
    method: str


@dataclass(frozen=True, kw_only=True)
class MemoryReport(Memory):
    """Memory of a cache, per layer and in total; `fields` has the layers' shared cos and sin as `rope`."""

    layers: list[LayerMemory]

    def __str__(self) -> str:
        """Summary and a table with one row per run of equal layers, 80 columns wide."""
        if not self.numbers:
            return f"no tokens; {size_text(self.total_bytes)} held"
        table = [("layers", "method", "dense", "packed", "used", "held", "bits")]
        for _, run in groupby(self.layers, key=lambda layer: replace(layer, layer=0)):
            alike = list(run)
            first, last = alike[0], alike[-1]
            named = str(first.layer) if first is last else f"{first.layer}-{last.layer}"
            counts = (str(first.dense_tokens), str(first.packed_tokens))
            used, held = (size_text(len(alike) * size) for size in (first.used_bytes, first.total_bytes))
            table.append((named, first.method, *counts, used, held, f"{first.bits_per_number:.2f}"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        heading, *rows = (
            "   ".join(cell.ljust(widths[i]) if i == 1 else cell.rjust(widths[i]) for i, cell in enumerate(row))
            for row in table
        )
        rest = {"tables and maps": self.constant_bytes, "unused capacity": self.allocated_bytes - self.used_bytes}
        parts = [*sorted(self.fields.items()), *rest.items()]
        by_part = ", ".join(f"{name} {size_text(size)}" for name, size in parts if size)
        tokens = max((layer.dense_tokens + layer.packed_tokens for layer in self.layers), default=0)
        return (
            f"{size_text(self.total_bytes)} held, {self.ratio:.2f}x smaller than a full cache in "
            f"{self.dtype or 'the dtype of its model'} ({size_text(self.full_bytes)})\n"
            f"{self.packed_tokens:,} of {tokens:,} tokens packed"
            + (f", at {self.packed_bits_per_number:.2f} bits per packed number\n" if self.packed_numbers else "\n")
            + f"{self.bits_per_number:.2f} bits per number over all, dense tokens counted at 16\n"
            + "\n".join(f" {line}".rstrip() for line in (heading, "─" * len(heading), *rows))
            + f"\n{textwrap.fill(f'held by part: {by_part}', 80)}"
        )


def memory_report(layers: Sequence[Any]) -> MemoryReport:
    """Count a cache's layers, including Transformers' own, and the cos and sin that they share."""
    counted: set[int] = set()
    rows = [_layer_memory(index, layer, counted) for index, layer in enumerate(layers)]
    tracks: dict[RopeTrack, int] = {}  # packed tokens by track; each device has its own copy
    fields: dict[str, int] = {}
    for layer, row in zip(layers, rows, strict=True):
        if isinstance(layer, CompressedLayer) and layer.track is not None:
            tracks[layer.track] = max(tracks.get(layer.track, 0), row.packed_tokens)
        for name, size in row.fields.items():
            fields[name] = fields.get(name, 0) + size
    if used := sum(track.bytes_used() for track in tracks):
        fields["rope"] = used
    names = ("numbers", "packed_numbers", "packed_bytes", "allocated_bytes", "constant_bytes", "full_bytes")
    sums = {name: sum(getattr(row, name) for row in rows) for name in (*names, "wider_bytes")}
    sums["packed_bytes"] += sum(track.bytes_used(tokens) for track, tokens in tracks.items())
    sums["allocated_bytes"] += sum(track.buffer.nbytes for track in tracks)
    return MemoryReport(
        layers=rows,
        fields=fields,
        dense_tokens=max((row.dense_tokens for row in rows), default=0),
        packed_tokens=max((row.packed_tokens for row in rows), default=0),
        dtype=" and ".join(sorted({row.dtype for row in rows if row.dtype})),
        **sums,
    )


def _layer_memory(index: int, layer: Any, counted: set[int]) -> LayerMemory:
    if isinstance(layer, CompressedLayer):
        return _compressed(index, layer, counted)
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or not keys.numel():
        return LayerMemory(layer=index, method=type(layer).__name__, fields={"dense": 0})
    # A static layer has spare capacity.
    tokens = min(int(layer.get_seq_length()), keys.shape[2])
    used = [x[:, :, :tokens] for x in (keys, values)]
    size = sum(x.nbytes for x in used)
    return LayerMemory(
        layer=index, method=type(layer).__name__, fields={"dense": size}, dense_tokens=tokens,
        numbers=sum(x.numel() for x in used), allocated_bytes=keys.nbytes + values.nbytes, full_bytes=size,
        wider_bytes=_wider(keys) + _wider(values), dtype=str(keys.dtype).removeprefix("torch."),
    )  # fmt: skip


def _compressed(index: int, layer: CompressedLayer, counted: set[int]) -> LayerMemory:
    """Count a layer. Constants that layers before it hold too, whose addresses are `counted`, count there only."""
    method = layer.plan.keys.method
    if layer.plan.values.method != method:
        method = f"{method}/{layer.plan.values.method}"
    fields = {"dense": 0}
    allocated = constants = packed_numbers = packed_bytes = numbers = full = wider = 0
    for side, state in layer.sides.items():
        batch, heads, sinks, dim = state.sinks.shape
        dense, packed = (batch * heads * count * dim for count in (sinks + state.tail.tokens, state.store.tokens))
        size, stored = state.sinks.element_size(), state.store.bytes_used()
        fields["dense"] += dense * size
        fields |= {f"{side}.{name}": own for name, own in stored.items()}
        allocated += state.store.bytes_allocated()
        constants += sum(era.codec.constant_bytes(counted) for era in state.eras)
        packed_numbers += packed
        packed_bytes += sum(stored.values())
        numbers += dense + packed
        full += (dense + packed) * size
        if state.codec.name == "none":
            packed_bytes -= packed * (size - 2)
            wider += sum(map(_wider, state.store.buffers))
    for x in layer.storage.dense_buffers if layer.storage else ():
        allocated += x.nbytes
        wider += _wider(x)
    return LayerMemory(
        layer=index, method=method, fields=fields, dense_tokens=int(layer.get_seq_length()) - layer.packed_tokens,
        packed_tokens=layer.packed_tokens, numbers=numbers, packed_numbers=packed_numbers, packed_bytes=packed_bytes,
        allocated_bytes=allocated, constant_bytes=constants, full_bytes=full, wider_bytes=wider,
        dtype=str(layer.sides["values"].sinks.dtype).removeprefix("torch.") if layer.sides else "",
    )  # fmt: skip


def _wider(x: torch.Tensor) -> int:
    """Bytes of a buffer beyond 16 bits per number."""
    return x.nbytes - 2 * x.numel()
