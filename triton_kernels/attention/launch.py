"""Launch the attention kernels: operands, tiles and splits. `attend` is the twin of `backends.torch.attend`."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.adaptive.eras import runs
from kvcache_compress.storage.side import FLUSH_TOKENS, PACKED
from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels.common.eras import joined
from kvcache_compress.triton_kernels.common.operands import KernelSide, Tile, is_fast, launch_options, next_power_of_2
from kvcache_compress.triton_kernels.common.plan import KernelCall, Plan, addresses, kept, portable

from .kernel import BOOL_MASK, DENSE, FLOAT_MASK, LOG2E, NO_MASK, Masking, attend_kernel
from .merge import MERGED, merge_kernel
from .query import map_query_call

MAX_TILE_ROWS = 32
"""Query rows per program of more than two warps (else 16): more would spill registers, so codes are read again."""
RESIDENT_WARPS = 8
"""Warps of the attention kernel resident on a multiprocessor: 65,536 registers at 255 per thread."""
MAX_SPLITS = MERGED.value - DENSE.value
MIN_SPLIT_TOKENS = 128
"""Shorter splits would write and merge as much as they read."""
ROUNDS, MIN_ROUND_TOKENS = 6, 384
"""Programs per resident program, and the fewest tokens of each. A processor that is done early takes another program.
On an H200, 8 sequences of 32K tokens take .76 to .79 of the time that one round takes."""
SCRATCH = ("p_mapped", "p_rows", "p_shift", "p_acc", "p_dense", "p_stats")
"""Buffers that one kernel fills for the next."""


class Sizes(NamedTuple):
    """Tokens per split, number of splits, whether packed tokens fill every tile, and the tile."""

    split_tokens: int
    splits: int
    even: bool
    tile: Tile


def attend(
    call: AttentionCall, keys: View, values: View, pages: torch.Tensor | None = None, page: int = 0
) -> torch.Tensor:
    """Attend with the kernels; same arguments and result as the twin, `backends.torch.attend`.

    With slots (`keys.slots`), the call's mask is over tokens. With `pages`, arguments and result are those of
    `Backend.attend_to_pages`, and `keys.packed` is the largest number of packed tokens.
    """
    query, mask, eras = call.query.contiguous(), call.mask.tensor, keys.eras
    s_aux = call.s_aux
    if len(eras) == 1:
        k_side, v_side, packed = eras[0].codec.kernel_side, values.codec.kernel_side, query
    else:
        assert keys.slots is None, "static layers have one era"
        k_side, v_side = joined(eras, query.dtype), values.codec.kernel_side
        packed = k_side.eras
    like = (v_side, query.shape, query.dtype, query.device, keys.sinks.shape, keys.slots is None, page)
    sizes = k_side.sizes.get((keys.packed, like))
    if sizes is None:
        sizes = kept(k_side.sizes, (keys.packed, like), sizes_of(query, k_side, keys, values, page))
    ring = 0
    if keys.slots is not None:
        packed, ring = keys.slots.rows, keys.slots.tail_capacity
    elif pages is not None:
        packed, ring = pages, keys.tail_buffer.shape[2]
    inputs, mask_kind = attend_inputs(query, keys, values, mask, packed, sizes.split_tokens, ring)
    if pages is not None:
        inputs |= {"k_capacity": -(-keys.packed // page) * page, "rope_capacity": 0}
    batch, heads, count, _ = query.shape
    # Triton's interpreter truncates to bfloat16 where hardware rounds.
    dtype = torch.float32 if portable() else query.dtype
    out = query.new_empty(batch, count, heads, values.sinks.shape[3], dtype=dtype)
    changing = inputs | ({"p_out": out} if s_aux is None else {"p_out": out, "p_s_aux": s_aux})
    pointers, repeatable = addresses(changing)
    key = (
        like, sizes.splits, sizes.even, keys.sinks.dtype, values.sinks.dtype, mask_kind, inputs["p_mask"].dtype,
        inputs["p_mask"].device, inputs["s_mask_h"] == 0, call.scaling, call.softcap,
        None if s_aux is None else (s_aux.dtype, s_aux.device), repeatable, k_side.map_call and inputs["k_capacity"],
        page and (_strides(keys), _strides(values)),
    )  # fmt: skip
    plan = k_side.plans.get(key)
    if plan is None:
        calls = attention_calls(call, query, k_side, keys, values, inputs, mask_kind, sizes, out, page)
        scratch = {name: x for call in calls[:2] for name, x in call[2].items() if name in SCRATCH}
        plan = kept(k_side.plans, key, Plan(calls, changing, scratch, repeatable))
    plan.run(changing, pointers, query.device)
    return out.to(query.dtype) if portable() else out


def attend_inputs(
    query: torch.Tensor, keys: View, values: View, mask: torch.Tensor | None, packed: torch.Tensor, split_tokens: int,
    ring: int = 0,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Arguments of `attend_kernel` that change from step to step, and the kind of the mask.

    `packed` are rows with numbers of tokens, whose tails have `ring` slots, or the keys' eras, or any tensor if there
    is neither.
    """
    packed, s_packed = (packed[:, PACKED:], packed.stride(0)) if ring else (packed, 0)
    mask_kind, strides = NO_MASK, (0, 0, 0, 0)
    if mask is not None:
        mask = mask.expand(*query.shape[:3], -1 if ring else keys.tokens)
        mask_kind, strides = FLOAT_MASK, mask.stride()
        if mask.dtype == torch.bool:
            mask, mask_kind = mask.view(torch.uint8), BOOL_MASK
    k_store, v_store, k_tail, v_tail = keys.store, values.store, keys.tail_buffer, values.tail_buffer
    rope = None if keys.track is None else keys.track.buffer
    inputs = dict(  # noqa: C408 - named as the kernel's parameters are
        p_q=query, keys=(keys.sinks.contiguous(), k_tail, *k_store.buffers),
        values=(values.sinks.contiguous(), v_tail, *v_store.buffers),
        p_rope=query if rope is None else rope, p_mask=query if mask is None else mask,
        p_packed=packed, n_packed=keys.packed, n_tail=keys.tail_tokens,
        split_tokens=split_tokens, k_capacity=k_store.capacity, v_capacity=v_store.capacity,
        k_tail_capacity=k_tail.shape[2], v_tail_capacity=v_tail.shape[2],
        rope_capacity=0 if rope is None else rope.shape[1],
        s_mask_b=strides[0], s_mask_h=strides[1], s_mask_n=strides[2], s_mask_t=strides[3],
        s_packed=s_packed, ring=max(1, ring),
    )  # fmt: skip
    return inputs, mask_kind.value


