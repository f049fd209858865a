"""Memory report of a cache: tokens, bytes, and bits per number with everything counted.

Bytes are the bytes held. The ratio compares with a full cache in the model's own dtype. Bits count numbers in the
model's own dtype (dense tokens, sides of method `none`) as 16 bits, so that models of different dtypes compare.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from kvcache_compress.storage.shared.rope_track import RopeTrack
from kvcache_compress.validation import size_text

from .layer import CompressedLayer


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer. Tokens are per sequence, bytes are over the whole batch."""

    layer: int
    method: str
    dense_tokens: int
    packed_tokens: int
    fields: dict[str, int]
    """Bytes in use per stored field, such as `keys.codes0`; `dense` counts the sinks and the tail."""
    allocated_bytes: int
    """Bytes held for tokens, including unused capacity."""
    constant_bytes: int
    """Bytes that do not depend on the number of tokens: rotations, codebooks, means."""
    packed_numbers: int
    numbers: int
    full_bytes: int = 0
    """Bytes that the same tokens would take in the model's own dtype."""
    wider_bytes: int = 0
    """Bytes beyond 16 bits per number in all buffers of the model's own dtype, including unused capacity."""
    wider_packed_bytes: int = 0
    """Part of `wider_bytes` used by packed tokens, which a side of method `none` stores in the model's dtype."""
    dtype: torch.dtype | None = None
    """The model's own dtype; None before the first tokens."""

    @property
    def used_bytes(self) -> int:
        return sum(self.fields.values())

    @property
    def packed_bytes(self) -> int:
        return sum(size for name, size in self.fields.items() if name != "dense")

    @property
    def total_bytes(self) -> int:
        return self.allocated_bytes + self.constant_bytes

    @property
    def total_bytes_at_16(self) -> int:
        """Bytes held, with numbers in the model's own dtype counted as 16 bits."""
        return self.total_bytes - self.wider_bytes

    @property
    def bits_per_number(self) -> float:
        return 8 * self.total_bytes_at_16 / self.numbers if self.numbers else float("nan")


