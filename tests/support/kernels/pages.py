"""Attention over pages with the cases of attention over contiguous tokens."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.packed_store import PackedStore
from kvcache_compress.storage.view import View
from support.kernels.attention_cases import CASES, Case

_PLAIN = [name for name, case in CASES.items() if case.count == 1 and case.mask is None and not case.eras]
PAGED = {name: CASES[name] for name in _PLAIN if CASES[name].packed} | {
    "long": Case(packed=1500, batch=3, softcap=30.0, s_aux=True),
    "long-kivi": replace(CASES["kivi-2-4"], packed=480, batch=2),
}
"""Calls of one query that sees all tokens."""


def over_pages(attend: Callable[..., torch.Tensor]) -> Callable[[AttentionCall, View, View], torch.Tensor]:
    """A way to attend to two views that first moves their packed tokens to pages in random order.

    `attend` is called as `Backend.attend_to_pages`.
    """

    def moved(call: AttentionCall, keys: View, values: View) -> torch.Tensor:
        page = math.lcm(64, keys.store.group, values.store.group)
        batch, pages = len(keys.sinks), -(-keys.packed // page)
        blocks = torch.randperm(batch * pages + 3, generator=torch.Generator().manual_seed(0))[: batch * pages]
        blocks = blocks.to(keys.device).view(batch, pages)
        counts = torch.tensor([keys.sinks.shape[2], keys.packed, keys.tail_tokens], device=keys.device)
        slots = torch.arange(batch, device=keys.device).flip(0)
        rows = torch.cat([slots[:, None], counts.expand(batch, 3), blocks], 1).contiguous()
        ring = (torch.arange(keys.tail_tokens) + keys.packed) % (keys.tail_tokens + 2)
        return attend(call, *(_in_pages(view, blocks, slots, ring, page) for view in (keys, values)), rows, page)

    return moved


def _in_pages(view: View, blocks: torch.Tensor, slots: torch.Tensor, ring: torch.Tensor, page: int) -> View:
    batch, pages = blocks.shape
    found: Any = copy.copy(view)
    found.sinks = view.sinks[slots].contiguous()
    found.tail_buffer = view.tail.new_ones(batch, view.shape[1], len(ring) + 2, view.shape[3])
    found.tail_buffer[:, :, ring.to(view.device)] = view.tail[slots]
    found.store = PackedStore(view.codec.fields, 0, view.sinks.shape[1], view.device)
    pools = []
    for stored, x in zip(view.store.fields, view.store.read(0, view.packed), strict=True):
        rows = page // stored.tokens
        padded = x.new_zeros(batch, x.shape[1], pages * rows, *x.shape[3:])
        padded[:, :, : x.shape[2]] = x
        pool = torch.full_like(padded[:1, :, :rows], 1).repeat(batch * pages + 3, *[1] * (x.ndim - 1))
        pool[blocks.flatten()] = padded.unflatten(2, (pages, rows)).transpose(1, 2).flatten(0, 1)
        pools.append(pool)
    found.store.buffers = tuple(pools)
    if view.track is not None:
        found.track = copy.copy(view.track)
        found.track.buffer = view.track.buffer[:1].expand(2, -1, -1)
    return found
