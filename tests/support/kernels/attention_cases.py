"""Attention calls of every kind, for the tests of the kernels and of the C++ code, and plain attention beside them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch

from kvcache_compress.bench.compare import relative_error
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.adaptive.eras import Era, runs
from kvcache_compress.storage.view import AttentionPath, View
from support.files.commvq_files import codebook_file
from support.files.spectral_files import statistics_file
from support.kernels.segment_makers import make_side
from support.method_cases import declared

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BARS = {torch.float64: 1e-5, F32: 1e-5, F16: 2e-3, BF16: 2e-3}
"""Allowed `error` of attention, by its dtype."""


def tq(bits: float, **options: Any) -> tuple[str, dict[str, Any]]:
    return "turboquant", {"bits": bits, "codebook": "lloyd_max", **options}


def trellis(bits: float) -> tuple[str, dict[str, Any]]:
    return tq(bits, codebook="trellis")


def kivi(bits: int, group_size: int = 32) -> tuple[str, dict[str, Any]]:
    return "kivi", {"bits": bits, "group_size": group_size}


def prod(bits: float, **options: Any) -> tuple[str, dict[str, Any]]:
    return tq(bits, estimator="prod", **options)


def rope(angle: int, radius: int, **options: Any) -> tuple[str, dict[str, Any]]:
    return "polarquant_rope", {"angle_bits": angle, "radius_bits": radius, "group_size": 32, **options}


def tree(*bits: int, **options: Any) -> tuple[str, dict[str, Any]]:
    return "polarquant_recursive", {"bits": bits, **options}


def commvq(**shape: Any) -> tuple[str, Callable[[int], dict[str, Any]]]:
    return "commvq", lambda head_dim: {"codebooks": codebook_file(head_dim, **shape)}


def spectral(bits: float, group: int = 32) -> tuple[str, Callable[[int], dict[str, Any]]]:
    return "spectral", lambda head_dim: {"bits": bits, "statistics": statistics_file(head_dim, group)}


NONE: tuple[str, dict[str, Any]] = ("none", {})
QJL = ("qjl", {"sketch_ratio": 3})


@dataclass(frozen=True)
class Case:
    """An attention call.

    `split` is (tokens per split, splits), `block` and `warps` are those of a tile, and `eras` the first tokens of the
    keys' eras after the first.
    """

    keys: tuple[str, dict[str, Any]] = tq(4)
    values: tuple[str, dict[str, Any]] = tq(4)
    batch: int = 2
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
    eras: tuple[int, ...] = ()
    sinks: int = 3
    tail: int = 5
    block: int = 32
    warps: int = 4
    split: tuple[int, int] = (32, 2)


PAIRS = {
    **{f"{bits}-bit": (tq(bits), tq(bits)) for bits in range(1, 7)},
    "2.5-3.5": (tq(2.5), tq(3.5)),
    "1.5-5.5": (tq(1.5, outlier_fraction=0.25), tq(5.5)),
    "uniform": (tq(3, codebook="uniform"), tq(4, codebook="uniform")),
    "uniform-2": (tq(4, codebook="uniform"), tq(2, codebook="uniform")),
    "trellis": (trellis(2), trellis(3)),
    "trellis-1": (trellis(3), trellis(1)),
    "trellis-fractional": (trellis(2.5), trellis(1.5)),
    "not-centred": (tq(4, center="off"), tq(4)),
    "centred-fractional": (tq(2.5, center="on"), tq(2)),
    "qjl-of-30-bytes": (("qjl", {"sketch_ratio": 3.75}), tq(4)),
    "prod-3-2": (prod(3), prod(2)),
    "prod-1": (prod(1, sketch="gaussian"), prod(1)),
    "prod-fractional": (prod(2.5, center="on"), prod(3.5)),
    "kivi-2-4": (kivi(2), kivi(4)),
    "kivi-3": (kivi(3), kivi(3)),
    "kivi-turboquant": (kivi(4), tq(2.5)),
    "turboquant-none": (tq(3), NONE),
    "none-turboquant": (NONE, prod(2)),
}
DECLARED = declared("KERNEL_PAIRS")
PAIRS |= DECLARED
CASES: dict[str, Case] = {name: Case(*pair, batch=1) for name, pair in PAIRS.items()}
CASES |= {f"{name}-bfloat16": Case(*PAIRS[name], dtype=BF16) for name in ("2.5-3.5", "prod-3-2", "kivi-2-4")}
CASES |= {
    f"{name}-bfloat16": Case(*pair, head_dim=head_dim, groups=groups, count=2, mask="bool", dtype=BF16)
    for (name, pair), (head_dim, groups) in zip(DECLARED.items(), cycle([(128, 4), (80, 1), (96, 7)]), strict=False)
}


def fast(keys: Any, values: Any, head_dim: int = 128, **changes: Any) -> Case:
    """A case in float16, which GPUs run in the kernels' assembly; its masks hide whole tiles from single rows."""
    packed = 96 if {keys[0], values[0]} & {"kivi", "polarquant_rope"} else 97
    hidden = {"count": 3, "mask": "bool", "hidden": 44, "rows_differ": True}
    return Case(keys, values, head_dim=head_dim, dtype=F16, **{**hidden, "packed": packed, "split": (64, 2), **changes})


