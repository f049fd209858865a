"""CommVQ's residual codebooks of one side of a layer: encode tokens of all heads to packed codes, and decode them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import pad

from . import additive


@dataclass(frozen=True)
class ResidualBooks:
    """Codebooks of H heads, each in G groups with rounds of N centres; heads may have unequal numbers of rounds.

    The codes of a token form one run of bytes: head after head, each from a byte boundary on, group by group. Its
    first `row` bytes lie in the first head's row of the stored field, the next in the second's, and so on, so a head
    with many rounds reaches into rows of others.

    books: float16 `[S, N, 2, g]`, real and imaginary parts of g pairs, for keys; `[S, N, w]` for values. The S books
        are those of all rounds, in the order of the codes.
    groups: groups of each head.
    rounds: rounds of each head.
    row: bytes per token and head.
    places: int32 `[H, 3]`, for kernels: first book, rounds, and first byte of the codes of each head.
    """

    books: torch.Tensor
    groups: int
    rounds: tuple[int, ...]
    row: int
    places: torch.Tensor

    @classmethod
    def of_heads(cls, books: torch.Tensor, rounds: Sequence[int], row: int) -> ResidualBooks:
        """Keep the first `rounds` of each head of `books` `[H, G, R, ...]`."""
        groups, made = books.shape[1:3]
        kept = [
            (head * groups + group) * made + i
            for head, count in enumerate(rounds)
            for group in range(groups)
            for i in range(count)
        ]
        found = cls(books.flatten(0, 2)[kept].contiguous(), groups, tuple(rounds), row, books.new_empty(0))
        firsts = accumulate((groups * count for count in found.rounds[:-1]), initial=0)
        starts = accumulate(found.sizes[:-1], initial=0)
        places = torch.tensor([*zip(firsts, rounds, starts, strict=True)], dtype=torch.int32, device=books.device)
        return replace(found, places=places)

    @property
    def of_pairs(self) -> bool:
        return self.books.ndim == 4

    @property
    def index_bits(self) -> int:
        """Bits of a centre's index."""
        return self.books.shape[1].bit_length() - 1

    @property
    def code_bits(self) -> int:
        """Bits of a group's code in a round: two indices for keys, `a * N + b`."""
        return (2 if self.of_pairs else 1) * self.index_bits

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each head's codes."""
        return tuple(additive.code_bytes(self.groups * count, self.code_bits) for count in self.rounds)

    @property
    def even(self) -> bool:
        """True if all heads have the same number of rounds."""
        return min(self.rounds) == max(self.rounds)

    def of_head(self, head: int) -> torch.Tensor:
        """Books of a head in float32, complex parts last: `[G, R, N, g, 2]` for keys, `[G, R, N, w]` for values."""
        first, count = self.groups * sum(self.rounds[:head]), self.groups * self.rounds[head]
        books = self.books[first : first + count].float().unflatten(0, (self.groups, -1))
        return books.mT if self.of_pairs else books

    def widened(self) -> torch.Tensor:
        """Books of all heads as of `of_head`, `[H, G, R, ...]`; those of rounds that a head does not have are zero."""
        if self.even:
            books = self.books.float().unflatten(0, (len(self.rounds), self.groups, -1))
            return books.mT if self.of_pairs else books
        most = max(self.rounds)
        by_head = [self.of_head(head) for head in range(len(self.rounds))]
        return torch.stack([pad(x, (*(0, 0) * (x.ndim - 2), 0, most - x.shape[1])) for x in by_head])

    def encode(self, z: torch.Tensor, native: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode float32 `z` `[B, H, T, D]`, with pairs of keys interleaved: packed codes, and their points."""
        index = self.search(self._by_group(z), native)
        pack = getattr(native, "pack_codes", additive.pack_codes)
        packed = pack(self._codes(index, z), self.code_bits)
        heads = len(self.rounds)
        if self.sizes != (self.row,) * heads:
            run = torch.cat([packed[:, head, :, :size] for head, size in enumerate(self.sizes)], -1)
            run = pad(run, (0, heads * self.row - run.shape[-1]))
            packed = run.unflatten(-1, (heads, self.row)).transpose(1, 2).contiguous()
        return packed, self._by_token(self.points(index), z)

    def _codes(self, index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Indices `[H, G, n, R]` by token, each head's without gaps: `[B, H, T, G * R]`."""
        codes = self._by_token(index, like)
        if self.groups == 1 or self.even:
            return codes
        by_head = zip(codes.unflatten(-1, (self.groups, -1)).unbind(1), self.rounds, strict=True)
        kept = [head[..., :count].flatten(-2) for head, count in by_head]
        return torch.stack([pad(x, (0, codes.shape[-1] - x.shape[-1])) for x in kept], 1)

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        """Decode packed codes `[B, H, T, row]` to float32 `[B, H, T, D]`."""
        if self.even:
            index = self._by_group(additive.unpack_codes(packed, self.groups * self.rounds[0], self.code_bits))
            return self._by_token(self.points(index), packed)
        runs = packed.transpose(1, 2).flatten(2)[..., : sum(self.sizes)].split(self.sizes, -1)
        found = []
        for run, count in zip(runs, self.rounds, strict=True):
            codes = additive.unpack_codes(run, self.groups * count, self.code_bits)
            found.append(pad(self._by_group(codes[:, None])[0], (0, max(self.rounds) - count)))
        return self._by_token(self.points(torch.stack(found)), packed)

    def search(self, z: torch.Tensor, native: Any) -> torch.Tensor:
        """Greedy residual search for `z` `[H, G, n, w]`: indices int64 `[H, G, n, R]`, for keys `a * N + b`.

        R is the largest number of rounds; indices beyond a head's rounds are zero.
        """
        if self.even:
            return self._found(z, self.widened(), native)
        # The heads with most rounds come first, so that those which still have one are a part of the tensors.
        order = sorted(range(len(self.rounds)), key=lambda head: -self.rounds[head])
        heads = [sum(count > i for count in self.rounds) for i in range(max(self.rounds))]
        index = self._found(z[order], self.widened()[order], native, heads)
        return index[[order.index(head) for head in range(len(order))]]

    def _found(
        self, z: torch.Tensor, books: torch.Tensor, native: Any, heads: Sequence[int] | None = None
    ) -> torch.Tensor:
        if not self.of_pairs:
            return additive.real_encode(z, books, getattr(native, "real_step", additive.real_step), heads)
        step = getattr(native, "complex_step", additive.complex_step)
        codes = additive.complex_encode(z.unflatten(-1, (-1, 2)), books, step, heads)
        return codes[..., 0] << self.index_bits | codes[..., 1]

    def points(self, index: torch.Tensor) -> torch.Tensor:
        """Points of indices `[H, G, n, R]`: `[H, G, n, w]`, for keys with real and imaginary parts interleaved."""
        if self.even:
            return self._sums(index, self.widened())
        by_head = zip(index, self.rounds, strict=True)
        return torch.stack([self._sums(x[..., :count], self.of_head(i)) for i, (x, count) in enumerate(by_head)])

    def _sums(self, index: torch.Tensor, books: torch.Tensor) -> torch.Tensor:
        if not self.of_pairs:
            return additive.real_decode(index, books)
        codes = torch.stack([index >> self.index_bits, index & (2**self.index_bits - 1)], -1)
        return additive.complex_decode(codes, books).flatten(-2)

    def _by_group(self, x: torch.Tensor) -> torch.Tensor:
        """View `[B, H, T, n]` as `[H, G, B * T, n / G]`."""
        return x.unflatten(-1, (self.groups, -1)).permute(1, 3, 0, 2, 4).flatten(2, 3)

    def _by_token(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Inverse of `_by_group`, for batch and tokens of `like` `[B, H, T, ...]`."""
        return x.unflatten(2, (like.shape[0], like.shape[2])).permute(2, 0, 3, 1, 4).flatten(3)
