"""CommVQ's encoder of values (section 4.1): bits of tokens, over all heads together, and their decoding."""

from dataclasses import dataclass

import torch
from torch.nn.functional import gelu

from kvcache_compress.codecs import packing


def logits(network: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Numbers `[..., bits]` whose signs are the bits of normalized tokens `[..., H * D]`."""
    hidden = gelu(tokens @ network["weight1"].mT + network["bias1"])
    return hidden @ network["weight2"].mT + network["bias2"]


@dataclass(frozen=True)
class BitEncoder:
    """Two linear layers whose output signs are a token's bits, and a codebook whose rows the bits select and sum.

    tensors: float16, by their names in `codebook_file`.
    """

    tensors: dict[str, torch.Tensor]
    heads: int

    @property
    def codebook(self) -> torch.Tensor:
        """Codebook by head, float16 `[H, bits, D]`."""
        return self.tensors["codebook"].unflatten(1, (self.heads, -1)).transpose(0, 1)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Encode float32 `x` `[B, H, T, D]`: packed bits, their points, and the norms of whole tokens, `[B, H, T]`.

        Each head stores an equal share of its token's bits.
        """
        tokens = x.transpose(1, 2).flatten(2)
        norm = tokens.norm(dim=-1)
        network = {name: tensor.float() for name, tensor in self.tensors.items()}
        bits = logits(network, tokens / norm.clamp_min(1e-30)[..., None]) > 0
        packed = packing.pack(bits.unflatten(2, (self.heads, -1)), 1)[0].transpose(1, 2)
        return packed, self.decode(packed), norm[:, None].expand(x.shape[:3])

    def bits(self, packed: torch.Tensor) -> torch.Tensor:
        """All bits of each token, float32 `[B, 1, T, bits]`."""
        return packing.unpack((packed,), 1).transpose(1, 2).flatten(2).float()[:, None]

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        """Decode packed bits `[B, H, T, bytes]` to float32 `[B, H, T, D]`."""
        return self.bits(packed) @ self.codebook.float()