DECODE: dict[str, Any] = {"batch": 1, "count": 1, "mask": None, "packed": 64, "split": (32, 2)}
ROUNDS = {"key_shape": (21, 64), "value_shape": (43, 64), "shrink": 0.97}
"""Rounds for 2 bits and 128 channels; each is smaller than the last by about the ratio of trained ones."""
FAST: dict[str, tuple[Any, Any]] = {
    "4-2": (tq(4), tq(2)),
    "qjl": (QJL, tq(4)),
    "tree": (tree(4, 3, 2), tree(4, 2)),
    "tree-of-16-bit-radii": (tree(4, 2, center="on"), tree(4, 3, 2, radius_bits=16)),
    "four-levels-of-8-bit-radii": (tree(4, 2, levels=4), tree(4, 4, 2)),
    "rope-4-4": (rope(4, 4), kivi(2)),
    "rope-5-3": (rope(5, 3), tq(4)),
    "rope-5-2": (rope(5, 2, scalar="match", center="on"), tq(2)),
    "rope-4-2-paper": (rope(4, 2, radius_scale="channel", reconstruction="edge"), tq(3)),
    "rope-3-3": (rope(3, 3), tq(5)),
    "rope-5-4-edge": (rope(5, 4, reconstruction="edge"), tq(1)),
    "commvq": (commvq(**ROUNDS), commvq(**ROUNDS)),
    "commvq-groups": (commvq(groups=2, key_shape=(4, 16)), commvq(groups=2, value_shape=(7, 64))),
    "commvq-bytes": (commvq(key_shape=(5, 8)), commvq(value_shape=(7, 256))),
    "kivi-1": (kivi(1), kivi(1, 64)),
    "kivi-groups-of-16": (kivi(4, 16), kivi(4, 16)),
    **{
        name: PAIRS[name]
        for name in (
            *("1-bit", "2-bit", "3-bit", "uniform", "uniform-2", "prod-3-2", "prod-fractional", "trellis"),
            *("kivi-2-4", "kivi-3", "kivi-turboquant", "2.5-3.5"),
        )
    },
}
CASES |= {f"{name}-128-float16": fast(*pair, batch=1) for name, pair in FAST.items()}
CASES |= {
    f"{name}-{head_dim}-float16": fast(*FAST[name], head_dim, **DECODE)
    for head_dim, names in {
        64: ("2-bit", "4-2", "uniform", "prod-3-2", "kivi-2-4", "2.5-3.5", "trellis", "commvq-groups", "tree"),
        96: ("1-bit", "3-bit", "4-2", "kivi-2-4", "trellis", "commvq"),
        256: ("uniform", "4-2"),
    }.items()
    for name in names
}
CASES |= {
    "qjl-of-30-bytes-80-float16": fast(("qjl", {"sketch_ratio": 3}), tq(4), 80, **DECODE),
    "4-2-80-float16": fast(tq(4), tq(2), 80),
    "2-3-40-float16": fast(tq(2), tq(3), 40, **DECODE),
    "4-1-112-float16": fast(tq(4), tq(1), 112),
    "4-2-256-float16": fast(tq(4), tq(2), 256),
    "none-as-launched-float16": fast(tq(2), NONE, block=0),
    "3-2-256-float16": fast(tq(3), tq(2), 256, groups=1, **DECODE),
    "trellis-3-2-256-float16": fast(trellis(3), trellis(2), 256, groups=16, **DECODE),
    "kivi-256-float16": fast(kivi(4, 64), kivi(2), 256, groups=16, **DECODE),
    "rope-5-3-256-float16": fast(*FAST["rope-5-3"], 256, **DECODE),
    "many-queries-float16": fast(tq(4), tq(4), 64, groups=5, count=9),
    "finite-float16": fast(tq(4), tq(4), 64, mask="finite"),
    "softcap-float16": fast(tq(4), tq(4), 64, softcap=5.0),
    "heads-7-of-80": Case(kivi(4), kivi(2, 16), groups=7, head_dim=80),
    "heads-1-of-80-outliers": Case(tq(2.5), tq(3.5), groups=1, head_dim=80, dtype=F16),
    "more-rows-than-a-tile": Case(groups=7, count=5, mask="bool"),
    "small-tiles": Case(prod(2), tq(3), block=16, split=(48, 2)),
    "wider-keys": Case(tq(3), tq(2), head_dim=96, value_dim=64),
    "wider-values": Case(kivi(4), tq(2.5), head_dim=64, value_dim=128),
    "causal": Case(count=3),
    "padding-causal": Case(tq(3, center="on"), tq(3), count=3, mask="bool"),
    "additive-beyond-a-tile": Case(mask="float", hidden=44),
    "rows-that-differ-float16": Case(tq(2), tq(2), mask="float", hidden=44, rows_differ=True, count=3, dtype=F16),
    "additive-causal": Case(prod(2), kivi(4), count=3, mask="float"),
    "additive-per-head-of-one-query": Case(mask="per head", hidden=44),
    "softcap": Case(softcap=5.0),
    "s-aux": Case(s_aux=True),
    "s-aux-padding": Case(tq(2.5), tq(2.5), groups=4, count=3, mask="bool", s_aux=True, dtype=F16),
    "nothing-packed": Case(packed=0, split=(16, 0)),
    "one-packed": Case(packed=1, split=(16, 1)),
    "no-sinks": Case(sinks=0),
    "long-windows-causal": Case(sinks=70, tail=150, count=3, mask="bool"),
    "empty-splits": Case(packed=33, split=(32, 4), mask="bool"),
    "many-splits": Case(tq(2), kivi(4), packed=96, block=16, split=(16, 6), count=3),
    "splits-within-tiles": Case(packed=50, block=16, split=(23, 3)),
    "split-of-many-tiles": Case(tq(3), tq(3), packed=160, split=(160, 1), dtype=F16),
    "as-launched": Case(packed=70, block=0),
    "as-launched-commvq": Case(*PAIRS["commvq"], head_dim=128, groups=8, count=3, block=0, dtype=F16),
}


