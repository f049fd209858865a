"""Continuous batching over compressed pages: the same tokens as one by one, and nobody else's errors."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import family_cases
from support.models.small_model import METHODS, VOCAB, method_config, mixed_config
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, LlamaForCausalLM

from kvcache_compress import CompressedCache, compress, enable_fused_attention
from kvcache_compress.attention.interface import attends_fused
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.serving.engine.cache import Cache
from kvcache_compress.serving.engine.statistics import ModelCodecs
from kvcache_compress.storage.dynamic import DynamicStorage

NEW = 24
"""New tokens of a request, of which some are packed."""
LENGTHS = (2, 17, 60, 100, 33, 150, 333, 500)
NONE = {"keys": "none", "values": "none", "sink_tokens": 4, "recent_tokens": 8}
TEXT = torch.randint(1, VOCAB, (600,), generator=torch.Generator().manual_seed(5))


def prompts(lengths: Any = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (count,), generator=generator).tolist() for count in lengths]


@pytest.fixture(autouse=True)
def _settings(model: LlamaForCausalLM, one_era: None) -> None:
    model.generation_config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)


def batching(**options: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(**{"allow_block_sharing": False, **options})


def batch(model: Any, config: Any, inputs: list[list[int]], fused: bool = True, **options: Any) -> tuple[Any, Any]:
    """Outputs of `generate_batch` in a pool that holds a few requests at once, and the codecs."""
    with compress(model, config, fused=fused, memory=options.pop("memory", "400KiB"), statistics=TEXT) as block:
        out = model.generate_batch(inputs, continuous_batching_config=batching(**options))
        return list(out.values()), block._call.codecs


def one_by_one(model: Any, config: Any, inputs: list[list[int]], codecs: ModelCodecs, patch: Any) -> list[list[int]]:
    """Greedy tokens of each prompt alone, in a growing cache with the same codecs."""
    make = CompressedLayer._new_storage

    def with_codecs(layer: CompressedLayer, like: Any) -> DynamicStorage:
        storage = make(layer, like)
        storage.budget = None
        for side, state in storage.sides.items():
            state.recode(codecs.layers[layer.index].codecs[side])
            state.prepared = True
        return storage

    patch.setattr(CompressedLayer, "_new_storage", with_codecs)
    patch.setattr(DynamicStorage, "_least_tokens", lambda storage, in_step=False: 0)
    enable_fused_attention(model)
    found = []
    for prompt in inputs:
        cache = CompressedCache(model.config, config) if config is not NONE else DynamicCache(config=model.config)
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, **{cache_argument(): cache})
        found.append(out[0, len(prompt) :].tolist())
    return found


CONFIGS = {name: method_config(name) for name in METHODS} | {"none": NONE, "mixed": mixed_config()}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "decoded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_requests_equal_one_by_one(model: Any, name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = "2MiB" if name == "none" else "400KiB"
    outputs, codecs = batch(model, CONFIGS[name], prompts(), fused, memory=memory)
    assert [one.error for one in outputs] == [None] * len(LENGTHS)
    got = [one.generated_tokens for one in outputs]
    assert got == one_by_one(model, CONFIGS[name], prompts(), codecs, monkeypatch)


@pytest.fixture
def manager(model: Any) -> Iterator[Any]:
    """A running manager with room for few requests, and what it holds when it stops: nothing."""
    block = compress(model, method_config("turboquant"), memory="400KiB", statistics=TEXT)
    with block, model.continuous_batching_context_manager(continuous_batching_config=batching()) as made:
        yield made
        pages = made.batch_processor.cache.pages
    assert not pages.requests
    assert sorted(pages.free_slots) == list(range(pages.plan.slots))
    free = pages.pool.count_free_blocks(pages.index) + pages.pool.num_free_sectors
    assert free == pages.num_blocks


def results(manager: Any, count: int) -> dict[str, Any]:
    """Outputs of `count` requests, by id."""
    found: dict[str, Any] = {}
    while len(found) < count:
        result = manager.get_result(timeout=60)
        assert result is not None
        if result.is_finished():
            found[result.request_id] = result
    return found


def test_bad_requests_fail_alone(model: Any, manager: Any) -> None:
    good = manager.add_requests(prompts((20, 100)), max_new_tokens=NEW)
    bad = {
        manager.add_request([1] * 5000, max_new_tokens=NEW): "5000 + 24 tokens need",
        manager.add_request([1] * 20, max_new_tokens=0): "max_new_tokens=0",
        manager.add_request([], max_new_tokens=NEW): "input_ids=[]",
    }
    found = results(manager, 5)
    for name in good:
        assert found[name].error is None
        assert len(found[name].generated_tokens) == NEW
    for name, reason in bad.items():
        assert reason in found[name].error


@pytest.mark.parametrize("at", [630, 650], ids=["prompt", "step"])
def test_a_key_that_is_not_finite_ends_its_request(model: Any, at: int) -> None:
    """Token `at` of one request breaks, in its prompt or later; the others do not notice."""
    inputs, config = prompts((40, 640, 55)), method_config("turboquant")
    plain, _ = batch(model, config, inputs, memory="1MiB")
    positions: list[torch.Tensor] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(kwargs["position_ids"]), with_kwargs=True
    )
    model.model.layers[1].self_attn.k_proj.register_forward_hook(
        lambda module, args, out: out.masked_fill((positions[-1] == at)[..., None], float("nan"))
        if positions[-1] is not None else out
    )  # fmt: skip
    outputs, _ = batch(model, config, inputs, memory="1MiB")
    assert "hold NaN" in outputs[1].error
    assert outputs[1].generated_tokens == plain[1].generated_tokens[: max(0, at - 640 + 1)]
    for index in (0, 2):
        assert outputs[index].error is None
        assert outputs[index].generated_tokens == plain[index].generated_tokens


def test_many_requests_and_cancellations_leave_nothing_behind(manager: Any) -> None:
    choose = random.Random(0)
    names = manager.add_requests(prompts([choose.randint(1, 60) for _ in range(200)]), max_new_tokens=8)
    cancelled = set(choose.sample(names, 40))
    for name in cancelled:
        manager.cancel_request(name)
    found = results(manager, 160)
    assert found.keys() | cancelled == set(names)
    assert all(found[name].error is None and len(found[name].generated_tokens) == 8 for name in found)


def greedy(model: Any, cache: Any, ids: list[int]) -> list[int]:
    """Greedy tokens after `ids`, of which the cache has the first ones."""
    new, found = torch.tensor([ids[cache.get_seq_length() :]]), []
    with torch.no_grad():
        while len(found) < NEW:
            new = model(new, **{cache_argument(): cache}).logits[:, -1:].argmax(-1)
            found.append(int(new))
    return found


@pytest.mark.parametrize("name", ["turboquant", "commvq", "spectral", "kivi"])
def test_a_shared_prefix_is_read_from_its_pages(model: Any, name: str) -> None:
    """Later requests with the same beginning attend to its codes, and their own few tokens are dense."""
    config = method_config(name) | {"recent_tokens": 64}
    start, *ends = prompts((260, 5, 3, 1))
    with compress(model, config, memory="2MiB", statistics=TEXT) as block:
        manager = model.init_continuous_batching(continuous_batching_config=batching(allow_block_sharing=True))
        manager.start()
        found = []
        for end in ([], *ends):
            request = manager.add_request(start + end, max_new_tokens=NEW)
            found.append(results(manager, 1)[request].generated_tokens)
        page = manager.batch_processor.cache.pages.plan.page
        manager.stop()
        codecs = block._call.codecs
    shared = 4 + (260 - 64 - 4) // page * page
    dense = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([start]), **{cache_argument(): dense})
    for end, got in zip(ends, found[1:], strict=True):
        cache = DynamicCache(config=model.config)
        for index, layer in codecs.layers.items():
            sides = []
            for codec, x in zip(
                layer.codecs.values(), (dense.layers[index].keys, dense.layers[index].values), strict=True
            ):
                rope = None
                if layer.track is not None and codec.rope_use(codec.options, codec.context.side) == "factors":
                    rope = layer.track.read(0, shared - 4)
                decoded = codec.decode(codec.encode(x[:, :, 4:shared], rope), rope)
                sides.append(torch.cat([x[:, :, :4], decoded], 2))
            cache.update(*sides, index)
        assert got == greedy(model, cache, start + end)


def test_several_answers_of_one_prompt(model: Any) -> None:
    """Forks share pages and copy dense tokens; greedy ones all give the tokens of a request alone."""
    model.generation_config.num_return_sequences = 3
    for sharing in (True, False):
        outputs, _ = batch(
            model, method_config("turboquant"), prompts((200, 30)), memory="2MiB", allow_block_sharing=sharing
        )
        got = [one.generated_tokens for one in outputs]
        assert got[0] == got[1] == got[2]
        assert got[3] == got[4] == got[5]
        assert len(got) == 6


def test_sliding_layers_keep_their_own_pages() -> None:
    """A model of both kinds gives the tokens of `generate` with the same codecs."""
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = family_cases.build("gemma3", num_hidden_layers=3, layer_types=layer_types, sliding_window=32)
    model.generation_config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    outputs, codecs = batch(model, method_config("kivi"), prompts((20, 150, 90)), memory="2MiB", max_batch_tokens=512)
    with pytest.MonkeyPatch.context() as patch:
        expected = one_by_one(model, method_config("kivi"), prompts((20, 150, 90)), codecs, patch)
    assert [one.generated_tokens for one in outputs] == expected


def test_wide_windows_alone_are_refused() -> None:
    """They hide nothing, but Transformers would keep them in pages of its own."""
    model = family_cases.build("phi3", sliding_window=512, max_position_embeddings=512)
    with (
        compress(model, method_config("kivi"), memory="1MiB", statistics=TEXT),
        pytest.raises(ValueError, match="phi3 has no full-attention layer to compress in continuous batching"),
    ):
        model.generate_batch(prompts((20,)), continuous_batching_config=batching())


def test_what_pages_cannot_do_is_refused(model: Any) -> None:
    config = method_config("turboquant")
    for options, message in (
        ({"memory": "10KiB"}, "memory=10240: too little"),
        ({"statistics": None}, "statistics=None: no tokenizer"),
        ({"statistics": [1] * 5}, "5 tokens are too few"),
    ):
        with (
            compress(model, config, **{"memory": "1MiB", "statistics": TEXT, **options}),
            pytest.raises(ValueError, match=message),
        ):
            model.generate_batch(prompts((20,)), continuous_batching_config=batching())
    with (
        compress(model, config, memory="1MiB", statistics=TEXT),
        pytest.raises(ValueError, match="cpu_offload_space=1"),
    ):
        model.generate_batch(prompts((20,)), continuous_batching_config=batching(cpu_offload_space=1.0))
    for changes in ({"max_cache_len": 100}, {"offloading": True}, {"quantize_generated": False}):
        with (
            compress(model, config | changes, memory="1MiB", statistics=TEXT),
            pytest.raises(ValueError, match=next(iter(changes))),
        ):
            model.generate_batch(prompts((20,)), continuous_batching_config=batching())
    for memory in ("much", -1, "3 apples"):
        with pytest.raises(ValueError, match="memory="):
            compress(model, config, memory=memory)


def test_another_release_of_transformers_is_refused_by_what_differs(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cache.__base__, "search_prefix_match", lambda self, source, targets: 0)
    with (
        compress(model, method_config("turboquant")),
        pytest.raises(RuntimeError, match="search_prefix_match takes self, source, targets"),
    ):
        model.generate_batch(prompts((20,)), continuous_batching_config=batching())


def test_a_persistent_manager_serves_again(model: Any) -> None:
    config = method_config("turboquant")
    with compress(model, config, memory="400KiB", statistics=TEXT):
        first, second = (
            model.generate_batch(prompts((40, 70)), continuous_batching_config=batching(), persistent_manager=True)
            for _ in range(2)
        )
        manager = model._cached_continuous_batching_manager
    assert [one.generated_tokens for one in first.values()] == [one.generated_tokens for one in second.values()]
    assert manager._request_counter == 4
    assert not hasattr(model, "_cached_continuous_batching_manager")


def test_a_failed_request_reports_for_all_its_answers(model: Any) -> None:
    """One that can never fit, and one with a key that is not finite, each of two answers."""
    model.generation_config.num_return_sequences = 2
    model.model.embed_tokens.weight.data[0] = torch.nan
    outputs, _ = batch(model, method_config("turboquant"), [[1] * 5000, [5, 0, 7], *prompts((40,))])
    assert [one.error is None for one in outputs] == [False] * 4 + [True] * 2


def test_a_request_may_fill_the_pool(manager: Any) -> None:
    """The longest that fits, with its dense tokens; one token more is refused."""
    plan, blocks = manager.batch_processor.cache.pages.plan, manager.batch_processor.cache.num_sectors
    most = blocks * plan.page + plan.windows.sinks + plan.windows.recent
    names = [manager.add_request([1] * (most - 4 + more), max_new_tokens=4) for more in (0, 1)]
    found = results(manager, 2)
    assert [found[name].error is None for name in names] == [True, False]


def test_more_tokens_than_the_model_has_positions(model: Any) -> None:
    model.config.max_position_embeddings = 200
    outputs, _ = batch(model, method_config("spectral"), prompts((190, 40)), memory="2MiB")
    assert [one.error is None for one in outputs] == [False, True]


def test_short_requests_leave_room_for_pages(model: Any) -> None:
    for memory in (90_000, 200_000, 1_000_000):
        outputs, _ = batch(model, method_config("turboquant"), prompts((3,) * 40), memory=memory)
        assert [one.error for one in outputs] == [None] * 40


def test_a_manager_starts_again_with_the_same_pool(model: Any) -> None:
    with compress(model, method_config("turboquant"), memory="400KiB", statistics=TEXT):
        manager = model.init_continuous_batching(continuous_batching_config=batching(default_compile_level=1))
        sectors = []
        for _ in range(3):
            manager.start()
            manager.add_request([1] * 50, max_new_tokens=2)
            assert results(manager, 1).popitem()[1].error is None
            sectors.append(manager.batch_processor.cache.num_sectors)
            manager.stop()
    assert sectors[0] == sectors[1] == sectors[2]


def test_replaced_blocks_end_their_managers(model: Any) -> None:
    first = compress(model, method_config("turboquant"), memory="400KiB", statistics=TEXT)
    config = batching(num_blocks=4, page_size=64, max_batch_tokens=128)
    model.generate_batch(prompts((20,)), continuous_batching_config=config, persistent_manager=True)
    compress(model, method_config("kivi")).stop()
    first.stop()
    assert not hasattr(model, "_cached_continuous_batching_manager")
    assert "init_continuous_batching" not in vars(model)
    assert not attends_fused(model)


def test_the_latest_prefixes_are_shared(model: Any) -> None:
    """There are rows for the sinks of few prefixes; one that nobody uses makes room for another."""
    first, second = prompts((150, 150), seed=7)
    with compress(model, NONE, memory="400KiB", statistics=TEXT):
        config = batching(allow_block_sharing=True, max_requests_per_batch=2)
        with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
            shared = []
            for prompt in (first, first, second, second, first):
                manager.add_request(prompt, max_new_tokens=4)
                assert manager.get_result(timeout=60).error is None
                pages = manager.batch_processor.cache.pages
                shared.append(len(pages.prefix_sinks))
            assert pages.plan.prefixes == 1
            assert shared == [1] * 5
            kept = next(iter(pages.prefix_sinks))
            assert pages.ledger.block_to_hash[kept] == next(pages._hashes(first))
