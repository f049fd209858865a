"""Prefill, chunks, steps and padding: the logits of a compressed cache equal those of an independent oracle."""

from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.closeness import assert_close_but_for_flips
from transformers import DynamicCache

from kvcache_compress import enable_fused_attention
from kvcache_compress.storage.side import MAX_DECODE_TOKENS
from kvcache_compress.storage.view import record_paths

TOLERANCE = {"atol": 1e-4, "rtol": 0}


def check(case: Any, ids: torch.Tensor, sizes: list[int], mask: torch.Tensor | None = None, **changes: Any) -> Any:
    """Compare a compressed cache with the oracle, and return the cache.

    C++ attention of chunks differs by rounding, which can flip codes; chunks use torch instead.
    """
    chunks = any(size > MAX_DECODE_TOKENS for size in sizes[1:])
    cache, oracle = case.cache(backend="torch" if chunks else "auto", **changes), case.oracle(**changes)
    ids = ids[:, : sum(sizes)]
    got, expected = case.feed(cache, ids, sizes, mask), case.feed(oracle, ids, sizes, mask)
    if mask is not None:
        got, expected = (x[mask[:, : ids.shape[1]].bool()] for x in (got, expected))
    assert_close_but_for_flips(got, expected)
    assert cache.packed_tokens > 0
    assert cache.get_seq_length() == sum(sizes)
    assert [layer.packed_tokens for layer in cache.layers if hasattr(layer, "packed_tokens")] == [
        layer.packed for layer in oracle.layers if hasattr(layer, "packed")
    ]
    return cache


def test_prefill_then_decode(case: Any, ids: torch.Tensor) -> None:
    """A prompt that is packed in part, then enough steps for generated tokens to be packed too."""
    cache = check(case, ids, [53] + [1] * 30)
    assert cache.packed_tokens == 64


def test_loss_is_visible(unfused: Any, ids: torch.Tensor) -> None:
    """Control: compression changes the logits by far more than the tolerance, so a wrong path would be noticed."""
    with torch.no_grad():
        sizes = [100, 8]
        lossy = unfused.feed(unfused.cache(), ids[:, :108], sizes)[:, 100:]
        exact = unfused.feed(DynamicCache(), ids[:, :108], sizes)[:, 100:]
    assert (lossy - exact).abs().max() > 100 * TOLERANCE["atol"]


def test_decode_from_the_first_token(case: Any, ids: torch.Tensor) -> None:
    """With a prompt of one token, sinks, window and packed part fill up step by step."""
    check(case, ids, [1] * 12 + [4] * 11)


def test_chunked_prefill(case: Any, ids: torch.Tensor) -> None:
    """The chunks attend to a packed past; one of more than 128 tokens is packed at once, others before the next."""
    check(case, ids, [40, 47, 20, 130, 1, 1])


def test_short_chunks_before_anything_is_packed(case: Any, ids: torch.Tensor) -> None:
    check(case, ids, [2, 17, 18, 40, 3])


