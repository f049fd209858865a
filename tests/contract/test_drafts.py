"""Drafts of up to 128 tokens are packed as single steps would pack the accepted ones, however Transformers drafts."""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.cache_name import with_cache
from support.models import family_cases
from support.models.small_model import HEAD_DIM, HEADS, method_config, small_config
from support.oracle import assert_close_but_for_flips, examples
from support.recorded_paths import record_paths
from transformers import cache_utils
from transformers.cache_utils import Cache

from kvcache_compress import CompressedCache, compress, disable_fused_attention, enable_fused_attention
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.storage.side import MAX_DECODE_TOKENS, MAX_DRAFT_TOKENS
from kvcache_compress.storage.static import StaticStorage

SINKS, RECENT, LAYERS = 4, 16, 3
SIDE = {"method": "turboquant", "bits": 6}
WIDE = {"keys": SIDE, "values": SIDE, "sink_tokens": SINKS, "recent_tokens": RECENT}
PLAIN: dict[str, Any] = {"method": "turboquant", "bits": 2, "center": "off", "equalize": "off"}
CONFIGS: dict[str, dict[str, Any]] = {
    "turboquant": {"keys": PLAIN, "values": {"method": "turboquant", "bits": 3}},
    "mixed": {
        "keys": PLAIN,
        "values": {"method": "kivi", "bits": 4},
        "layers": [
            {"match": 1, "keys": method_config("commvq", 3)["keys"], "sink_tokens": 2},
            {"match": 2, "keys": {"method": "kivi", "bits": 2}, "values": "none", "recent_tokens": 20},
        ],
    },
}
"""Methods without statistics: with them, codes depend on how many tokens the first prompt had."""
DRAFTS = st.tuples(st.sampled_from([1, 2, 9, 16, 17, 21, 33, 65, MAX_DRAFT_TOKENS]), st.sampled_from([0, 0.3, 0.9, 1]))
KINDS: dict[str, dict[str, Any]] = {
    "growing": {},
    "static": {"max_cache_len": 800, "backend": "torch"},
    "static shapes": {"max_cache_len": 800, "backend": "torch"},
}


def assert_same(layer: CompressedLayer, single: CompressedLayer, tokens: int) -> None:
    """Two layers hold the same first `tokens` tokens, bit for bit, in the same segments.

    Steps of static shapes encode tokens one by one, whose rounding can flip codes.
    """
    assert layer.packed_tokens == single.packed_tokens
    for state, other in zip(layer.sides.values(), single.sides.values(), strict=True):
        packed = state.store.tokens
        if packed and isinstance(single.storage, StaticStorage):
            assert_close_but_for_flips(state.decode(0, packed), other.decode(0, packed))
        else:
            fields = zip(state.store.read(0, packed), other.store.read(0, packed), strict=True)
            assert all(torch.equal(*both) for both in fields)
        dense = tokens - state.sinks.shape[2] - packed
        assert torch.equal(state.sinks, other.sinks)
        assert torch.equal(state.tail.view()[:, :, :dense], other.tail.view()[:, :, :dense])