@dataclass(frozen=True)
class MemoryReport:
    """Memory of a cache, per layer and in total."""

    layers: list[LayerMemory] = field(default_factory=list)
    rope_used_bytes: int = 0
    """Bytes of cos and sin, stored once for all layers if a codec needs them; part of the totals."""
    rope_packed_bytes: int = 0
    """Part of `rope_used_bytes` that belongs to packed tokens."""
    rope_allocated_bytes: int = 0

    def _sum(self, name: str) -> int:
        return sum(getattr(layer, name) for layer in self.layers)

    @property
    def packed_tokens(self) -> int:
        """Packed tokens per sequence, the largest number of any layer."""
        return max((layer.packed_tokens for layer in self.layers), default=0)

    @property
    def dense_tokens(self) -> int:
        """Dense tokens per sequence, the largest number of any layer."""
        return max((layer.dense_tokens for layer in self.layers), default=0)

    @property
    def numbers(self) -> int:
        """Cached numbers, over all layers, heads and sequences."""
        return self._sum("numbers")

    @property
    def packed_numbers(self) -> int:
        return self._sum("packed_numbers")

    @property
    def used_bytes(self) -> int:
        return self._sum("used_bytes") + self.rope_used_bytes

    @property
    def allocated_bytes(self) -> int:
        return self._sum("allocated_bytes") + self.rope_allocated_bytes

    @property
    def constant_bytes(self) -> int:
        return self._sum("constant_bytes")

    @property
    def total_bytes(self) -> int:
        """Bytes held by the cache: allocated buffers and constants."""
        return self._sum("total_bytes") + self.rope_allocated_bytes

    @property
    def total_bytes_at_16(self) -> int:
        """Bytes held by the cache, with numbers in the model's own dtype counted as 16 bits."""
        return self._sum("total_bytes_at_16") + self.rope_allocated_bytes

    @property
    def full_bytes(self) -> int:
        """Bytes of the same tokens in a full cache of the model's own dtype."""
        return self._sum("full_bytes")

    @property
    def dtype(self) -> str:
        """Name of the model's own dtype; empty before the first tokens."""
        names = {str(layer.dtype).removeprefix("torch.") for layer in self.layers if layer.dtype is not None}
        return " and ".join(sorted(names))

    @property
    def packed_bits_per_number(self) -> float:
        """Bits per packed number: codes, scales, norms, zero points, padding; 16 on a side of method `none`."""
        packed = self._sum("packed_bytes") - self._sum("wider_packed_bytes") + self.rope_packed_bytes
        return 8 * packed / self.packed_numbers if self.packed_numbers else float("nan")

    @property
    def bits_per_number(self) -> float:
        """Bits per cached number: packed tokens, dense tokens at 16 bits, unused capacity and constants."""
        return 8 * self.total_bytes_at_16 / self.numbers if self.numbers else float("nan")

    @property
    def ratio(self) -> float:
        """Size of a full cache in the model's own dtype divided by the size of this one, with everything counted."""
        return self.full_bytes / self.total_bytes if self.total_bytes else float("nan")

    def fields(self) -> dict[str, int]:
        """Bytes in use per field, over all layers."""
        totals: dict[str, int] = {}
        for layer in self.layers:
            for name, size in layer.fields.items():
                totals[name] = totals.get(name, 0) + size
        return totals | ({"rope": self.rope_used_bytes} if self.rope_used_bytes else {})

    def __str__(self) -> str:
        """Summary and a table with one row per run of equal layers, 80 columns wide."""
        if not self.numbers:
            return f"no tokens; {size_text(self.total_bytes)} held"
        table = [("layers", "method", "dense", "packed", "used", "held", "bits")]
        for _, run in groupby(self.layers, key=lambda layer: replace(layer, layer=0)):
            alike = list(run)
            first, last = alike[0], alike[-1]
            named = str(first.layer) if first is last else f"{first.layer}-{last.layer}"
            sums = (sum(getattr(layer, name) for layer in alike) for name in ("used_bytes", "total_bytes"))
            counts = (str(first.dense_tokens), str(first.packed_tokens))
            used, held = map(size_text, sums)
            table.append((named, first.method, *counts, used, held, f"{first.bits_per_number:.2f}"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        heading, *rows = (
            "   ".join(cell.ljust(widths[i]) if i == 1 else cell.rjust(widths[i]) for i, cell in enumerate(row))
            for row in table
        )
        rest = {"tables and maps": self.constant_bytes, "unused capacity": self.allocated_bytes - self.used_bytes}
        parts = [*sorted(self.fields().items()), *rest.items()]
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
    packed: dict[RopeTrack, int] = {}  # packed tokens by track; each device has its own copy
    for layer, row in zip(layers, rows, strict=True):
        if isinstance(layer, CompressedLayer) and layer.track is not None:
            packed[layer.track] = max(packed.get(layer.track, 0), row.packed_tokens)
    return MemoryReport(
        rows,
        rope_used_bytes=sum(track.bytes_used() for track in packed),
        rope_packed_bytes=sum(track.bytes_used(tokens) for track, tokens in packed.items()),
        rope_allocated_bytes=sum(track.buffer.nbytes for track in packed),
    )


def _layer_memory(index: int, layer: Any, counted: set[int]) -> LayerMemory:
    if isinstance(layer, CompressedLayer):
        return _compressed(index, layer, counted)
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or not keys.numel():
        return LayerMemory(index, type(layer).__name__, 0, 0, {"dense": 0}, 0, 0, 0, 0)
    # A static layer has spare capacity.
    tokens, held = min(int(layer.get_seq_length()), keys.shape[2]), (keys, values)
    used = sum(x[:, :, :tokens].nbytes for x in held)
    numbers = sum(x[:, :, :tokens].numel() for x in held)
    return LayerMemory(
        index, type(layer).__name__, tokens, 0, {"dense": used}, keys.nbytes + values.nbytes, 0, 0, numbers,
        full_bytes=used, wider_bytes=keys.nbytes + values.nbytes - 2 * (keys.numel() + values.numel()),
        dtype=keys.dtype,
    )  # fmt: skip


def _compressed(index: int, layer: CompressedLayer, counted: set[int]) -> LayerMemory:
    """Count a layer. Constants that layers before it hold too, whose addresses are `counted`, count there only."""
    method = layer.plan.keys.method
    if layer.plan.values.method != method:
        method = f"{method}/{layer.plan.values.method}"
    fields = {"dense": 0}
    allocated = constants = packed_numbers = numbers = full = wider = wider_packed = 0
    dtype = None
    for side, state in layer.sides.items():
        batch, heads, sinks, dim = state.sinks.shape
        dense, packed = (batch * heads * count * dim for count in (sinks + state.tail.tokens, state.store.tokens))
        dtype, size, stored = state.sinks.dtype, state.sinks.element_size(), state.store.bytes_used()
        fields["dense"] += dense * size
        fields |= {f"{side}.{name}": own for name, own in stored.items()}
        allocated += state.store.bytes_allocated()
        constants += sum(era.codec.constant_bytes(counted) for era in state.eras)
        packed_numbers += packed
        numbers += dense + packed
        full += (dense + packed) * size
        if state.codec.name == "none":
            wider_packed += packed * (size - 2)
            wider += sum(x.nbytes - 2 * x.numel() for x in state.store.buffers)
    for x in layer.storage.dense_buffers if layer.storage else ():
        allocated += x.nbytes
        wider += x.nbytes - 2 * x.numel()
    dense_tokens = int(layer.get_seq_length()) - layer.packed_tokens
    return LayerMemory(
        index, method, dense_tokens, layer.packed_tokens, fields, allocated, constants, packed_numbers, numbers,
        full, wider, wider_packed, dtype,
    )  # fmt: skip