def anchored(bits: float = 2, values: Any = None, **changes: Any) -> Case:
    """A case of spectral keys in groups of 32 tokens, whose splits may begin within a group."""
    keys = spectral(bits, changes.pop("group", 32))
    return Case(keys, values or tq(2), **{"batch": 1, "packed": 96, "split": (96, 1), "warps": 1, **changes})


CASES |= {
    f"spectral-{name}": case
    for name, case in {
        "one-query": anchored(3, tq(3), groups=1, packed=160, split=(96, 2)),
        "groups-of-64": anchored(group=64, groups=4, packed=192, split=(96, 2)),
        "groups-of-128": anchored(3, tq(3), group=128, groups=4, packed=256, split=(160, 2)),
        "eight": anchored(4, NONE, groups=8, split=(64, 2), warps=4),
        "sixteen": anchored(2.5, groups=16, packed=64, split=(32, 2), warps=4),
        "more-rows-than-a-tile": anchored(groups=7, count=5, mask="bool", packed=64, split=(32, 2), warps=4),
        "empty-splits": anchored(batch=2, packed=32, split=(32, 3), mask="bool"),
        "softcap": anchored(softcap=5.0),
        "s-aux": anchored(s_aux=True),
        "padding": anchored(batch=2, count=2, mask="bool", hidden=70, rows_differ=True),
        "additive-per-head": anchored(count=2, mask="per head", hidden=70),
        "112-bfloat16": anchored(groups=4, head_dim=112, dtype=BF16),
        "as-launched": anchored(groups=4, packed=320, block=0, dtype=BF16),
        **{
            f"{bits}-bit-{head_dim}-float16": anchored(bits, groups=groups, head_dim=head_dim, dtype=F16)
            for bits, head_dim, groups in (
                *((0.5, 128, 4), (1, 128, 1), (2, 128, 8), (3, 128, 4), (4, 128, 16)),
                *((1, 64, 4), (3, 64, 8), (2, 80, 8), (4, 96, 8), (2, 112, 4), (2, 256, 16)),
            )
        },
    }.items()
}


