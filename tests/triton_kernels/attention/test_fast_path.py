"""The attention kernel's fast path without a GPU: in Triton's interpreter, with the assembly run by `ptx/inline.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attention_cases import (
    BARS,
    F16,
    PAIRS,
    Case,
    error,
    kivi,
    make_mask,
    plain_attention,
    segments,
    tq,
    trellis,
)
from support.commvq_files import codebook_file
from support.device import INTERPRETED
from support.ptx import inline
from triton.runtime.interpreter import InterpreterBuilder

from kvcache_compress.codecs.base import Codec
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels.attention import launch
from kvcache_compress.triton_kernels.common import plan
from kvcache_compress.triton_kernels.decode import polar_columns

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU runs it in all tests of 16 bits")


def rope(angle: int, radius: int, **options: Any) -> tuple[str, dict[str, Any]]:
    return "polarquant_rope", {"angle_bits": angle, "radius_bits": radius, **options}


def tree(*bits: int, **options: Any) -> tuple[str, dict[str, Any]]:
    return "polarquant_recursive", {"bits": bits, **options}


FOUR = {"levels": 4, "radius_bits": 16}
PAPER = {"radius_scale": "channel", "reconstruction": "edge"}
ROPE = {
    "rope-4-4": (rope(4, 4, group_size=32), kivi(2)),
    "rope-5-3": (rope(5, 3), tq(4)),
    "rope-5-2": (rope(5, 2, scalar="match", center="on"), tq(2)),
    "rope-4-2-paper": (rope(4, 2, **PAPER), tq(3)),
    "rope-5-4-edge": (rope(5, 4, reconstruction="edge"), tq(1)),
}


def commvq(**shape: Any) -> tuple[str, Callable[[int], dict[str, Any]]]:
    return "commvq", lambda head_dim: {"codebooks": codebook_file(head_dim, **shape)}


ROUNDS = {"key_shape": (21, 64), "value_shape": (43, 64), "shrink": 0.97}
"""Rounds for 2 bits and 128 channels; each is smaller than the last by about the ratio of trained ones."""
ADDITIVE = {
    "commvq": (commvq(**ROUNDS), commvq(**ROUNDS)),
    "commvq-groups": (commvq(groups=2, key_shape=(4, 16)), commvq(groups=2, value_shape=(7, 64))),
    "commvq-bytes": (commvq(key_shape=(5, 8)), commvq(value_shape=(7, 256))),
}
SIDES = ("1-bit", "2-bit", "3-bit", "4-bit", "uniform", "uniform-2", "prod-3-2", "kivi-2-4", "kivi-3", "2.5-3.5")
CASES = {f"{name}-{dim}": Case(*PAIRS[name], head_dim=dim, dtype=F16) for name in SIDES for dim in (64, 128)}
CASES |= {f"{name}-128": Case(*pair, head_dim=128, dtype=F16) for name, pair in ROPE.items()}
CASES |= {
    **{f"{name}-{dim}": Case(*ADDITIVE[name], head_dim=dim, dtype=F16) for name in ADDITIVE for dim in (64, 96, 128)},
    "hidden-commvq-128": Case(*ADDITIVE["commvq"], head_dim=128, count=3, mask="bool", hidden=44, dtype=F16, packed=97),
    "prod-fractional-128": Case(*PAIRS["prod-fractional"], head_dim=128, dtype=F16),
    "qjl-128": Case(("qjl", {"sketch_ratio": 3}), tq(4), head_dim=128, dtype=F16),
    "tree-128": Case(tree(4, 3, 2), tree(4, 2), head_dim=128, dtype=F16),
    "tree-of-16-bit-radii-128": Case(tree(4, 2, center="on"), tree(4, 3, 2, radius_bits=16), head_dim=128, dtype=F16),
    "tree-of-online-codebooks-128": Case(
        tree(4, 2, codebook="online"), tree(4, 3, 2, codebook="online", precondition=False), head_dim=128, dtype=F16
    ),
    "four-levels-128": Case(tree(4, 2, **FOUR), tree(4, 2, **FOUR), head_dim=128, dtype=F16, packed=97),
    "four-levels-online-128": Case(
        tree(4, 2, **FOUR, codebook="online"),
        tree(4, 2, **FOUR, codebook="online", precondition=False),
        head_dim=128,
        dtype=F16,
    ),
    **{f"trellis-{dim}": Case(*PAIRS["trellis"], head_dim=dim, dtype=F16) for dim in (64, 96, 128)},
    "trellis-3-2-256": Case(trellis(3), trellis(2), head_dim=256, dtype=F16),
    "kivi-1-1-128": Case(kivi(1), kivi(1, 64), head_dim=128, dtype=F16),
    "kivi-groups-of-16-128": Case(kivi(4, 16), kivi(4, 16), head_dim=128, dtype=F16),
    "kivi-256": Case(kivi(4, 64), kivi(2), head_dim=256, dtype=F16),
    "4-bit-96": Case(head_dim=96, dtype=F16),
    "3-bit-256": Case(tq(3), tq(2), head_dim=256, dtype=F16),
    "rope-5-3-256": Case(*ROPE["rope-5-3"], head_dim=256, dtype=F16),
}
HIDDEN: dict[str, Any] = {"count": 3, "mask": "bool", "hidden": 44, "rows_differ": True, "packed": 97, "dtype": F16}
WHOLE = HIDDEN | {"packed": 96}  # groups of 32
CASES |= {
    "hidden-4-bit-64": Case(**HIDDEN),
    "hidden-3-bit-128": Case(tq(3), tq(3), head_dim=128, **HIDDEN),
    "hidden-tree-128": Case(tree(4, 3, 2), tree(4, 2), head_dim=128, **HIDDEN),
    "hidden-four-levels-128": Case(tree(4, 2, **FOUR), tree(4, 2, **FOUR), head_dim=128, **HIDDEN),
    "hidden-rope-128": Case(rope(5, 3, group_size=32), tq(4), head_dim=128, **WHOLE),
    "hidden-prod-128": Case(*PAIRS["prod-fractional"], head_dim=128, **HIDDEN),
    "hidden-qjl-96": Case(("qjl", {"sketch_ratio": 3}), tq(4), head_dim=96, **HIDDEN),
    "hidden-4-bit-80": Case(tq(4), tq(2), head_dim=80, **HIDDEN),
    "hidden-4-bit-112": Case(tq(4), tq(1), head_dim=112, **HIDDEN),
    "hidden-trellis-128": Case(trellis(2), trellis(2), head_dim=128, **HIDDEN),
    "hidden-kivi-128": Case(kivi(4), kivi(4), head_dim=128, **WHOLE),
    "hidden-kivi-96": Case(kivi(2), kivi(3), head_dim=96, **WHOLE),
    "hidden-values-of-128": Case(tq(3), tq(2.5), value_dim=128, **HIDDEN),
    "additive": Case(**HIDDEN | {"mask": "float"}),
    "finite": Case(**HIDDEN | {"mask": "finite"}),
    "softcap": Case(softcap=5.0, **HIDDEN),
    "many-queries": Case(groups=5, **HIDDEN | {"count": 9}),
}


@pytest.mark.parametrize("name", CASES)
def test_fast_path_equals_plain_attention(
    name: str, make_side: Callable[..., View], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, texts = CASES[name], []

    def create(builder: Any, text: str, *arguments: Any) -> Any:
        texts.append(text)
        return inline.create_inline_asm(builder, text, *arguments)

    monkeypatch.setattr(plan, "PORTABLE", False)
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", create)
    torch.manual_seed(len(name))
    keys, values = segments(case, make_side)
    heads = 2 * case.groups
    query = torch.randn(2, heads, case.count, case.head_dim).to(F16)
    mask = make_mask(case, 2, heads, keys.shape[2])
    out = launch.attend(AttentionCall.of(query, mask, scaling=case.head_dim**-0.5, softcap=case.softcap), keys, values)
    assert error(out, plain_attention(query, keys, values, mask, case, None)) <= BARS[F16]
    assert bool(texts) == (case.keys[0] != "commvq"), "rows of codebooks need no assembly"


def test_which_trees_are_undone_in_columns(make_codec: Callable[..., Codec]) -> None:
    def fits(dim: int, **options: Any) -> bool:
        codec = make_codec("polarquant_recursive", options, "keys", dim)
        return polar_columns.fits(codec.tree, coded=codec.options.radius_bits == 8)

    assert fits(128)
    assert fits(128, bits=(4, 2))
    assert fits(128, bits=(4, 2), codebook="online")
    assert fits(128, levels=4, bits=(4, 2), radius_bits=16)
    assert not fits(64)
    assert not fits(128, levels=4, bits=(4, 2)), "radii of 8 bits stand in a table"
    assert not fits(128, bits=(4, 4, 2))