def run_drafts(config: dict[str, Any], prompt: int, first_draft: int, rounds: list[tuple[int, float]]) -> int:
    """Feed drafts to one cache and the accepted tokens one by one to another; returns the packed tokens."""
    drafted, single = CompressedCache(small_config(LAYERS), config), CompressedCache(small_config(LAYERS), config)
    generator = torch.Generator().manual_seed(0)

    def states(tokens: int) -> torch.Tensor:
        return torch.randn(2, LAYERS, 1, HEADS, tokens, HEAD_DIM, generator=generator)

    def feed(cache: CompressedCache, x: torch.Tensor) -> None:
        for index in range(LAYERS):
            cache.layers[index].append(x[0, index], x[1, index])

    start = states(prompt)
    drafted.activate_past_recording()
    feed(drafted, torch.cat([start, states(first_draft)], 4))
    drafted.crop(-first_draft)
    feed(single, start)
    tokens = prompt
    for size, share in [*rounds, (40, 1), (40, 1), (1, 1)]:
        accepted = max(1, round(size * share))
        new = states(size)
        feed(drafted, new)
        feed(single, new[..., :1, :])
        for layer, twin in zip(drafted.layers, single.layers, strict=True):
            assert_same(layer, twin, tokens + 1)
            assert layer.packed_tokens <= max(0, tokens - layer.plan.recent_tokens), "only accepted tokens are packed"
        drafted.crop(accepted - size)
        for one in new[..., 1:accepted, :].split(1, 4):
            feed(single, one)
        tokens += accepted
        assert all(layer.storage.tokens == tokens for layer in [*drafted.layers, *single.layers])
    return drafted.packed_tokens


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_packed_as_single_steps(name: str, kind: str) -> None:
    packed = []

    @examples(4)
    @given(st.sampled_from([3, 20, 70, 200]), st.sampled_from([0, 20, 64]), st.lists(DRAFTS, min_size=2, max_size=4))
    def run(prompt: int, first_draft: int, rounds: list[tuple[int, float]]) -> None:
        config = {"sink_tokens": SINKS, "recent_tokens": RECENT, **CONFIGS[name], **KINDS[kind]}
        packed.append(run_drafts(config, prompt, first_draft, rounds))

    run()
    assert min(packed) > 0


def test_steps_of_static_shapes_go_on_after_drafts(static_shapes: None) -> None:
    """A draft may leave more dense tokens than steps have slots: the next step, or a crop, packs or drops them."""
    config = {"sink_tokens": SINKS, "recent_tokens": RECENT, **CONFIGS["mixed"], "max_cache_len": 400}
    rounds = [(33, 1.0), (2, 1.0), (70, 0.2), (40, 1.0)]
    assert run_drafts({**config, "backend": "torch"}, 60, 20, rounds) >= 96


def drafts(way: str, assistant: Any, count: int) -> dict[str, Any]:
    if way == "prompt-lookup":
        return {"prompt_lookup_num_tokens": count, "max_matching_ngram_size": 1}
    assistant.generation_config.num_assistant_tokens = count
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return {"assistant_model": assistant}


@pytest.mark.skipif(not hasattr(Cache, "activate_past_recording"), reason="no sign of drafts in prompts")
@pytest.mark.parametrize(
    ("way", "count", "kind"),
    [("prompt-lookup", 20, "growing"), ("assisted", 64, "growing"), ("assisted", 20, "static"),
     ("prompt-lookup", 64, "static shapes")],
)  # fmt: skip
def test_generate(
    tiny_model: Any, assistant: Any, ids: torch.Tensor, way: str, count: int, kind: str, request: pytest.FixtureRequest
) -> None:
    """`generate` with long drafts gives the tokens of plain decoding."""
    if kind == "static shapes":
        request.getfixturevalue("static_shapes")
    config = {**WIDE, **KINDS[kind]}
    prompt = ids[:1, :75].repeat(1, 2)
    sizes = []
    with compress(tiny_model, config):
        found = []
        for how in ({}, drafts(way, assistant, count)):
            cache = CompressedCache(tiny_model.config, config)
            watch = tiny_model.register_forward_pre_hook(
                lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
            )
            options = {**with_cache(cache), "max_new_tokens": 40, "do_sample": False, **how}
            found.append(tiny_model.generate(prompt, **options))
            watch.remove()
            one = torch.zeros(1, 1, dtype=torch.long)
            with torch.no_grad():
                tiny_model(one, **with_cache(cache))
            assert cache.packed_tokens == (int(cache.get_seq_length()) - 1 - SINKS - RECENT) // 32 * 32 > 128
    assert any(MAX_DECODE_TOKENS < size <= MAX_DRAFT_TOKENS for size in sizes)
    assert torch.equal(*found)


newest = pytest.mark.skipif(
    not hasattr(cache_utils, "DFlashCache"), reason="this version of Transformers has no MTP and DFlash"
)


