"""Attention over tiles of decoded tokens, so that a long layer is never decoded whole.

PyTorch's memory-efficient attention runs on each tile and also returns the log-sum-exp of its scores. The results are
merged by

    lse = log Σ_t exp(s_t),   out = Σ_i exp(lse_i - lse) out_i
"""

from collections.abc import Iterator

import torch

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.view import DECODE_CHUNK_TOKENS, AttentionPath, View

TILE_TOKENS = 4 * DECODE_CHUNK_TOKENS
"""Tokens per tile. Each merge reads and writes the output once, so larger tiles cost less."""
BLOCK_QUERIES = 1024
"""Queries per call of PyTorch's attention. A block's mask has up to 8 million numbers per sequence, times the query
heads if the mask differs by head."""


class Tiled(AttentionPath):
    """Attention over tiles of decoded tokens."""

    name = "tiled"
    takes_padding_masks = True

    def path(self, call: AttentionCall, keys: View, values: View) -> "Tiled | None":
        """Itself, if it supports this call's options, dtypes, head dimensions and device."""
        query, dims = call.query, (keys.sinks.shape[3], values.sinks.shape[3])
        if query.device.type == "cpu":
            fits = dims[0] == dims[1] and query.dtype != torch.float64
        else:
            dtypes = [torch.float32, torch.float16]
            if query.is_cuda and torch.cuda.get_device_capability(query.device)[0] >= 8:
                dtypes.append(torch.bfloat16)
            fits = query.is_cuda and query.dtype in dtypes and not any(dim % 8 for dim in dims)
        return self if fits and call.softcap is None and keys.slots is None else None

    def attend(self, call: AttentionCall, keys: View, values: View) -> torch.Tensor:
        return attend(call, keys, values)


TILED = Tiled()


def attend(call: AttentionCall, keys: View, values: View) -> torch.Tensor:
    """Attend tile by tile; arguments and result as in `backends.torch.attend`, but the mask may also be a padding mask.

    Additive masks are clamped to -1e30 (float16: -6e4). Temporary memory: one tile of decoded keys and values, its mask
    for a block of queries, and the output in float32.
    """
    query = call.query
    batch, heads, count, _ = query.shape
    groups, tokens = heads // keys.sinks.shape[1], keys.tokens
    out = query.new_zeros(batch, heads, count, values.sinks.shape[3], dtype=torch.float32)
    lse = out.new_full((batch, heads, count), -torch.inf)
    sees = torch.zeros(batch, heads, count, dtype=torch.bool, device=query.device)
    begin = 0
    for key, value in _tiles(keys, values):
        key, value, end = key.to(query.dtype), value.to(query.dtype), begin + key.shape[2]
        for first in range(0, count, BLOCK_QUERIES):
            rows = slice(first, min(first + BLOCK_QUERIES, count))
            allowed = call.mask.tile(rows, begin, end, count, tokens, query.device)
            if allowed is None:
                sees[:, :, rows] = True
            else:
                sees[:, :, rows] |= (allowed if allowed.dtype == torch.bool else allowed > -torch.inf).any(-1)
            bias = None if allowed is None else _bias(allowed, query.dtype)
            # One query head per key/value head at a time, because repeating keys and values would copy the tiles.
            for i in range(groups):
                head_bias = bias if bias is None or bias.shape[1] == 1 else bias[:, i::groups]
                part, part_lse = _attention(query[:, i::groups, rows], key, value, head_bias, call.scaling)
                known = lse[:, i::groups, rows]
                both = torch.logaddexp(known, part_lse)
                out[:, i::groups, rows].lerp_(part.float(), torch.exp(part_lse - both)[..., None])
                known.copy_(both)
        begin = end
    if call.s_aux is not None:
        out *= torch.sigmoid(lse - call.s_aux.float()[:, None])[..., None]
    out.masked_fill_(~sees[..., None], 0.0)
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _tiles(keys: View, values: View) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield decoded keys and values in order, tile by tile, `[B, H, tokens, D]`."""
    for start in range(0, keys.packed, TILE_TOKENS):
        stop = min(start + TILE_TOKENS, keys.packed)
        yield keys.decoded_tile(start, stop), values.decoded_tile(start, stop)
    yield from zip(keys.tail.split(TILE_TOKENS, 2), values.tail.split(TILE_TOKENS, 2), strict=True)


def _bias(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a mask to finite additive numbers, with rows that start at multiples of 16 numbers as GPUs require."""
    lowest = -6e4 if dtype == torch.float16 else -1e30
    *shape, width = allowed.shape
    bias = torch.zeros(*shape, -(-width // 16) * 16, dtype=dtype, device=allowed.device)[..., :width]
    if allowed.dtype == torch.bool:
        return bias.masked_fill_(~allowed, lowest)
    return bias.copy_(allowed.clamp(min=lowest))


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run PyTorch's attention: output `[B, H, n, Dv]` and log-sum-exp, float32 `[B, H, n]`."""
    if bias is not None:
        bias = bias.expand(*query.shape[:3], key.shape[2])
    if query.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, False, scale=scaling
        )
        return out, lse[..., : query.shape[2]]  # PyTorch pads the queries to a multiple of 32
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scaling
    )
