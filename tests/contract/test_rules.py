"""Rules of every method: what is packed, attended to and refused; all modes of `generate`, fused and unfused."""

import copy
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.oracle import TOLERANCE, assert_close_but_for_flips, few, label
from support.recorded_paths import record_paths

from kvcache_compress import disable_fused_attention, enable_fused_attention


@few
def test_masked_tokens_are_not_attended(case: Any, ids: torch.Tensor) -> None:
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, 10:20] = 0
    logits = []
    for seen in (torch.ones_like(mask), mask):
        cache = case.cache()
        case.feed(cache, ids[:, :69])
        assert cache.packed_tokens > 20
        how = {"attention_mask": seen, "position_ids": torch.full((2, 1), 69)}
        logits.append(case.model(input_ids=ids[:, 69:70], **with_cache(cache), **how).logits)
    assert (logits[0][0] - logits[1][0]).abs().max() > 0.01
    torch.testing.assert_close(logits[0][1], logits[1][1], atol=1e-5, rtol=0)


@few
@pytest.mark.parametrize(
    ("sizes", "changes", "packed"),
    [
        ([60] + [2] * 25, {"quantize_generated": False}, 32),
        ([60] + [2] * 25 + [17], {"quantize_generated": False, "backend": "torch"}, 96),
        ([64] + [2] * 17, {"sink_tokens": 0, "recent_tokens": 0, "layers": []}, 96),
    ],
    ids=["generated tokens stay dense", "until a chunk comes", "no sinks, no window"],
)
def test_windows(case: Any, ids: torch.Tensor, sizes: list[int], changes: dict[str, Any], packed: int) -> None:
    cache, oracle = case.cache(**changes), case.oracle(**changes)
    assert_close_but_for_flips(*(case.feed(one, ids[:, : sum(sizes)], sizes) for one in (cache, oracle)))
    assert cache.packed_tokens == packed
    assert [layer.packed_tokens for layer in cache.compressed_layers.values()] == [
        layer.packed for layer in oracle.layers
    ]


def test_path_is_taken(case: Any, ids: torch.Tensor) -> None:
    """Fused attention runs at decode steps over packed tokens, once per compressed layer.

    C++ attention runs prompt chunks too, and tiles run them if the value codec's `chunks_on_cpp` is False.
    """
    cache = case.cache()
    taken = []
    for part in (ids[:, :60], ids[:, 60:90], ids[:, 90:91], ids[:, 91:97]):
        with record_paths() as paths:
            case.feed(cache, part)
        taken.append(paths)
    layers = cache.compressed_layers.values()
    backends = [layer.backend.name for layer in layers]
    chunks = ["cpp" if layer.sides["values"].codec.chunks_on_cpp else "tiled" for layer in layers]
    fused_chunks = [path for path, backend in zip(chunks, backends, strict=True) if backend == "cpp"]
    assert taken[0] == []
    assert [call for call in taken[1] if call.path != "decode"] == [(path, 30) for path in fused_chunks] * case.fused
    assert taken[2] == [(backend, 1) for backend in backends] * case.fused
    assert taken[3] == [(backend, 6) for backend in backends] * case.fused


def test_fused_is_switched_in_mid_generation(unfused: Any, ids: torch.Tensor) -> None:
    """A cache and its copies follow the model's switch: steps before and after `enable_fused_attention` agree."""
    with torch.no_grad():
        cache, oracle = unfused.cache(), unfused.oracle()
        for one in (cache, oracle):
            unfused.feed(one, ids[:, :63], [60, 3])
        twin = copy.deepcopy(cache)
        enable_fused_attention(unfused.model)
        assert all(layer.fused for layer in [*cache.compressed_layers.values(), *twin.compressed_layers.values()])
        got = unfused.feed(cache, ids[:, 63:65])
        assert cache.packed_tokens > 0
        torch.testing.assert_close(got, unfused.feed(oracle, ids[:, 63:65]), **TOLERANCE)


def test_positive_crop_means_what_it_means_to_transformers(unfused: Any, ids: torch.Tensor) -> None:
    """A length where Transformers takes it for one, else an error that says what to write, and no change."""
    cache, oracle = unfused.cache(), unfused.oracle()
    with torch.no_grad():
        for one in (cache, oracle):
            unfused.feed(one, ids[:, :75])
    before = [layer.keys.clone() for layer in cache.layers]
    try:
        oracle.crop(60)
    except ValueError:
        with pytest.raises(ValueError, match=r"crop\(60 - cache.get_seq_length\(\)\)"):
            cache.crop(60)
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    assert cache.packed_tokens > 0
    assert cache.get_seq_length() == oracle.get_seq_length()


@pytest.mark.parametrize("case", [("spectral-prefill", True)], indirect=True, ids=label)
def test_a_crop_before_attention_takes_back_what_was_due(case: Any) -> None:
    """A crop after a forward that failed between a layer's update and its attention."""
    x = torch.randn(2, 2, 60, 32, generator=torch.Generator().manual_seed(0))
    cache = case.cache()
    cache.update(x, x, 0)
    layer = cache.layers[0]
    assert layer.awaits_queries
    layer.crop(-50)
    layer.close(None)
    assert layer.packed_tokens == 0
    assert torch.equal(layer.keys, x[:, :, :10])


WAYS: dict[str, dict[str, Any]] = {
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "many-returned": {"do_sample": True, "num_return_sequences": 3},
    "beams-returned": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "prompt-lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
    "assisted": {},
}
NEW = 28
"""New tokens; enough that generated tokens are packed too."""


def generate(case: Any, cache: Any, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return case.model.generate(ids, **with_cache(cache), **{"max_new_tokens": NEW, "disable_compile": True, **how})


@pytest.mark.parametrize("way", WAYS)
def test_fused_equals_not_fused(unfused: Any, assistant: Any, ids: Any, way: str, capacity: int | None) -> None:
    """Static caches give the tokens of growing ones. Assisted generation crops most tokens of a step again."""
    prompt, how = ids[:, :50], WAYS[way]
    if way in ("prompt-lookup", "assisted"):
        prompt = ids[:1, :25].repeat(1, 2)
        how = how or {"do_sample": False, "assistant_model": assistant}
    outputs = []
    for fused, room in ((False, None), (True, capacity)):
        (enable_fused_attention if fused else disable_fused_attention)(unfused.model)
        cache = unfused.cache(max_cache_len=room)
        outputs.append(generate(unfused, cache, prompt, **how))
        assert cache.packed_tokens >= 32
    assert outputs[0].shape[1] == 50 + NEW
    assert torch.equal(*outputs)


@few
def test_a_second_turn_continues_the_cache(case: Any, ids: torch.Tensor) -> None:
    """The next prompt of a chat is a chunk over a packed past; `generate` feeds only its new tokens."""
    cache, oracle = case.cache(), case.oracle()
    turns = []
    for one in (cache, oracle):
        first = generate(case, one, ids[:, :50], do_sample=False)
        turns.append(generate(case, one, torch.cat([first, ids[:, 50:90]], 1), do_sample=False))
    assert cache.packed_tokens > 64
    assert turns[0].shape[1] == 90 + 2 * NEW
    assert torch.equal(*turns)