def aged(keys: Any, values: Any, **changes: Any) -> Case:
    """A case of eras with unlike statistics: the first is shorter than a split, and splits end within the others."""
    grouped = {keys[0], values[0]} & {"spectral", "polarquant_rope"}
    sizes: dict[str, Any] = {"packed": 224, "eras": (32, 128)} if grouped else {"packed": 201, "eras": (16, 112)}
    return Case(keys, values, **{**sizes, "split": (64, 0), "count": 4, "mask": "bool", "warps": 1, **changes})


PREFILL = ("spectral", {"bits": 2.5, "group": 32})
AGED = {
    "turboquant": (tq(4), tq(3)),
    "turboquant-fractional": (tq(2.5, center="on"), tq(2)),
    "qjl": (("qjl", {"sketch_ratio": 3, "outlier_channels": 16}), tq(4)),
    "rope": (rope(4, 4, radius_scale="channel", center="on"), tq(4)),
    "tree": (tree(4, 2), tq(4)),
    "spectral": (PREFILL, tq(2)),
}
CASES |= {f"eras-{name}": aged(*pair) for name, pair in AGED.items()}
CASES |= {f"eras-{name}-128-float16": aged(*pair, batch=1, head_dim=128, dtype=F16) for name, pair in AGED.items()}
CASES |= {
    "eras-two": aged(tq(4), NONE, eras=(192,), groups=7, mask=None),
    "eras-decode": aged(tq(2), tq(2), count=1, mask="per head", hidden=70, dtype=BF16),
    "eras-even": aged(tq(2), tq(2), packed=192, eras=(64, 96), split=(32, 0), count=1, mask=None, dtype=F16),
    "eras-that-end-within-a-tile": aged(tq(2), tq(2), packed=192, eras=(48,), split=(64, 0), count=1, mask=None),
    "eras-as-launched": aged(tq(4), tq(4), groups=4, block=0, dtype=BF16),
    "eras-spectral-decode": aged(PREFILL, tq(4), groups=4, count=1, mask=None, dtype=F16),
    "eras-spectral-two": aged(PREFILL, tq(3), eras=(192,), groups=7, rows_differ=True, hidden=70),
    "eras-spectral-as-launched": aged(PREFILL, tq(2), groups=8, block=0, dtype=F16),
}

IN_FLOAT32 = {
    *(f"{name}-128-float16" for name, pair in FAST.items() if pair == PAIRS.get(name)),
    *(f"eras-{name}-128-float16" for name in AGED),
    *(f"spectral-{bits}-bit-128-float16" for bits in (1, 2, 3, 4)),
    *(name for name in CASES if name.endswith("-64-float16")),
}
"""Cases of the fast path alone: the portable path computes in float32, where others have the same codes and masks."""


def attended(views: tuple[View, View], call: AttentionCall, path: AttentionPath | None = None) -> torch.Tensor:
    """Attention to keys and values."""
    return views[0].attend(call, views[1], path)


