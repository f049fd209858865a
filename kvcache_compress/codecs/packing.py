"""Pack integer codes into bit planes and unpack them, in torch; the reference for the kernels."""

import sys
from functools import reduce
from operator import or_

import torch

from .layout import CODES_PER_WORD, PLANE_WORD, PLANES


def pack(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Pack codes `[..., width]` (integers below `2 ** bits`) into one tensor `[..., width / 8]` per bit plane."""
    parts = codes.to(torch.int64).unflatten(-1, (CODES_PER_WORD, -1))
    planes = []
    shift = 0
    for plane in PLANES[bits]:
        fields = (parts >> shift) & (2**plane - 1)
        shifts = plane * torch.arange(CODES_PER_WORD, device=codes.device)
        planes.append((fields << shifts[:, None]).sum(-2).to(PLANE_WORD[plane]))
        shift += plane
    return tuple(planes)


def unpack(planes: tuple[torch.Tensor, ...], bits: int) -> torch.Tensor:
    """Inverse of `pack`: int64 codes `[..., width]`."""
    parts, shift = [], 0
    for plane, words in zip(PLANES[bits], planes, strict=True):
        shifts = plane * torch.arange(CODES_PER_WORD, device=words.device)
        fields = (words.to(torch.int64).unsqueeze(-2) >> shifts[:, None]) & (2**plane - 1)
        parts.append(fields.flatten(-2) << shift)
        shift += plane
    return reduce(or_, parts)


def look_up(planes: tuple[torch.Tensor, ...], bits: int, table: torch.Tensor) -> torch.Tensor:
    """Look up the levels of packed codes: float32 `[..., width]`, in memory order (see `memory_order`).

    Same as `levels[unpack(planes, bits)]` with fewer operations: two or four codes form one index into `table`, from
    `level_table`. The words of a token must be contiguous, as in a store.
    """
    low, count, words = PLANES[bits][0], _codes_at_once(bits), planes[0].shape[-1]
    index = planes[0].view(torch.uint8).unflatten(-1, (words, -1)).long()
    if count * low == 4:
        index = torch.stack([index & 15, index >> 4], -1).flatten(-2)
    if bits > low:
        taken = count * (bits - low)
        shifts = taken * torch.arange(index.shape[-1], device=index.device)
        index |= ((planes[1].long().unsqueeze(-1) >> shifts) & (2**taken - 1)) << (count * low)
    runs = table.index_select(0, index.flatten())
    return runs.view(torch.float32).view(*planes[0].shape[:-1], CODES_PER_WORD * words)


def level_table(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Table for `look_up`: the levels `[2 ** bits]` of every run of two or four codes, viewed as one number."""
    if sys.byteorder != "little":
        raise RuntimeError("packed codes are read byte by byte, which needs a little-endian machine")
    low, count = PLANES[bits][0], _codes_at_once(bits)
    place = torch.arange(count, device=levels.device)
    index = torch.arange(2 ** (count * bits), device=levels.device)[:, None]
    codes = (index >> (low * place)) & (2**low - 1)
    if bits > low:
        codes |= ((index >> (count * low + (bits - low) * place)) & (2 ** (bits - low) - 1)) << low
    return levels.float()[codes].view(torch.int64 if count == 2 else torch.complex128).squeeze(-1)


def _codes_at_once(bits: int) -> int:
    """Codes per table lookup; more would make the table large compared with a codec's other constants."""
    return 4 if bits <= 2 else 2


def memory_order(x: torch.Tensor) -> torch.Tensor:
    """Reorder channels `[..., width]` to the order of their codes in memory, word by word."""
    return x.unflatten(-1, (CODES_PER_WORD, -1)).transpose(-1, -2).flatten(-2)


def channel_order(x: torch.Tensor) -> torch.Tensor:
    """Inverse of `memory_order`."""
    return x.unflatten(-1, (-1, CODES_PER_WORD)).transpose(-1, -2).flatten(-2)
