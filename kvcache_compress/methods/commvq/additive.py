"""Residual additive vector quantization in torch: the codes of CommVQ (sections 4.1 and 4.2, appendix A.2).

Complex form, for keys before RoPE: a round with centres c `[N, g]` (complex) adds `c[a] + i c[b]` to the g pairs of a
group, so its N² points commute with every rotation of the pairs. Real form, for values: a round adds `c[a]`. So a point
is the sum of one row from each of S tables: c alone, or c and i·c with real and imaginary parts interleaved.

The search avoids the N² points: |z - c_a - i c_b|² = |z|² + (|c_a|² - 2<z, c_a>) + (|c_b|² - 2<z, i c_b>) + 2<c_a, i
c_b> needs 2N inner products per vector and a table `[N, N]` that depends on the codebook alone.

All functions accept leading dimensions `*` (heads, groups), equal in all arguments.
"""

from collections.abc import Callable
from math import gcd
from typing import TypeAlias

import torch

Step: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""One round of the search: (vectors, tables, costs) to (codes, residuals)."""
BLOCK = 1 << 20
"""Numbers of the vectors that are searched together; bounds the memory of the search."""
CHUNKS = {"cpu": 1 << 20, "other": 1 << 23}
"""Distances to pairs of centres held at once: few enough for a processor's cache, or enough to keep a GPU busy."""


def times_i(c: torch.Tensor) -> torch.Tensor:
    """Multiply complex numbers `[..., 2]` (real, imaginary) by i."""
    return torch.stack([-c[..., 1], c[..., 0]], -1)


def complex_tables(centres: torch.Tensor) -> torch.Tensor:
    """Tables `[*, 2, N, 2g]` of the complex form with centres `[*, N, g, 2]`."""
    return torch.stack([centres, times_i(centres)], -4).flatten(-2)


def point_costs(tables: torch.Tensor) -> torch.Tensor:
    """Half the squared lengths of all points of tables `[*, S, N, w]`: `[*, N]` for one table, `[*, N, N]` for two."""
    square, (first, *others) = tables[..., 0, :, :].square().sum(-1) / 2, tables.unbind(-3)
    return square[..., :, None] + square[..., None, :] + first @ others[0].mT if others else square


def chunk_of(costs: torch.Tensor) -> int:
    """Vectors whose distances to all points are held at once."""
    return max(1, CHUNKS["cpu" if costs.device.type == "cpu" else "other"] // costs.numel())


def nearest(z: torch.Tensor, tables: torch.Tensor, costs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One round: codes `[*, n, S]` of the points of `tables` nearest to `z` `[*, n, w]`, and the residual of z."""
    products = z @ tables.flatten(-3, -2).mT
    if tables.shape[-3] == 1:
        codes = (costs[..., None, :] - products).argmin(-1, keepdim=True)
    else:
        first, second = products.chunk(2, -1)
        best = [(costs[..., None, :, :] - part[..., None, :]).amin(-1) for part in second.split(chunk_of(costs), -2)]
        a = (torch.cat(best, -2) - first).argmin(-1, keepdim=True)
        row = costs.gather(-2, a.expand(*a.shape[:-1], costs.shape[-1])) - second
        codes = torch.cat([a, row.argmin(-1, keepdim=True)], -1)
    return codes, z - _sum_rows(codes, tables)


def encode(z: torch.Tensor, tables: torch.Tensor, step: Step = nearest) -> torch.Tensor:
    """Greedy residual codes int64 `[*, n, R, S]` of `z` float32 `[*, n, w]`; tables `[*, R, S, N, w]`."""
    rounds = [(table, point_costs(table)) for table in tables.movedim(-4, 0).contiguous()]
    blocks = []
    for part in z.split(max(1, BLOCK // (z[..., :1, :].numel() or 1)), -2):
        residual, codes = part.contiguous(), []
        for table, costs in rounds:
            code, residual = step(residual, table, costs)
            codes.append(code)
        blocks.append(torch.stack(codes, -2))
    return torch.cat(blocks, -3)


def decode(codes: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Inverse of `encode`: `[*, n, w]`."""
    return _sum_rows(codes.flatten(-2), tables.flatten(-4, -3))


def _sum_rows(index: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
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
    count, together = codes.shape[-1], 8 // gcd(bits, 8)  # as many codes as fill whole bytes
    runs = torch.nn.functional.pad(codes, (0, -count % together)).unflatten(-1, (-1, together))
    words = (runs << torch.arange(together, device=codes.device) * bits).sum(-1, keepdim=True)
    packed = words.view(torch.uint8)[..., : together * bits // 8].flatten(-2)
    return packed[..., : code_bytes(count, bits)].contiguous()


def unpack_codes(packed: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """Inverse of `pack_codes`: int64 `[..., count]`. A code may span two bytes, which rules out 7 and 11 bits."""
    start = torch.arange(count, device=packed.device) * bits
    first, last = start // 8, (start + bits - 1) // 8
    words = packed.to(torch.int64)
    word = words[..., first] | (words[..., last] << 8) * (last > first)
    return (word >> start % 8) & (2**bits - 1)