def segments(case: Case) -> tuple[View, View]:
    common = {"batch": case.batch, "sinks": case.sinks, "tail": case.tail, "dtype": case.dtype}
    keys = make_side(*case.keys, "keys", case.head_dim, case.packed, **common)
    for outlier, start in enumerate(case.eras):
        other = make_side(*case.keys, "keys", case.head_dim, case.packed, outlier=outlier, **common)
        for field, ours, theirs in zip(other.store.fields, keys.store.buffers, other.store.buffers, strict=True):
            first = start // field.tokens
            ours[:, :, first:] = theirs[:, :, first:]
        keys = replace(keys, eras=(*keys.eras, Era(start, other.codec)))
    values = make_side(*case.values, "values", case.value_dim or case.head_dim, case.packed, **common)
    return keys, values


def make_mask(case: Case, batch: int, heads: int, tokens: int) -> torch.Tensor | None:
    """Mask with left padding of the last sequence into its packed tokens, and causal for several queries."""
    if case.mask is None:
        return None
    allowed = torch.ones(batch, 1, case.count, tokens, dtype=torch.bool).tril(tokens - case.count)
    if batch > 1 or not case.rows_differ:
        allowed[-1, :, :, : min(case.hidden, tokens - case.count)] = False
    if case.rows_differ:
        allowed[0, :, 0, : case.hidden] = False
    if case.mask == "bool":
        return allowed
    least = -3e4 if case.mask == "finite" else torch.finfo(torch.float32).min
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, least)
    if case.mask == "per head":
        additive = additive + torch.randn(1, heads, 1, tokens)
    return additive.to(case.dtype)


def decoded(side: View) -> list[torch.Tensor]:
    """Packed tokens of each era in float64."""
    return [
        codec.decode(side.store.read(first, last), side.rope(first, last)).double()
        for codec, first, last in runs(side.eras, 0, side.packed)
    ]


def plain_attention(
    query: torch.Tensor, keys: View, values: View, mask: torch.Tensor | None, case: Case, s_aux: Any
) -> torch.Tensor:
    """Softmax attention over decoded tokens in float64, `[B, n, Hq, Dv]`; written without the package's arithmetic."""
    groups = query.shape[1] // keys.sinks.shape[1]
    k, v = (torch.cat([side.sinks.double(), *decoded(side), side.tail.double()], 2) for side in (keys, values))
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

    Rounding is independent of other errors, so that the squares of both add up, as in `bench.compare`.
    """
    square = relative_error(ours, theirs) ** 2 - relative_error(theirs.to(ours.dtype), theirs) ** 2
    return 0.0 if square < 0 else math.sqrt(square)  # NaN stays NaN


def check_attention(
    attend: Callable[..., torch.Tensor], case: Case, keys: View, values: View, bars: dict[torch.dtype, float] = BARS
) -> None:
    """Attend with random queries, and assert that the result is that of plain attention."""
    query = torch.randn(case.batch, 2 * case.groups, case.count, case.head_dim).to(case.dtype)
    mask = make_mask(case, case.batch, 2 * case.groups, keys.shape[2])
    s_aux = torch.randn(2 * case.groups) if case.s_aux else None
    call = AttentionCall.of(query, mask, scaling=case.head_dim**-0.5, softcap=case.softcap, s_aux=s_aux)
    out, expected = attend(call, keys, values), plain_attention(query, keys, values, mask, case, s_aux)
    assert (out.shape, out.dtype) == (expected.shape, case.dtype)
    assert error(out, expected) <= bars[case.dtype]


def check_hidden_rows(attend: Callable[..., torch.Tensor], keys: View, values: View) -> None:
    """Assert that a row that sees no token gets zeros, and another does not."""
    mask = torch.ones(2, 1, 1, keys.shape[2], dtype=torch.bool)
    mask[1] = False
    out = attend(AttentionCall.of(torch.randn(2, 6, 1, 64), mask, scaling=0.125), keys, values)
    assert out[0].abs().sum() > 0
    assert (out[1] == 0).all()
