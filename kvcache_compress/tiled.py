"""Attention of many queries, a chunk of a prompt, over a compressed layer that is never decoded whole.

Tiles of packed tokens are decoded one after the other; PyTorch's memory-efficient attention takes each and gives the
logarithm of the sum of its exponentials, by which the tiles' results are merged:

    lse = log Σ_t exp(s_t),   out = Σ_i exp(lse_i - lse) out_i
"""

from __future__ import annotations

import torch

from .view import TILE_TOKENS, SideSegments

HIDDEN = -30000.0
"""Added to the logits of hidden tokens; half precision holds it, and sums of it stay finite in any dtype."""


def attend(
    query: torch.Tensor,
    keys: SideSegments,
    values: SideSegments,
    mask: torch.Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same arguments and result as `reference.attend`; there is no `softcap`, and on CPUs `Dk` is `Dv`.

    Besides the result it holds one tile of decoded keys and values, its part of the mask and the output in float32.
    """
    assert softcap is None
    groups = query.shape[1] // keys.sinks.shape[1]
    out = lse = query.new_empty(0)
    begin = 0
    for start in range(0, keys.packed, TILE_TOKENS):
        stop = min(start + TILE_TOKENS, keys.packed)
        key, value = (side.tile(start, stop).to(query.dtype) for side in (keys, values))
        end = begin + key.shape[2]
        bias = _bias(mask, query, begin, end, keys.shape[2])
        # The queries of a group one after the other: keys and values repeated for them would be as large as more tiles.
        parts = [
            _attention(query[:, i::groups], key, value, None if bias is None else bias[:, i::groups], scaling)
            for i in range(groups)
        ]
        new_out, new_lse = (torch.stack(part, 2).flatten(1, 2).float() for part in zip(*parts, strict=True))
        if begin:
            out.lerp_(new_out, torch.sigmoid(new_lse - lse)[..., None])
            lse = torch.logaddexp(lse, new_lse)
        else:
            out, lse = new_out, new_lse
        begin = end
    if sinks is not None:
        out *= torch.sigmoid(lse - sinks.float()[:, None])[..., None]
    out.masked_fill_((lse < HIDDEN / 2)[..., None], 0.0)
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _bias(mask: torch.Tensor | None, query: torch.Tensor, begin: int, end: int, tokens: int) -> torch.Tensor | None:
    """What is added to the logits of tokens `[begin, end)`, of `tokens` in all: `[B, Hq, n, end - begin]`, or None."""
    batch, heads, count, _ = query.shape
    width = end - begin
    if mask is None:
        if end <= tokens - count + 1:
            return None
        mask = torch.ones(count, width, dtype=torch.bool, device=query.device).tril(tokens - count - begin)[None, None]
    else:
        mask = mask.expand(-1, -1, -1, tokens)[..., begin:end]
    # Rows that begin at multiples of 16 numbers, as the kernels for GPUs need them.
    bias = query.new_zeros(*mask.shape[:3], -(-width // 16) * 16)[..., :width]
    if mask.dtype == torch.bool:
        bias.masked_fill_(~mask, HIDDEN)
    else:
        bias.copy_(mask.clamp(min=HIDDEN))
    return bias.expand(batch, heads, count, width)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's attention, `[B, H, n, Dv]`, and the logarithm of the sum of the exponentials, float32 `[B, H, n]`."""
    if query.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, False, scale=scaling
        )
        return out, lse[..., : query.shape[2]]  # which has room for a multiple of 32 rows
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scaling
    )
