"""CommVQ's residual codebooks of one side of a layer: encode tokens of all heads to packed codes, and decode them."""

from dataclasses import dataclass
from typing import Any

import torch

from . import additive


@dataclass(frozen=True)
class ResidualBooks:
    """Codebooks of H heads, each in G groups with R rounds of N centres.

    A token's codes of one head are a run of bits, group after group, in whole bytes.

    books: float16 `[H, G, R, N, 2, g]`, real and imaginary parts of g pairs, for keys; `[H, G, R, N, w]` for values.
    """

    books: torch.Tensor

    @property
    def of_pairs(self) -> bool:
        return self.books.ndim == 6

    @property
    def groups(self) -> int:
        return self.books.shape[1]

    @property
    def rounds(self) -> int:
        return self.books.shape[2]

    @property
    def index_bits(self) -> int:
        """Bits of a centre's index."""
        return self.books.shape[3].bit_length() - 1

    @property
    def code_bits(self) -> int:
        """Bits of a group's code in a round: two indices for keys, `a * N + b`."""
        return (2 if self.of_pairs else 1) * self.index_bits

    def tables(self) -> torch.Tensor:
        """Tables of the search in float32: `[H, G, R, S, N, w]`."""
        books = self.books.float()
        return additive.complex_tables(books.mT) if self.of_pairs else books.unsqueeze(3)

    def encode(self, z: torch.Tensor, native: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode float32 `z` `[B, H, T, D]`, with pairs of keys interleaved: packed codes, and their points."""
        index = self.search(self._by_group(z), native)
        packed = additive.pack_codes(self._by_token(index, z), self.code_bits)
        return packed, self._by_token(self.points(index), z)

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        """Decode packed codes `[B, H, T, bytes]` to float32 `[B, H, T, D]`."""
        codes = additive.unpack_codes(packed, self.groups * self.rounds, self.code_bits)
        return self._by_token(self.points(self._by_group(codes)), packed)

    def search(self, z: torch.Tensor, native: Any) -> torch.Tensor:
        """Greedy residual search for `z` `[H, G, n, w]`: indices int64 `[H, G, n, R]`, for keys `a * N + b`."""
        codes = additive.encode(z, self.tables(), getattr(native, "nearest", additive.nearest))
        return codes[..., 0] << self.index_bits | codes[..., 1] if self.of_pairs else codes[..., 0]

    def points(self, index: torch.Tensor) -> torch.Tensor:
        """Points of indices `[H, G, n, R]`: `[H, G, n, w]`, for keys with real and imaginary parts interleaved."""
        parts = (index >> self.index_bits, index & (2**self.index_bits - 1)) if self.of_pairs else (index,)
        return additive.decode(torch.stack(parts, -1), self.tables())

    def _by_group(self, x: torch.Tensor) -> torch.Tensor:
        """View `[B, H, T, n]` as `[H, G, B * T, n / G]`."""
        return x.unflatten(-1, (self.groups, -1)).permute(1, 3, 0, 2, 4).flatten(2, 3)

    def _by_token(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Inverse of `_by_group`, for batch and tokens of `like` `[B, H, T, ...]`."""
        return x.unflatten(2, (like.shape[0], like.shape[2])).permute(2, 0, 3, 1, 4).flatten(3)
