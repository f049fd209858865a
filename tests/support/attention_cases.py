"""Attention calls of every kind, for the tests of the kernels and of the C++ code, and plain attention beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvcache_compress.bench.compare import relative_error
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.view import AttentionPath, View
from support.method_cases import declared

BARS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-3}
"""Allowed `error` of attention, by its dtype."""
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def tq(bits: float, **options: Any) -> tuple[str, dict[str, Any]]:
    return "turboquant", {"bits": bits, "codebook": "lloyd_max", **options}


def trellis(bits: float) -> tuple[str, dict[str, Any]]:
    return tq(bits, codebook="trellis")


def kivi(bits: int, group_size: int = 32) -> tuple[str, dict[str, Any]]:
    return "kivi", {"bits": bits, "group_size": group_size}


def prod(bits: float, **options: Any) -> tuple[str, dict[str, Any]]:
    return tq(bits, estimator="prod", **options)


NONE: tuple[str, dict[str, Any]] = ("none", {})


@dataclass(frozen=True)
class Case:
    """An attention call; `split` is (tokens per split, splits), `block` the tokens of a tile."""

    keys: tuple[str, dict[str, Any]] = tq(4)
    values: tuple[str, dict[str, Any]] = tq(4)
    groups: int = 3
    head_dim: int = 64
    value_dim: int | None = None
    count: int = 1
    dtype: torch.dtype = F32
    mask: str | None = None
    hidden: int = 20
    rows_differ: bool = False
    softcap: float | None = None
    s_aux: bool = False
    packed: int = 64
    sinks: int = 3
    tail: int = 5
    block: int = 32
    split: tuple[int, int] = (32, 2)


PAIRS = {
    "1-bit": (tq(1), tq(1)),
    "2-bit": (tq(2), tq(2)),
    "3-bit": (tq(3), tq(3)),
    "4-bit": (tq(4), tq(4)),
    "5-bit": (tq(5), tq(5)),
    "6-bit": (tq(6), tq(6)),
    "4-2": (tq(4), tq(2)),
    "2.5-3.5": (tq(2.5), tq(3.5)),
    "1.5-5.5": (tq(1.5), tq(5.5)),
    "quarter-outliers": (tq(2.5, outlier_fraction=0.25), tq(2.5, outlier_fraction=0.25)),
    "uniform": (tq(3, codebook="uniform"), tq(4, codebook="uniform")),
    "uniform-2": (tq(4, codebook="uniform"), tq(2, codebook="uniform")),
    "trellis": (trellis(2), trellis(3)),
    "trellis-1": (trellis(3), trellis(1)),
    "trellis-fractional": (trellis(2.5), trellis(1.5)),
    "haar": (tq(4, rotation="haar"), tq(3, rotation="haar")),
    "centred": (tq(3, center="on"), tq(3)),
    "not-centred": (tq(4, center="off"), tq(4)),
    "not-centred-fractional": (tq(2.5, center="off"), tq(2.5)),
    "qjl-of-30-bytes": (("qjl", {"sketch_dim": 240}), tq(4)),
    "centred-fractional": (tq(2.5, center="on"), tq(2)),
    "prod-3-2": (prod(3), prod(2)),
    "prod-1": (prod(1), prod(1)),
    "prod-gaussian": (prod(3, sketch="gaussian"), prod(2, sketch="gaussian")),
    "prod-fractional": (prod(2.5, center="on"), prod(3.5)),
    "kivi-2-4": (kivi(2), kivi(4)),
    "kivi-3": (kivi(3), kivi(3)),
    "turboquant-kivi": (tq(4), kivi(2)),
    "kivi-turboquant": (kivi(4), tq(2.5)),
    "turboquant-none": (tq(3), NONE),
    "none-turboquant": (NONE, prod(2)),
    "kivi-none": (kivi(2), NONE),
}
PAIRS |= declared("KERNEL_PAIRS")
CASES: dict[str, Case] = {name: Case(*pair) for name, pair in PAIRS.items()}
CASES |= {
    f"{name}-bfloat16": Case(*PAIRS[name], dtype=BF16)
    for name in (
        *("4-bit", "3-bit", "2.5-3.5", "uniform", "prod-3-2", "kivi-2-4", "turboquant-none", "none-turboquant"),
        *declared("KERNEL_PAIRS"),
    )
}
CASES |= {
    f"{name}-{head_dim}": Case(*pair, head_dim=head_dim, groups=groups, count=2, mask="bool")
    for name, pair in declared("KERNEL_PAIRS").items()
    for head_dim, groups in ((80, 1), (96, 7), (128, 4))
}
# On a GPU these run all parts of `triton_kernels/common/lookup.py`, for keys and for values.
CASES |= {
    f"{name}-{head_dim}-float16": Case(*PAIRS[name], head_dim=head_dim, groups=4, dtype=F16)
    for name, head_dim in (
        *((name, 128) for name in ("1-bit", "2-bit", "3-bit", "4-2", "uniform", "uniform-2", "prod-3-2", "kivi-3")),
        *((name, 128) for name in ("kivi-2-4", "2.5-3.5", "kivi-turboquant")),
        ("qjl-of-30-bytes", 80),
        *((name, 96) for name in ("1-bit", "3-bit", "4-bit", "kivi-2-4")),
        *((name, 256) for name in ("3-bit", "4-bit", "uniform")),
        *(("trellis", head_dim) for head_dim in (64, 96, 128)),
    )
}
CASES |= {
    "heads-1-of-128": Case(groups=1, head_dim=128, dtype=F16),
    "heads-4-of-128": Case(tq(2), tq(3), groups=4, head_dim=128),
    "heads-7-of-128": Case(kivi(4), kivi(2), groups=7, head_dim=128, dtype=BF16),
    "heads-4-of-80": Case(groups=4, head_dim=80),
    "heads-7-of-80": Case(kivi(4), kivi(2, 16), groups=7, head_dim=80),
    "heads-1-of-80-outliers": Case(tq(2.5), tq(3.5), groups=1, head_dim=80, dtype=F16),
    "heads-3-of-80-none": Case(NONE, tq(3), groups=3, head_dim=80),
    "heads-4-of-96": Case(prod(3), kivi(3), groups=4, head_dim=96),
    "heads-7-of-96": Case(tq(6), tq(1), groups=7, head_dim=96, dtype=BF16),
    "heads-1-of-96-none": Case(tq(3), NONE, groups=1, head_dim=96),
    "trellis-heads-7-of-80": Case(trellis(3), trellis(2), groups=7, head_dim=80),
    "trellis-heads-3-of-32": Case(trellis(2), trellis(1), head_dim=32, dtype=BF16),
    "heads-3-of-32": Case(tq(4), kivi(4), head_dim=32),
    "more-rows-than-a-tile": Case(groups=7, count=5, mask="bool"),
    "small-tiles": Case(prod(2), tq(3), block=16, split=(48, 2)),
    "wider-keys": Case(tq(3), tq(2), head_dim=96, value_dim=64),
    "wider-values": Case(kivi(4), tq(2.5), head_dim=64, value_dim=128),
    "causal": Case(count=3),
    "causal-bfloat16": Case(kivi(4), tq(4), count=3, dtype=BF16),
    "padding": Case(mask="bool"),
    "padding-causal": Case(tq(3, center="on"), tq(3), count=3, mask="bool"),
    "padding-kivi-float16": Case(kivi(2), kivi(2), mask="bool", dtype=F16),
    "additive": Case(mask="float"),
    "padding-beyond-a-tile": Case(mask="bool", hidden=44),
    "additive-beyond-a-tile": Case(mask="float", hidden=44),
    "additive-beyond-a-tile-bfloat16": Case(mask="float", hidden=44, dtype=BF16),
    "finite-beyond-a-tile": Case(mask="finite", hidden=44),
    "rows-that-differ": Case(mask="bool", hidden=44, rows_differ=True, count=3),
    "rows-that-differ-float16": Case(tq(2), tq(2), mask="float", hidden=44, rows_differ=True, count=3, dtype=F16),
    "additive-causal": Case(prod(2), kivi(4), count=3, mask="float"),
    "additive-per-head": Case(count=3, mask="per head"),
    "additive-per-head-of-one-query": Case(mask="per head", hidden=44),
    "softcap": Case(softcap=5.0),
    "softcap-padding-bfloat16": Case(kivi(4), tq(3), count=3, mask="bool", softcap=20.0, dtype=BF16),
    "s-aux": Case(s_aux=True),
    "s-aux-padding": Case(tq(2.5), tq(2.5), groups=4, count=3, mask="bool", s_aux=True, dtype=F16),
    "nothing-packed": Case(packed=0, split=(16, 0)),
    "one-packed": Case(packed=1, split=(16, 1)),
    "no-sinks": Case(sinks=0),
    "long-windows": Case(sinks=70, tail=150),
    "long-windows-causal": Case(sinks=33, tail=100, count=3, mask="bool"),
    "split-of-one-token": Case(packed=33, split=(32, 2)),
    "empty-splits": Case(packed=33, split=(32, 4), mask="bool"),
    "many-splits": Case(tq(2), kivi(4), packed=96, block=16, split=(16, 6), count=3),
    "splits-within-tiles": Case(packed=50, block=16, split=(23, 3)),
    "split-of-many-tiles": Case(tq(3), tq(3), packed=160, split=(160, 1), dtype=F16),
    "as-launched": Case(packed=70, block=0),
    "as-launched-bfloat16": Case(kivi(4), tq(4), packed=96, block=0, dtype=BF16),
    "as-launched-commvq": Case(*PAIRS["commvq"], head_dim=128, groups=8, count=3, block=0, dtype=F16),
    "as-launched-commvq-none": Case(*PAIRS["commvq-none"], head_dim=128, groups=4, packed=96, block=0, dtype=BF16),
}


def attended(views: tuple[View, View], call: AttentionCall, path: AttentionPath | None = None) -> torch.Tensor:
    """Attention to keys and values."""
    return views[0].attend(call, views[1], path)


def segments(case: Case, make_side: Callable[..., View]) -> tuple[View, View]:
    common = {"sinks": case.sinks, "tail": case.tail, "dtype": case.dtype}
    keys = make_side(*case.keys, "keys", case.head_dim, case.packed, **common)
    values = make_side(*case.values, "values", case.value_dim or case.head_dim, case.packed, **common)
    return keys, values


def make_mask(case: Case, batch: int, heads: int, tokens: int) -> torch.Tensor | None:
    """Mask with left padding of the second sequence into its packed tokens, and causal for several queries."""
    if case.mask is None:
        return None
    allowed = torch.ones(batch, 1, case.count, tokens, dtype=torch.bool).tril(tokens - case.count)
    allowed[1, :, :, : min(case.hidden, tokens - case.count)] = False
    if case.rows_differ:
        allowed[0, :, 0, : case.hidden] = False
    if case.mask == "bool":
        return allowed
    least = -3e4 if case.mask == "finite" else torch.finfo(torch.float32).min
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, least)
    if case.mask == "per head":
        additive = additive + torch.randn(1, heads, 1, tokens)
    return additive.to(case.dtype)


def plain_attention(
    query: torch.Tensor, keys: View, values: View, mask: torch.Tensor | None, case: Case, s_aux: Any
) -> torch.Tensor:
    """Softmax attention over decoded tokens in float64, `[B, n, Hq, Dv]`; written without the package's arithmetic."""
    groups = query.shape[1] // keys.sinks.shape[1]
    k, v = (
        torch.cat(
            [
                side.sinks.double(),
                side.codec.decode(side.store.read(0, side.packed), side.rope(0, side.packed)).double(),
                side.tail,
            ],
            2,
        )
        if side.packed
        else torch.cat([side.sinks, side.tail], 2).double()
        for side in (keys, values)
    )
    logits = torch.einsum("bhnd,bhtd->bhnt", query.double(), k.repeat_interleave(groups, 1)) * case.head_dim**-0.5
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    tokens = logits.shape[-1]
    if mask is None:
        logits = logits.masked_fill(torch.ones(case.count, tokens).triu(tokens - case.count + 1).bool(), -torch.inf)
    elif mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    else:
        logits = logits + mask.double()
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., :tokens]
    return torch.einsum("bhnt,bhtd->bnhd", weights, v.repeat_interleave(groups, 1))


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """RMS of the difference relative to the RMS of `theirs`, beyond that of `theirs` rounded to the dtype of `ours`.

    Rounding is independent of other errors, so that the squares of both add up, as in `bench.compare.allowed_error`.
    """
    square = relative_error(ours, theirs) ** 2 - relative_error(theirs.to(ours.dtype), theirs) ** 2
    return 0.0 if square < 0 else math.sqrt(square)  # NaN stays NaN


def attention_error(attend: Callable[..., torch.Tensor], case: Case, keys: View, values: View) -> float:
    """Error of a case's attention over two sequences and random queries, against plain attention."""
    query = torch.randn(2, 2 * case.groups, case.count, case.head_dim).to(case.dtype)
    mask, s_aux = make_mask(case, 2, 2 * case.groups, keys.shape[2]), torch.randn(2 * case.groups)
    call: dict[str, Any] = {"softcap": case.softcap, "s_aux": s_aux if case.s_aux else None}
    out = attend(AttentionCall.of(query, mask, scaling=case.head_dim**-0.5, **call), keys, values)
    return error(out, plain_attention(query, keys, values, mask, case, call["s_aux"]))
