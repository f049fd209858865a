"""`compress` without a block, overlapping blocks, cache options of `generate` calls meanwhile, and early exit."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.saved_model import saved_model
from support.models.small_model import method_config, small_model
from transformers import GenerationConfig, LlamaForCausalLM, pipeline

from kvcache_compress import (
    CompressedCache,
    compress,
    disable_fused_attention,
    enable_fused_attention,
    register_position_hooks,
)
from kvcache_compress.attention.interface import attends_fused
from kvcache_compress.modeling.loading import load_model

TURBOQUANT, KIVI = method_config("turboquant"), method_config("kivi")


def has_hooks(model: Any) -> bool:
    return any(module._forward_pre_hooks for module in model.modules())


def generate(model: LlamaForCausalLM, prompt: torch.Tensor, **how: Any) -> torch.Tensor:
    if "generation_config" not in how:
        how |= {"max_new_tokens": 4, "do_sample": False}
    return model.generate(prompt, **how)


def untouched(model: LlamaForCausalLM) -> bool:
    fused = attends_fused(model)
    return "generate" not in vars(model) and not fused and not has_hooks(model)


def in_thread(task: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(task).result(timeout=120)


@pytest.mark.parametrize("name", ["past_key_values", "generation_config", "cache_implementation"])
def test_none_is_as_if_not_given(model: LlamaForCausalLM, prompt: torch.Tensor, name: str) -> None:
    with compress(model, TURBOQUANT) as block:
        expected = generate(model, prompt)
        how = {"max_new_tokens": 4, "do_sample": False, name: None}
        assert torch.equal(model.generate(prompt, **how), expected)
        assert block.last_cache.packed_tokens > 0


def test_use_cache_of_the_model_where_the_call_leaves_it_open(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    settings = GenerationConfig(max_new_tokens=4, do_sample=False)
    assert settings.use_cache is None
    model.generation_config.use_cache = False
    with compress(model, TURBOQUANT) as block:
        generate(model, prompt, generation_config=settings)
        assert block.cache is None
        settings.use_cache = True
        generate(model, prompt, generation_config=settings)
        assert block.last_cache.packed_tokens > 0


def test_options_of_the_model_stay_while_it_generates(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """A running `generate` does not change the model's generation config, which other threads may read."""
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, cache_implementation="static")
    model.generation_config.cache_implementation = "static"
    seen = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.extend([model.generation_config.cache_implementation, settings.cache_implementation])
        return scores

    made = []
    with compress(model, TURBOQUANT) as block:
        for how in ({}, {"generation_config": settings}):
            generate(model, prompt, logits_processor=[look], **how)
            made.append(block.last_cache)
            assert made[-1].packed_tokens > 0
    assert made[0] is not made[1], "each call gets a cache of its own"
    assert set(seen) == {"static"}


SCRIPTS = {
    "nested blocks": "with a: a, with b: b, end b: a, end a: -",
    "blocks that end in the order of their beginning": "with a: a, with b: b, end a: b, end b: -",
    "without a block, until it is stopped": "on a: a, stop a: -, stop a: -",
    "a second call takes the place of the first": "on a: a, on b: b, stop b: -, stop a: -",
    "stopped in the order of the calls": "on a: a, on b: b, stop a: b, stop b: -",
    "a block interrupts what was begun without one": "on a: a, with b: b, end b: a, stop a: -",
    "a block that is stopped within": "on a: a, with b: b, stop b: a, end b: a, stop a: -",
    "what begins in a block outlives it": "with a: a, on b: b, end a: b, stop b: -",
    "what begins and ends in a block leaves it alone": "with a: a, on b: b, stop b: a, end a: -",
    "a call within a block between two": "on a: a, with b: b, on c: c, stop c: b, end b: a, stop a: -",
}
"""Steps, each with who compresses after it: `with` and `end` of a block, `on` for a call without one, and `stop`."""


