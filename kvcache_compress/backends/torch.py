"""Back end in plain PyTorch: the fallback of the other back ends and the reference for their kernels.

Packed tokens are scored and summed in code space, chunk by chunk; no token is rotated back.
"""

import torch

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.adaptive.eras import runs
from kvcache_compress.storage.backend import Backend
from kvcache_compress.storage.side import MAX_DECODE_TOKENS
from kvcache_compress.storage.view import DECODE_CHUNK_TOKENS, AttentionPath, View

from . import tiled


class TorchBackend(Backend):
    """Plain PyTorch: every device and every codec."""

    name = "torch"
    always_tiles = False
    """True if long chunks use tiles even in short layers."""

    def runs_on(self, device: torch.device, asked: bool = False) -> bool:
        return True

    def path(self, call: AttentionCall, keys: View, values: View) -> AttentionPath | None:
        """Choose how a call attends: see "Which path attends" in docs/dev/how-it-works.md."""
        if self.takes(call, keys, values) and (keys.packed or call.query.shape[2] <= MAX_DECODE_TOKENS):
            return self
        long = keys.packed > (0 if self.always_tiles else tiled.TILE_TOKENS)
        return tiled.TILED.path(call, keys, values) if long else None

    def attend(self, call: AttentionCall, keys: View, values: View) -> torch.Tensor:
        return attend(call, keys, values)


def attend(call: AttentionCall, keys: View, values: View) -> torch.Tensor:
    """Attend to a layer with a few queries `[B, Hq, n, Dk]` of the last tokens, and a mask over stored tokens.

    Returns `[B, n, Hq, Dv]` in the query's dtype; queries that see no token get zeros.
    """
    query, softcap, s_aux = call.query, call.softcap, call.s_aux
    batch, query_heads, count, _ = query.shape
    heads = keys.sinks.shape[1]
    groups = query_heads // heads
    rows = query.reshape(batch, heads, groups * count, -1).float()
    scores = _scores(rows, keys).unflatten(2, (groups, count)).flatten(1, 2) * call.scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = call.mask.applied(scores)
    top = scores.amax(-1, keepdim=True)
    if s_aux is not None:
        top = torch.maximum(top, s_aux.float().view(1, -1, 1, 1))
    top = top.clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + torch.exp(s_aux.float().view(1, -1, 1, 1) - top)
    weights = weights / total.clamp_min(torch.finfo(torch.float32).tiny)
    output = _weighted_sum(weights.unflatten(1, (heads, groups)).flatten(2, 3), values)
    output = output.unflatten(2, (groups, count)).flatten(1, 2)
    return output.transpose(1, 2).to(query.dtype).contiguous()


def _scores(rows: torch.Tensor, keys: View) -> torch.Tensor:
    parts = [rows @ keys.sinks.float().mT]
    for codec, first, last in runs(keys.eras, 0, keys.packed):
        mapped = codec.map_query(rows)
        for start in range(first, last, DECODE_CHUNK_TOKENS):
            stop = min(start + DECODE_CHUNK_TOKENS, last)
            parts.append(codec.score(mapped, keys.store.read(start, stop), keys.rope(start, stop)))
    parts.append(rows @ keys.tail.float().mT)
    return torch.cat(parts, -1)


def _weighted_sum(weights: torch.Tensor, values: View) -> torch.Tensor:
    sinks = values.sinks.shape[2]
    output = weights[..., :sinks] @ values.sinks.float()
    output = output + weights[..., sinks + values.packed :] @ values.tail.float()
    summed: torch.Tensor | None = None
    for start in range(0, values.packed, DECODE_CHUNK_TOKENS):
        stop = min(start + DECODE_CHUNK_TOKENS, values.packed)
        fields = values.store.read(start, stop)
        part = values.codec.accumulate(weights[..., sinks + start : sinks + stop], fields, values.rope(start, stop))
        summed = part if summed is None else summed + part
    return output if summed is None else output + values.codec.map_output(summed)
