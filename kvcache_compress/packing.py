"""Packing of integer codes into bit planes and back, in torch; the reference for the kernels' unpacking."""

from __future__ import annotations

import torch

from .layout import CODES_PER_WORD, PLANE_WORD, PLANES, words_per_token


def pack(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Packs codes `[..., width]` (integers below `2 ** bits`) into one tensor `[..., width / 8]` per bit plane."""
    parts = codes.to(torch.int64).unflatten(-1, (CODES_PER_WORD, words_per_token(codes.shape[-1])))
    planes = []
    shift = 0
    for plane in PLANES[bits]:
        fields = (parts >> shift) & (2**plane - 1)
        places = plane * torch.arange(CODES_PER_WORD, device=codes.device)
        planes.append((fields << places[:, None]).sum(-2).to(PLANE_WORD[plane]))
        shift += plane
    return tuple(planes)


def unpack(planes: tuple[torch.Tensor, ...], bits: int) -> torch.Tensor:
    """Inverse of `pack`: int64 codes `[..., width]`."""
    codes: torch.Tensor | None = None
    shift = 0
    for plane, words in zip(PLANES[bits], planes, strict=True):
        places = plane * torch.arange(CODES_PER_WORD, device=words.device)
        fields = (words.to(torch.int64).unsqueeze(-2) >> places[:, None]) & (2**plane - 1)
        part = fields.flatten(-2) << shift
        codes = part if codes is None else codes | part
        shift += plane
    if codes is None:
        raise ValueError("no bit planes to unpack")
    return codes