@pytest.mark.parametrize("was_fused", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_who_compresses(model: LlamaForCausalLM, prompt: torch.Tensor, name: str, was_fused: bool) -> None:
    """Blocks and lasting calls, in any order: one compresses, with its own switch, and the model's own comes back."""
    if was_fused:
        enable_fused_attention(model)
    how = {"a": (TURBOQUANT, True), "b": (KIVI, False), "c": (KIVI, True)}
    handles: dict[str, Any] = {}
    for step in SCRIPTS[name].split(", "):
        act, who, active = step.replace(":", "").split()
        if act in ("with", "on"):
            handles[who] = compress(model, how[who][0], fused=how[who][1])
        if act == "with":
            handles[who].__enter__()
        elif act == "end":
            handles[who].__exit__(None, None, None)
        elif act == "stop":
            handles[who].stop()
        for one in handles.values():
            one.cache = None
        generate(model, prompt)
        assert [one for one, handle in handles.items() if handle.cache is not None] == [active] * (active != "-"), step
        if active != "-":
            assert handles[active].last_cache.packed_tokens > 0
            assert attends_fused(model) == how[active][1]
    assert attends_fused(model) == was_fused
    disable_fused_attention(model)
    assert untouched(model)


def test_a_handle_has_one_block(model: LlamaForCausalLM) -> None:
    compression = compress(model, TURBOQUANT)
    with compression as block:
        assert block is compression
        with pytest.raises(RuntimeError, match="no cache yet"):
            _ = block.last_cache
        with pytest.raises(RuntimeError, match="call compress"), compression:
            pass
    with pytest.raises(RuntimeError, match="call compress"), compression:
        pass
    assert untouched(model)


def test_generate_that_was_taken_out_of_its_block(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    expected = generate(model, prompt)
    with compress(model, TURBOQUANT) as block:
        taken = model.generate
    assert torch.equal(taken(prompt, max_new_tokens=4, do_sample=False), expected)
    assert block.cache is None


def test_a_dropped_handle_ends_nothing(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """The model still compresses, but keeps no cache of a finished call; a later handle ends both."""
    compression = compress(model, TURBOQUANT)
    generate(model, prompt)
    expected, last = compression.last_cache.packed_tokens, weakref.ref(compression.last_cache)
    del compression
    gc.collect()
    assert last() is None
    seen: list[int] = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        alive = [one for one in gc.get_objects() if type(one) is CompressedCache]
        seen.append(alive[0].packed_tokens)
        return scores

    generate(model, prompt, logits_processor=[look])
    assert seen[-1] == expected > 0
    compress(model, KIVI).stop()
    assert untouched(model)


def test_a_compressed_model_can_be_freed(prompt: torch.Tensor) -> None:
    model = small_model()
    compression = compress(model, TURBOQUANT)
    generate(model, prompt)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert compression.last_cache.packed_tokens > 0
    compression.stop()


def test_stop_in_another_thread(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    compression = compress(model, TURBOQUANT)

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        in_thread(compression.stop)
        return scores

    generate(model, prompt, logits_processor=[look])
    assert compression.last_cache.packed_tokens > 0
    assert compression.last_cache.get_seq_length() == 63
    assert untouched(model)


def test_a_wrapper_of_others_stays(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    expected = generate(model, prompt)
    compression = compress(model, TURBOQUANT)
    ours = model.generate
    model.generate = lambda *args, **kwargs: ours(*args, **kwargs)
    generate(model, prompt)
    assert compression.last_cache.packed_tokens > 0
    compression.stop()
    assert "generate" in vars(model)
    assert torch.equal(generate(model, prompt), expected)


def test_a_pipeline() -> None:
    """A pipeline, which only calls `generate`, gives the text of a cache passed to `generate`, in batches too."""
    model, tokenizer = load_model(saved_model())
    pipe, how = pipeline("text-generation", model=model, tokenizer=tokenizer), {"max_new_tokens": 8, "do_sample": False}
    texts = ["The lighthouse was built of granite. " * count for count in (2, 3, 2)]
    with compress(model, TURBOQUANT) as handle:
        found = pipe(texts, return_full_text=False, batch_size=2, **how)
        assert handle.last_cache.packed_tokens > 0
    enable_fused_attention(model)
    for part in (slice(0, 2), slice(2, 3)):
        batch = tokenizer(texts[part], return_tensors="pt", padding=True)
        cache = CompressedCache(model.config, TURBOQUANT)
        output = model.generate(**batch, **with_cache(cache), **how)[:, batch["input_ids"].shape[1] :]
        expected = tokenizer.batch_decode(output, skip_special_tokens=True)
        assert [one[0]["generated_text"] for one in found[part]] == expected


LAYERS, PROMPT, NEW = 3, 60, 14
CONFIGS: dict[str, dict[str, Any]] = {
    name: method_config(name, LAYERS) for name in ("turboquant", "spectral", "commvq")
}
CONFIGS["layer-rule"] = {**method_config("turboquant"), "layers": [{"match": 2, "keys": {"method": "kivi", "bits": 4}}]}


@pytest.fixture
def deep() -> LlamaForCausalLM:
    return small_model(LAYERS)


def drafted(model: LlamaForCausalLM, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(
        prompt[:1], **{"max_new_tokens": NEW, "do_sample": False, "assistant_early_exit": 1, **options}
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_early_exit_with_an_own_cache_and_compress(
    deep: LlamaForCausalLM, prompt: torch.Tensor, name: str, fused: bool
) -> None:
    """Early exit gives the same tokens with an own cache and within `compress`, whose handle has the verifier's."""
    own = CompressedCache(deep.config, CONFIGS[name])
    if fused:
        enable_fused_attention(deep)
    register_position_hooks(deep)
    expected = drafted(deep, prompt, **with_cache(own))
    assert own.packed_tokens > 0
    disable_fused_attention(deep)
    with compress(deep, CONFIGS[name], fused=fused) as handle:
        assert torch.equal(drafted(deep, prompt), expected)
        cache = handle.last_cache
        assert len(cache.layers) == deep.config.num_hidden_layers == LAYERS
        assert cache.packed_tokens == own.packed_tokens
        assert cache.get_seq_length() == own.get_seq_length() >= PROMPT + NEW - 1


@pytest.mark.parametrize("fused", [False, True])
def test_early_exit_without_compression_is_greedy(deep: LlamaForCausalLM, prompt: torch.Tensor, fused: bool) -> None:
    """With a window so wide that nothing is packed, drafts, crops and steps of several tokens lose nothing."""
    expected = drafted(deep, prompt, assistant_early_exit=None)
    with compress(deep, {**CONFIGS["turboquant"], "recent_tokens": 512}, fused=fused) as handle:
        assert torch.equal(drafted(deep, prompt), expected)
        assert handle.last_cache.get_seq_length() >= PROMPT + NEW - 1


def test_another_thread_is_no_draft(deep: LlamaForCausalLM, prompt: torch.Tensor) -> None:

    def call(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        in_thread(lambda: drafted(deep, prompt[:, :50], assistant_early_exit=None))
        return scores

    with compress(deep, CONFIGS["turboquant"]) as handle:
        drafted(deep, prompt, assistant_early_exit=None, logits_processor=[call])
        assert handle.last_cache.get_seq_length() == 50 + NEW - 1
        assert handle.last_cache.packed_tokens > 0


def test_after_an_exception(deep: LlamaForCausalLM, prompt: torch.Tensor) -> None:

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with compress(deep, CONFIGS["turboquant"]) as handle:
        with pytest.raises(KeyError, match="mine"):
            drafted(deep, prompt, assistant_early_exit=None, logits_processor=[fail])
        failed = handle.last_cache
        drafted(deep, prompt)
        assert handle.last_cache is not failed
        assert handle.last_cache.packed_tokens > 0
