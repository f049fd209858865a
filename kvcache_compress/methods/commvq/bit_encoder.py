"""CommVQ's encoder of values (section 4.1): bits of tokens, over all heads together, and their decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.base import Fields


@dataclass(frozen=True)
class BitEncoder:
    """Two linear layers whose output signs are a token's bits, and a codebook whose rows the bits select and sum.

    tensors: float16, named as in the file: `weight1` `[hidden, H * D]`, `bias1`, `weight2` `[bits, hidden]`, `bias2`,
        `codebook` `[bits, H * D]`.
    """

    tensors: dict[str, torch.Tensor]
    heads: int

    def codebook(self) -> torch.Tensor:
        """Codebook by head, float16 `[H, bits, D]`."""
        return self.tensors["codebook"].unflatten(1, (self.heads, -1)).transpose(0, 1)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Encode float32 `x` `[B, H, T, D]`.

        Returns:
            Packed bits, each head with an equal share of its token's bits; the unit vectors that they decode to,
            `[B, H, T, D]`; and the norm of each token, `[B, T]`.
        """
        token = x.transpose(1, 2).flatten(2)
        norm = token.norm(dim=-1)
        weights = {name: tensor.float() for name, tensor in self.tensors.items()}
        hidden = token / norm.clamp_min(1e-30)[..., None] @ weights["weight1"].mT + weights["bias1"]
        signs = torch.nn.functional.gelu(hidden) @ weights["weight2"].mT + weights["bias2"]
        packed = packing.pack(signs.unflatten(2, (self.heads, -1)) > 0, 1)[0].transpose(1, 2)
        return packed, self.points((signs > 0).float()), norm

    def bits(self, fields: Fields) -> torch.Tensor:
        """All bits of each token, float32 `[B, T, bits]`."""
        return packing.unpack(fields, 1).transpose(1, 2).flatten(2).float()

    def points(self, bits: torch.Tensor) -> torch.Tensor:
        """Decode bits `[B, T, bits]` to float32 `[B, H, T, D]`."""
        return bits[:, None] @ self.codebook().float()