@pytest.mark.parametrize("step", [2, 7, 16])
def test_steps_of_many_tokens(case: Any, ids: torch.Tensor, step: int) -> None:
    """Steps of several tokens over a packed past, as in speculative verification."""
    check(case, ids, [77] + [step] * max(2, 24 // step))


def test_steps_are_causal(case: Any, ids: torch.Tensor) -> None:
    """A later token of a step has no effect on the earlier ones."""
    changed = ids[:, 60:66].clone()
    changed[:, -1] = (changed[:, -1] + 1) % 128
    one, other = case.cache(), case.cache()
    for cache in (one, other):
        case.feed(cache, ids[:, :60])
        assert cache.packed_tokens > 0
    got, expected = case.feed(one, ids[:, 60:66]), case.feed(other, changed)
    torch.testing.assert_close(got[:, :-1], expected[:, :-1], atol=1e-5, rtol=0)
    assert (got[:, -1] - expected[:, -1]).abs().max() > 0.1


@pytest.mark.parametrize("padding", [2, 13, 68])
@pytest.mark.parametrize("sizes", [[70] + [1] * 12, [60, 5, 5, 40, 1]], ids=["decode", "chunks"])
def test_left_padding(case: Any, ids: torch.Tensor, sizes: list[int], padding: int) -> None:
    """Rows keep their own sinks, with less padding than sinks, with more, and if later steps bring their first tokens.

    Of the last kind, the shorter row's first tokens come in the third step where the prompt is given in chunks.
    """
    mask = torch.ones(2, sum(sizes), dtype=torch.long)
    mask[0, :padding] = 0
    cache = check(case, ids, sizes, mask)
    if case.fused:
        assert cache.padding.rows.tokens.tolist() == [padding, 0]


def test_padding_is_not_attended(case: Any, ids: torch.Tensor) -> None:
    """A mask over packed tokens changes the logits of its row only."""
    mask = torch.ones(2, 70, dtype=torch.long)
    hidden = mask.clone()
    hidden[0, 10:20] = 0
    plain, masked = case.cache(), case.cache()
    for cache in (plain, masked):
        case.feed(cache, ids[:, :69])
        assert cache.packed_tokens > 20
    positions = torch.full((2, 1), 69)
    logits = [
        case.model(input_ids=ids[:, 69:70], **with_cache(cache), attention_mask=m, position_ids=positions).logits
        for cache, m in ((plain, mask), (masked, hidden))
    ]
    assert (logits[0][0] - logits[1][0]).abs().max() > 0.01
    torch.testing.assert_close(logits[0][1], logits[1][1], atol=1e-5, rtol=0)


def test_generated_tokens_stay_dense(case: Any, ids: torch.Tensor) -> None:
    """`quantize_generated: false`: steps never pack, a later chunk of a prompt packs the tokens before it."""
    cache = check(case, ids, [60] + [2] * 25, quantize_generated=False)
    assert cache.packed_tokens == 32
    case.feed(cache, ids[:, :17])
    assert cache.packed_tokens >= 64


def test_no_sinks_and_no_window(case: Any, ids: torch.Tensor) -> None:
    check(case, ids, [64] + [2] * 17, sink_tokens=0, recent_tokens=0, layers=[])


def test_fused_path_is_taken(case: Any, ids: torch.Tensor) -> None:
    """Fused attention runs at decode steps over packed tokens, once per compressed layer.

    C++ attention runs prompt chunks too, and tiles run them if the value codec's `chunks_on_cpp` is False.
    """
    cache = case.cache()
    with record_paths() as taken:
        case.feed(cache, ids[:, :60])
    assert taken == []
    layers = [layer for layer in cache.layers if hasattr(layer, "packed_tokens")]
    backends = [layer.backend.name for layer in layers]
    assert set(backends) <= {"cpp", "torch"}
    on_cpp = [layer for layer in layers if layer.backend.name == "cpp"]
    with record_paths() as taken:
        case.feed(cache, ids[:, 60:90])
    fused_chunks = ["cpp" if layer.sides["values"].codec.chunks_on_cpp else "tiled" for layer in on_cpp]
    assert [call for call in taken if call.path != "decode"] == [(path, 30) for path in fused_chunks] * case.fused
    with record_paths() as taken:
        case.feed(cache, ids[:, 90:97], [1, 6])
    assert taken == [(backend, count) for count in (1, 6) for backend in backends] * case.fused


def test_fused_is_switched_in_mid_generation(unfused: Any, ids: torch.Tensor) -> None:
    """A cache follows its model's switch: steps before and after `enable_fused_attention` agree."""
    with torch.no_grad():
        cache, oracle = unfused.cache(), unfused.oracle()
        for part in (ids[:, :60], ids[:, 60:63]):
            unfused.feed(cache, part)
            unfused.feed(oracle, part)
        enable_fused_attention(unfused.model)
        got = unfused.feed(cache, ids[:, 63:65])
        assert cache.packed_tokens > 0
        torch.testing.assert_close(got, unfused.feed(oracle, ids[:, 63:65]), **TOLERANCE)