def attention_calls(
    call: AttentionCall, query: torch.Tensor, k_side: KernelSide, keys: View, values: View, inputs: dict[str, Any],
    mask_kind: int, sizes: Sizes, out: torch.Tensor, page: int = 0,
) -> list[KernelCall]:  # fmt: skip
    """Launches of a call: map of the queries, attention, merge.

    `query` is the call's, contiguous; `inputs` and `mask_kind` come from `attend_inputs`; `out` is `[B, n, Hq, Dv]`.
    Intermediate results are among the launches' arguments.
    """
    (batch, query_heads, count, dk), heads, dv = query.shape, keys.sinks.shape[1], values.sinks.shape[3]
    softcap, s_aux, groups = call.softcap, call.s_aux, query_heads // heads
    rows = groups * count
    v_side: KernelSide = values.codec.kernel_side
    scaling, tile = call.scaling * LOG2E.value, sizes.tile
    mapping = (k_side.map_call or map_query_call)(k_side, query, heads, scaling, inputs)
    mapped = mapping[2]
    tile_rows = _tile_rows(tile, rows)
    row_blocks = -(-rows // tile_rows)
    k_tables, k_form = k_side.operands(query.dtype, dk, 0 if keys.track is None else keys.track.buffer.shape[2])
    v_tables, v_form = v_side.operands(query.dtype, dv, 0)
    shared = count == 1 and inputs["s_mask_h"] == 0
    masking = Masking(mask_kind, softcap is not None, causal=count > 1, shared=shared)
    attended = inputs | dict(
        p_mapped=mapped["p_mapped"], p_rows=mapped["p_rows"], p_shift=mapped.get("p_shift", mapped["p_rows"]),
        k_tables=k_tables, v_tables=v_tables,
        p_acc=query.new_empty(batch, heads, sizes.splits, rows, sum(v_side.widths), dtype=torch.float32),
        p_dense=query.new_empty(batch, heads, DENSE.value, rows, dv, dtype=torch.float32),
        p_stats=query.new_empty(batch, heads, sizes.splits + DENSE.value, rows, 2, dtype=torch.float32),
        n_sinks=keys.sinks.shape[2], scaling=scaling, softcap=(softcap or 0.0) * LOG2E.value,
        G=groups, N=count, SCORE=k_side.function, ACCUMULATE=v_side.function, K=k_form, V=v_form, MASKING=masking,
        M=tile_rows, BLOCK=tile.tokens, EVEN=sizes.even, BOUNDED=inputs["s_packed"] > 0,
        ROW_BLOCKS=row_blocks, PAGE=page, K_STRIDES=_strides(keys) if page else (),
        V_STRIDES=_strides(values) if page else (), FAST=is_fast(query.dtype), num_warps=tile.warps,
        num_stages=tile.stages, **launch_options(),
    )  # fmt: skip
    attending = attend_kernel, (sizes.splits + DENSE.value, heads * row_blocks, batch), attended
    p_acc, matrix, padded = attended["p_acc"], v_side.matrix, next_power_of_2(dv)
    # Few and wide chunks: each waits for memory and for sums over threads.
    chunk, warps = (min(64, 8192 // padded), 4) if matrix is None else (min(128, 16384 // padded), 8)
    merged = dict(  # noqa: C408 - named as the kernel's parameters are
        p_acc=p_acc, p_dense=attended["p_dense"], p_stats=attended["p_stats"],
        p_map=p_acc if matrix is None else matrix, p_s_aux=p_acc if s_aux is None else s_aux, p_out=out,
        splits=sizes.splits, s_map=0 if matrix is None or matrix.shape[0] == 1 else matrix.stride(0),
        H=heads, G=groups, N=count, W=p_acc.shape[4], DV=dv, CHUNK=chunk, num_warps=warps,
        HAS_MAP=matrix is not None, HAS_S_AUX=s_aux is not None, enable_fp_fusion=False,
    )  # fmt: skip
    return [mapping, attending, (merge_kernel, (rows, batch * heads, 1), merged)]


def _strides(view: View) -> tuple[int, ...]:
    """Numbers between two blocks of each field of a pool."""
    return tuple(x.stride(0) for x in view.store.buffers)


def _tile_rows(tile: Tile, rows: int) -> int:
    """Query rows per program: columns of the tensor cores' tile, of which NVIDIA's have 8 and AMD's 16."""
    return min(MAX_TILE_ROWS if tile.warps > 2 else 16, max(16 if portable() else 8, next_power_of_2(rows)))


def split_sizes(packed: int, tile: Tile, programs: int, processors: int, more: int = 0) -> tuple[int, int]:
    """Tokens per split (a multiple of the tile's) and number of splits: enough to keep the GPU busy, none too short.

    `more` are splits that may come on top, as a split lies in one era.
    """
    resident = processors * max(1, RESIDENT_WARPS // tile.warps)
    once = min(resident // programs, packed // MIN_SPLIT_TOKENS)
    wanted = max(1, once, min(ROUNDS * resident // programs, packed // MIN_ROUND_TOKENS))
    wanted = max(1, min(MAX_SPLITS, wanted) - more)
    blocks = -(-packed // tile.tokens)
    split_blocks = max(1, -(-blocks // wanted))
    return split_blocks * tile.tokens, -(-blocks // split_blocks)


def tile_shape(k_side: KernelSide, v_side: KernelSide, exact: bool) -> Tile:
    """Tile with which levels and accumulators of both sides stay in registers; `exact` for float32 queries.

    One warp if that is enough: the 16 rows of the tensor cores' tile cannot be split, so more warps repeat work.
    AMD's GPUs get two stages: with three, spectral keys of 256 channels need 72 of the 64 KB of gfx942.
    """
    if exact:
        return Tile(16, 8, 2)
    widest = max(*k_side.widths, *v_side.widths)
    warps = max(k_side.warps, v_side.warps, widest // 16 if widest > 128 else 1)
    return Tile(min(k_side.tokens, v_side.tokens), min(warps, 8), 2 if portable() else 3)


def sizes_of(query: torch.Tensor, k_side: KernelSide, keys: View, values: View, page: int = 0) -> Sizes:
    """Tile and splits for a call's packed tokens; in pages, they are packed `FLUSH_TOKENS` at a time."""
    batch, query_heads, count, _ = query.shape
    heads = keys.sinks.shape[1]
    rows = query_heads // heads * count
    tile = tile_shape(k_side, values.codec.kernel_side, query.dtype == torch.float32)
    programs = batch * heads * -(-rows // _tile_rows(tile, rows))
    more, lengths = len(keys.eras) - 1, [stop - start for _, start, stop in runs(keys.eras, 0, keys.packed)]
    split_tokens, splits = split_sizes(keys.packed, tile, programs, _processors(query.device), more)
    if more:
        splits = sum(-(-tokens // split_tokens) for tokens in lengths)
        assert splits <= MAX_SPLITS
    if page or keys.slots is not None:  # after a crop, only groups are whole
        lengths = [math.lcm(FLUSH_TOKENS if page else 1, keys.codec.group)]
    even = not any(tokens % tile.tokens for tokens in (*lengths, split_tokens))
    return Sizes(split_tokens, splits, even, tile)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
