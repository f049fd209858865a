"""CommVQ's residual codebooks of one side of a layer: encode tokens of all heads to packed codes, and decode them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache_compress.codecs.backend import load_part, quantizer
from kvcache_compress.codecs.base import Backend

from . import additive


@dataclass(frozen=True)
class ResidualBooks:
    """Codebooks of H heads, each in G groups, R rounds of N centres.

    books: float16 `[H, G, R, N, 2, g]`, real and imaginary parts of g pairs, for keys; `[H, G, R, N, w]` for values.
    """

    books: torch.Tensor

    @property
    def of_pairs(self) -> bool:
        return self.books.ndim == 6

    @property
    def index_bits(self) -> int:
        """Bits of a centre's index."""
        return self.books.shape[3].bit_length() - 1

    @property
    def code_bits(self) -> int:
        """Bits of a group's code in a round: two indices for keys, `a * N + b`."""
        return (2 if self.of_pairs else 1) * self.index_bits

    def widened(self) -> torch.Tensor:
        """Books in float32, complex parts last: `[H, G, R, N, g, 2]` for keys, `[H, G, R, N, w]` for values."""
        return self.books.float().mT if self.of_pairs else self.books.float()

    def encode(self, z: torch.Tensor, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode float32 `z` `[B, H, T, D]`, with pairs of keys interleaved: packed codes, and their points."""
        index = self.search(self._by_group(z), backend)
        codes = self._by_token(index, z)
        pack = quantizer(backend, additive.pack_codes, None, "pack_codes")
        return pack(codes, self.code_bits), self._by_token(self.points(index), z)

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        """Decode packed codes to float32 `[B, H, T, D]`."""
        groups, rounds = self.books.shape[1:3]
        index = additive.unpack_codes(packed, groups * rounds, self.code_bits)
        return self._by_token(self.points(self._by_group(index)), packed)

    def search(self, z: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Greedy residual search for `z` `[H, G, n, w]`: indices int64 `[H, G, n, R]`, for keys `a * N + b`."""
        if backend == "triton":
            pairs = additive.pair_table(self.books.float().mT) if self.of_pairs else None
            index: torch.Tensor = load_part("triton_kernels.encode.commvq").search(z, self.books, pairs)
            return index.long()
        if not self.of_pairs:
            return additive.real_encode(z, self.widened(), quantizer(backend, additive.real_step, None, "real_step"))
        step = quantizer(backend, additive.complex_step, None, "complex_step")
        codes = additive.complex_encode(z.unflatten(-1, (-1, 2)), self.widened(), step)
        return codes[..., 0] << self.index_bits | codes[..., 1]

    def points(self, index: torch.Tensor) -> torch.Tensor:
        """Points of indices `[H, G, n, R]`: `[H, G, n, w]`, for keys with real and imaginary parts interleaved."""
        if not self.of_pairs:
            return additive.real_decode(index, self.widened())
        codes = torch.stack([index >> self.index_bits, index & (2**self.index_bits - 1)], -1)
        return additive.complex_decode(codes, self.widened()).flatten(-2)

    def _by_group(self, x: torch.Tensor) -> torch.Tensor:
        """View `[B, H, T, D]` as `[H, G, B * T, w]`, w = D / G numbers per group."""
        return x.unflatten(-1, (self.books.shape[1], -1)).permute(1, 3, 0, 2, 4).flatten(2, 3)

    def _by_token(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Inverse of `_by_group`, for batch and tokens of `like` `[B, H, T, ...]`."""
        return x.unflatten(2, (like.shape[0], like.shape[2])).permute(2, 0, 3, 1, 4).flatten(3)
