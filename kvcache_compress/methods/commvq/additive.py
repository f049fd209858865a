"""Residual additive vector quantization in torch: the codes of CommVQ (sections 4.1 and 4.2, appendix A.2).

Complex form, for keys before RoPE: a round with centres c `[N, g]` (complex) adds `c[a] + i c[b]` to the g pairs of a
group, so its N² points commute with every rotation of the pairs. Real form, for values: a round adds `c[a]`.

The search avoids the N² points: |z - c_a - i c_b|² = |z|² + (|c_a|² - 2<z, c_a>) + (|c_b|² - 2<z, i c_b>) + 2<c_a, i
c_b> needs 2N inner products per vector and a table `[N, N]` that depends on the codebook alone.

All functions accept leading dimensions `*` (heads, groups), equal in both arguments.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

Step: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""One round of the search: (vectors, codebook rows, costs) to (codes, residuals)."""
BLOCK = 1 << 20
"""Numbers of the vectors that are searched together; bounds the memory of the search."""
CHUNK = 1 << 20
"""Distances to pairs of centres held at once: few enough for a processor's cache."""


def times_i(c: torch.Tensor) -> torch.Tensor:
    """Multiply complex numbers `[..., 2]` (real, imaginary) by i."""
    return torch.stack([-c[..., 1], c[..., 0]], -1)


def pair_table(codebooks: torch.Tensor) -> torch.Tensor:
    """Squared lengths |c_a|² + |c_b|² + 2<c_a, i c_b> of all points of codebooks `[*, N, g, 2]`: `[*, N, N]`."""
    c, turned = codebooks.flatten(-2), times_i(codebooks).flatten(-2)
    square = c.square().sum(-1)
    return square[..., :, None] + square[..., None, :] + 2 * c @ turned.mT


def complex_step(z: torch.Tensor, rows: torch.Tensor, costs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One round: codes (a, b) `[*, n, 2]` of the nearest `c[a] + i c[b]` to `z` `[*, n, 2g]`, and the residual of z.

    rows: c and then i·c, `[*, 2N, 2g]`; costs: half the `pair_table`.
    """
    chunk = max(1, CHUNK // costs.numel())
    first, second = (z @ rows.mT).chunk(2, -1)
    best = [(costs[..., None, :, :] - part[..., None, :]).amin(-1) for part in second.split(chunk, -2)]
    a = (torch.cat(best, -2) - first).argmin(-1, keepdim=True)
    row = costs.gather(-2, a.expand(*a.shape[:-1], costs.shape[-1])) - second
    codes = torch.cat([a, row.argmin(-1, keepdim=True)], -1)
    return codes, z - real_decode(codes, rows.unflatten(-2, (2, -1)))


def complex_encode(z: torch.Tensor, codebooks: torch.Tensor, step: Step = complex_step) -> torch.Tensor:
    """Greedy residual codes int64 `[*, n, R, 2]` of `z` float32 `[*, n, g, 2]`; codebooks `[*, R, N, g, 2]`."""
    books = codebooks.movedim(-4, 0)
    rows = torch.cat([books, times_i(books)], -3).flatten(-2)
    return _search(z.flatten(-2), rows, pair_table(books) / 2, step)


def complex_decode(codes: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """Inverse of `complex_encode`: `[*, n, g, 2]`."""
    tables = torch.stack([codebooks, times_i(codebooks)], -4).flatten(-5, -4).flatten(-2)
    return real_decode(codes.flatten(-2), tables).unflatten(-1, codebooks.shape[-2:])


def real_step(x: torch.Tensor, rows: torch.Tensor, costs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One round: codes `[*, n, 1]` of the nearest of `rows` `[*, N, d]` to `x` `[*, n, d]`, and the residual of x.

    costs: half the rows' squared lengths, `[*, N]`.
    """
    codes = (costs[..., None, :] - x @ rows.mT).argmin(-1, keepdim=True)
    return codes, x - real_decode(codes, rows.unsqueeze(-3))


def real_encode(x: torch.Tensor, codebooks: torch.Tensor, step: Step = real_step) -> torch.Tensor:
    """Greedy residual codes int64 `[*, n, R]` of `x` float32 `[*, n, d]`; codebooks `[*, R, N, d]`."""
    rows = codebooks.movedim(-3, 0).contiguous()
    return _search(x, rows, rows.square().sum(-1) / 2, step).squeeze(-1)


def _search(z: torch.Tensor, rows: torch.Tensor, costs: torch.Tensor, step: Step) -> torch.Tensor:
    """Codes `[*, n, R, ...]` of `z` `[*, n, w]` by the `rows` and `costs` of R rounds, a block of vectors at a time."""
    blocks = []
    for part in z.split(max(1, BLOCK // (z[..., :1, :].numel() or 1)), -2):
        residual, codes = part.contiguous(), []
        for book, cost in zip(rows, costs, strict=True):
            code, residual = step(residual, book, cost)
            codes.append(code)
        blocks.append(torch.stack(codes, -2))
    return torch.cat(blocks, -3)


def real_decode(index: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Sum of rows `index[..., s]` of tables s, over s: index `[*, n, S]`, tables `[*, S, N, w]`, result `[*, n, w]`."""
    count, centres, width = tables.shape[-3:]
    starts = torch.arange(tables.numel() // (centres * width), device=index.device) * centres
    rows = index + starts.view(*tables.shape[:-3], 1, count)
    summed = torch.nn.functional.embedding_bag(rows.reshape(-1, count), tables.reshape(-1, width), mode="sum")
    return summed.view(*index.shape[:-1], width)


def code_bytes(codes: int, bits: int) -> int:
    """Bytes of `codes` codes of `bits` bits without gaps between them."""
    return -(-codes * bits // 8)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes `[..., n]` into one run of bits, code i from bit i * bits on: uint8 `[..., code_bytes]`."""
    spread = (codes[..., None] >> torch.arange(bits, device=codes.device)) & 1
    spread = torch.nn.functional.pad(spread.flatten(-2), (0, -codes.shape[-1] * bits % 8))
    places = torch.arange(8, device=codes.device)
    return (spread.unflatten(-1, (-1, 8)) << places).sum(-1).to(torch.uint8)


def unpack_codes(packed: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """Inverse of `pack_codes`: int64 `[..., count]`. A code may span two bytes, which rules out 7 and 11 bits."""
    start = torch.arange(count, device=packed.device) * bits
    first, last = start // 8, (start + bits - 1) // 8
    words = packed.to(torch.int64)
    word = words[..., first] | (words[..., last] << 8) * (last > first)
    return (word >> start % 8) & (2**bits - 1)
