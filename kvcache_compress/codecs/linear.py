"""Codecs that are linear in their codes, `x = Aᵀ y + μ`: basis A, points y decoded from the fields, optional mean μ."""

from abc import abstractmethod
from collections.abc import Iterator
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import torch

from . import packing
from .base import Codec, CodecContext, Fields, Rope, Statistics
from .transforms.centering import Center, chosen_center, large_mean, mean_key
from .transforms.equalization import FEWEST, channel_factors, channel_rms, chosen_equalize, has_outliers


class Part(NamedTuple):
    """Coordinates of tokens along some rows of the basis.

    Attributes:
        rows: the rows, as a slice of code space.
        coordinates: float32 `[B, H, T, w]` along these rows.
        scale: float32 `[B, H, T]`, multiplies a token's coordinates; None if they are scaled already.
    """

    rows: slice
    coordinates: torch.Tensor
    scale: torch.Tensor | None = None


class LinearCodec(Codec):
    """Base of codecs that implement `parts`; decoding and attention in code space follow from it.

    Keys are centred if the method's option `center` says so: the last column of a mapped query then holds q·μ, which is
    added to all its scores. They are then equalized if the option `equalize` says so: outlier channels are divided by
    factors, and their columns of the basis multiplied.
    """

    in_memory_order: ClassVar[bool] = False
    """True if coordinates are in the order of codes in memory (`packing.memory_order`) instead of the order of rows."""
    basis: torch.Tensor
    """Rows of code space for equalized tokens, float32 `[H or 1, W, head_dim]`; set with the statistics if they decide
    it."""

    def __init__(self, options: Any, context: CodecContext) -> None:
        super().__init__(options, context)
        self.center: Center = chosen_center(getattr(options, "center", "off"), context)
        self.equalized = chosen_equalize(getattr(options, "equalize", "off"), context)
        self.mean: torch.Tensor | None = None
        """Subtracted from tokens before encoding, float32 `[H, head_dim]`, or None."""
        self.factors: torch.Tensor | None = None
        """Divides centred tokens, float32 `[H, head_dim]`, or None."""
        self._query_basis: torch.Tensor | None = None
        """Basis times the factors, once it has been needed."""

    @abstractmethod
    def parts(self, fields: Fields) -> Iterator[Part]:
        """Stored tokens in code space, in the order of rows; a token is the sum of its parts."""

    def ready_basis(self) -> torch.Tensor:
        """Basis for queries, with the factors multiplied in."""
        if self.factors is None:
            return self.basis
        if self._query_basis is None:
            self._query_basis = self.basis * self.factors[:, None]
        return self._query_basis

    def ready(self) -> None:
        self.ready_basis()

    def encoding_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Divide `rows` `[H or 1, W, head_dim]` by the factors, so that they apply to tokens that are only centred."""
        return rows if self.factors is None else (rows / self.factors[:, None]).contiguous()

    def least_tokens(self, in_step: bool = False) -> int:
        return FEWEST if self.equalized else 0

    def prepare(self, x: torch.Tensor, may_wait: bool = False) -> bool:
        """As in the base class; keys with outlier channels wait for queries, on which the factors depend too."""
        if may_wait and self.equalized and has_outliers(self._moments(x)[1]):
            return False
        return super().prepare(x)

    def _moments(self, keys: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Mean of each channel (None if keys are not centred) and RMS after centring, float32 `[H, head_dim]`."""
        mean = mean_key(keys, "off" if self.center == "off" else "on")
        return mean, channel_rms(centred(keys, mean))

    def measure(self, x: torch.Tensor, queries: torch.Tensor | None = None) -> Statistics:
        """Measure the keys' `mean` `[H, D]`, if centred, and the `factors` `[H, D]` of outlier channels."""
        factors = None
        if not self.equalized:
            mean = mean_key(x, self.center)
        else:
            mean, size = self._moments(x)
            factors = channel_factors(size, x.shape[0] * x.shape[2], queries)
            if factors is not None:  # judge the size of the mean on equalized keys
                mean = mean_key(x.float() / factors[:, None], self.center)
                mean = None if mean is None else mean * factors
            elif mean is not None and self.center == "auto":
                mean = large_mean(mean, (size.square() + mean.square()).sum(-1))
        found = {"mean": mean, "factors": factors}
        return {name: x for name, x in found.items() if x is not None}

    def set_statistics(self, statistics: Statistics) -> None:
        super().set_statistics(statistics)
        self.mean, self.factors = statistics.get("mean"), statistics.get("factors")
        self._query_basis = None

    def equalize(self, x: torch.Tensor, statistics: Statistics) -> torch.Tensor:
        """Return tokens `[B, H, T, head_dim]` minus the mean and divided by the factors; float32."""
        x, factors = centred(x, statistics.get("mean")), statistics.get("factors")
        return x if factors is None else x / factors[:, None]

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


def centred(x: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    """Tokens `[B, H, T, D]` minus the mean `[H, D]`, if any; float32."""
    return x.float() if mean is None else x.float() - mean[:, None]


def spread(rows: torch.Tensor, channels: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows `[n, w]` of which each head has the columns at its `channels` `[H, w]`: `[H, n, head_dim]`, else zero."""
    found = rows.new_zeros(len(channels), len(rows), head_dim)
    return found.scatter_(2, channels[:, None].expand(-1, len(rows), -1), rows.expand(len(channels), -1, -1))