@pytest.fixture
def mtp(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """A GLM with two layers that draft, random as they come with no file."""
    from transformers.modeling_layers import MtpModel

    def made(main: Any, device_map: Any = None) -> Any:
        torch.manual_seed(0)
        model = MtpModel(main, 2).eval()
        model.tie_with_main_model(main)
        return model

    monkeypatch.setattr(MtpModel, "from_pretrained", made)
    return family_cases.build("glm4_moe", num_mtp_layers=2), {"use_mtp": True}


@pytest.fixture
def dflash() -> tuple[Any, dict[str, Any]]:
    """A Llama and a model that drafts 24 tokens at once from its hidden states."""
    main = family_cases.build("llama")
    torch.manual_seed(0)
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=main.config.hidden_size, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, block_size=24, mask_token_id=1, target_layer_ids=[0], sliding_window=64,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    drafting = transformers.MuseGlimmerAssistantModel(config).eval()
    return main, {"assistant_model": drafting, "speculation_type": "dflash"}


@newest
@pytest.mark.parametrize("capacity", [None, 200])
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_models_that_draft(kind: str, capacity: int | None, request: pytest.FixtureRequest) -> None:
    """The drafting layers have Transformers' own cache; fused attention serves the model and lets theirs through."""
    model, how = request.getfixturevalue(kind)
    ids = torch.randint(1, 60, (1, 90), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    found = []
    for fused, drafts in ((False, {}), (False, how), (True, how)):
        (enable_fused_attention if fused else disable_fused_attention)(model)
        cache = CompressedCache(model.config, {**WIDE, "max_cache_len": capacity})
        with record_paths() as taken:
            found.append(model.generate(ids, **with_cache(cache), **options, **drafts, disable_compile=True))
        assert cache.packed_tokens == 96
    assert {path for path, queries in taken} - {"decode"} == {cache.layers[0].backend.name}
    assert all(torch.equal(found[0], one) for one in found)


@newest
def test_crop_of_nothing_reaches_sliding_layers() -> None:
    """Layers of Transformers' own, which record their past, are cut to their window by it."""
    model = family_cases.build("gemma2")
    cache = CompressedCache(model.config, WIDE)
    cache.activate_past_recording()
    ids = torch.randint(1, 60, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(ids, **with_cache(cache))
    sliding = next(layer for layer in cache.layers if not isinstance(layer, CompressedLayer))
    assert cache.packed_tokens > 0
    assert sliding.keys.shape[2] == 200
    cache.crop(0)
    assert sliding.keys.shape[2] == sliding.sliding_window - 1


@newest
def test_masks_begin_at_the_length(tiny_model: Any, ids: torch.Tensor) -> None:
    cache = CompressedCache(tiny_model.config, WIDE)
    assert all(layer.supports_early_init for layer in cache.layers)
    cache.early_initialization(2, 2, 32, torch.float32, "cpu")
    assert cache.is_initialized
    with torch.no_grad():
        got = tiny_model(ids[:, :90], **with_cache(cache)).logits
        torch.testing.assert_close(got, tiny_model(ids[:, :90]).logits)
    assert cache.packed_tokens > 0
    assert [cache.get_query_offset(index) for index in range(3)] == [90, 90, 90]


@newest
def test_shared_keys_stay_packed_on_their_device(tiny_model: Any, ids: torch.Tensor) -> None:
    """`KVSharingDict.to`, by which accelerate moves shared keys and values, decodes none that is there already."""
    enable_fused_attention(tiny_model)
    layer = CompressedCache(tiny_model.config, WIDE).layers[0]
    states = torch.randn(1, 2, 91, 32, generator=torch.Generator().manual_seed(0))
    layer.update(states[:, :, :90], states[:, :, :90])
    both = layer.update(states[:, :, 90:], states[:, :, 90:])
    disable_fused_attention(tiny_model)
    assert layer.packed_tokens > 0
    shared = cache_utils.KVSharingDict({"full_attention": both})
    shared.to(torch.device("cpu"))
    assert shared["full_attention"][0] is both[0]
    moved = both[1].to(torch.device("meta"), non_blocking=True)
    assert isinstance(moved, torch.Tensor)
    assert moved.shape == both[1].shape
    assert moved.is_meta
    assert both[0].to(torch.float64).dtype == torch.float64
