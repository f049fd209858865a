"""Codecs linear in their codes, `x = Aᵀ y + μ`: a basis A, points y decoded from the fields, an optional mean μ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import reduce
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from . import packing
from .base import Codec, CodecContext, Fields, Rope, Statistics
from .centering import Center, chosen_center, mean_key

T = TypeVar("T")


class Part(NamedTuple):
    """Coordinates of tokens along some rows of the basis.

    rows: the rows, as a slice of code space.
    coordinates: float32 `[B, H, T, w]` along these rows.
    scale: float32 `[B, H, T]`, multiplies all coordinates of a token; None if they are already scaled.
    """

    rows: slice
    coordinates: torch.Tensor
    scale: torch.Tensor | None = None


class LinearCodec(Codec):
    """Base of codecs that implement `parts`, from which decoding and attention in code space follow.

    Keys are centred according to the option `center`, if a method has it: with a mean μ, the last column of a mapped
    query holds q·μ, which is added to all its scores. Values are not centred.
    """

    in_memory_order: ClassVar[bool] = False
    """True if coordinates are in the order of codes in memory (see `packing.memory_order`), not of the rows."""

    def __init__(self, options: Any, context: CodecContext) -> None:
        super().__init__(options, context)
        self.center: Center = chosen_center(getattr(options, "center", "off"), context)
        self.basis: torch.Tensor | None = None
        """Rows of code space, float32 `[H or 1, W, head_dim]`; None before `prepare` if they depend on data."""
        self.mean: torch.Tensor | None = None
        """float32 `[H, head_dim]`, subtracted from tokens before they are encoded, or None."""

    @abstractmethod
    def parts(self, fields: Fields) -> Iterator[Part]:
        """Stored tokens in code space, part by part in the order of rows; a token is the sum of its parts."""

    def ready_basis(self) -> torch.Tensor:
        """Basis of code space; raises `RuntimeError` if it depends on data and `prepare` has not been called."""
        return prepared(self.basis, f"the basis of {self.name}")

    def measure(self, x: torch.Tensor) -> Statistics:
        """Measure the `mean` `[H, head_dim]` of keys, if they are centred."""
        mean = mean_key(x, self.center)
        return {} if mean is None else {"mean": mean}

    def set_statistics(self, statistics: Statistics) -> None:
        super().set_statistics(statistics)
        self.mean = statistics.get("mean")

    def decode(self, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        columns, decoded = self.ready_basis().mT, []
        for rows, coordinates, scale in self.parts(fields):
            scaled = coordinates if scale is None else coordinates * scale[..., None]
            decoded.append(scaled @ self._ordered(columns[..., rows]).mT)
        x = reduce(torch.add, decoded)
        return x if self.mean is None else x + self.mean[:, None]

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        mapped = query @ self.ready_basis().mT
        return mapped if self.mean is None else torch.cat([mapped, query @ self.mean[..., None]], -1)

    def score(self, mapped: torch.Tensor, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        by_part = []
        for rows, coordinates, scale in self.parts(fields):
            products = self._ordered(mapped[..., rows]) @ coordinates.mT
            by_part.append(products if scale is None else products * scale[:, :, None])
        scores = reduce(torch.add, by_part)
        return scores if self.mean is None else scores + mapped[..., -1:]

    def accumulate(self, weights: torch.Tensor, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        sums = []
        for _, coordinates, scale in self.parts(fields):
            summed = (weights if scale is None else weights * scale[:, :, None]) @ coordinates
            sums.append(packing.channel_order(summed) if self.in_memory_order else summed)
        return torch.cat(sums, -1)

    def map_output(self, accumulated: torch.Tensor) -> torch.Tensor:
        return accumulated @ self.ready_basis()

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder `x` `[..., w]`, one number per row of a part, to the order of coordinates."""
        return packing.memory_order(x) if self.in_memory_order else x


def prepared(value: T | None, name: str) -> T:
    """Return `value`; raise `RuntimeError` if it is None because `prepare` has not set it."""
    if value is None:
        raise RuntimeError(f"{name} must be set by prepare() before the first token is encoded")
    return value
