"""`compress` without a block, overlapping blocks, and cache options of `generate` calls meanwhile."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models.small_model import VOCAB, method_config, small_model
from transformers import GenerationConfig, LlamaForCausalLM

from kvcache_compress import CompressedCache, compress, disable_fused_attention, enable_fused_attention
from kvcache_compress.attention.interface import ATTENTION_NAME

TURBOQUANT, KIVI = method_config("turboquant"), method_config("kivi")


def has_hooks(model: Any) -> bool:
    return any(module._forward_pre_hooks for module in model.modules())


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    return small_model()


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(1, VOCAB, (2, 60), generator=torch.Generator().manual_seed(0))


def generate(model: LlamaForCausalLM, prompt: torch.Tensor, **how: Any) -> torch.Tensor:
    if "generation_config" not in how:
        how |= {"max_new_tokens": 4, "do_sample": False}
    return model.generate(prompt, **how)


def untouched(model: LlamaForCausalLM) -> bool:
    fused = model.config._attn_implementation == ATTENTION_NAME
    return "generate" not in vars(model) and not fused and not has_hooks(model)


def in_thread(task: Callable[[], Any]) -> Any:
    """Run a task in another thread and return its result or exception."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(task())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=120)
    return found[0]


@pytest.mark.parametrize("name", ["past_key_values", "generation_config", "cache_implementation"])
def test_none_is_as_if_not_given(model: LlamaForCausalLM, prompt: torch.Tensor, name: str) -> None:
    with compress(model, TURBOQUANT) as block:
        expected = generate(model, prompt)
        how = {"max_new_tokens": 4, "do_sample": False, name: None}
        assert torch.equal(model.generate(prompt, **how), expected)
        assert block.last_cache.packed_tokens > 0


def test_use_cache_of_the_model_where_the_call_leaves_it_open(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """An option of a passed generation config that is None is taken from the model's own config."""
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

    with compress(model, TURBOQUANT) as block:
        for how in ({}, {"generation_config": settings}):
            generate(model, prompt, logits_processor=[look], **how)
            assert block.last_cache.packed_tokens > 0
    assert set(seen) == {"static"}


def test_another_thread_is_refused(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """A block of another thread is refused and changes nothing; calls of `generate` there use the open block."""

    def enter() -> None:
        with compress(model, KIVI):
            pass

    with compress(model, TURBOQUANT) as block:
        expected = generate(model, prompt)
        refused = in_thread(enter)
        assert isinstance(refused, ValueError)
        assert "model=LlamaForCausalLM: another thread compresses it" in str(refused)
        block.cache = None
        assert torch.equal(in_thread(lambda: generate(model, prompt)), expected)
        assert block.last_cache.compression.keys.method == "turboquant"
    assert untouched(model)
    assert in_thread(enter) is None
    assert untouched(model)


@pytest.mark.parametrize("was_fused", [False, True])
def test_blocks_that_end_in_the_order_of_their_beginning(
    model: LlamaForCausalLM, prompt: torch.Tensor, was_fused: bool
) -> None:
    """Blocks may end in the order they began, as in generators and tasks; the youngest open one applies."""
    if was_fused:
        enable_fused_attention(model)
    blocks = compress(model, TURBOQUANT, fused=True), compress(model, KIVI, fused=False)
    first, second = (block.__enter__() for block in blocks)
    assert model.config._attn_implementation == "sdpa"
    blocks[0].__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"
    generate(model, prompt)
    assert second.last_cache.packed_tokens > 0
    assert first.cache is None
    blocks[1].__exit__(None, None, None)
    assert (model.config._attn_implementation == ATTENTION_NAME) == was_fused
    disable_fused_attention(model)
    assert untouched(model)


def test_an_inner_block_gives_the_switch_back(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    with compress(model, TURBOQUANT, fused=True):
        with compress(model, KIVI, fused=False):
            assert model.config._attn_implementation == "sdpa"
        assert model.config._attn_implementation == ATTENTION_NAME
        wrong = {**KIVI, "layers": [{"match": 9, "method": "none"}]}
        with pytest.raises(ValueError, match="match=9"), compress(model, wrong):
            pass
        with compress(model, KIVI) as inner:
            generate(model, prompt)
            assert inner.last_cache.compression.keys.method == "kivi"
    assert untouched(model)


def test_generate_that_was_taken_out_of_its_block(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    expected = generate(model, prompt)
    with compress(model, TURBOQUANT) as block:
        taken = model.generate
    assert torch.equal(taken(prompt, max_new_tokens=4, do_sample=False), expected)
    assert block.cache is None


# Without a block


def test_on_from_the_call_until_stop(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    expected = generate(model, prompt)
    compression = compress(model, TURBOQUANT)
    generate(model, prompt)
    generate(model, prompt)
    assert compression.last_cache.packed_tokens > 0
    compression.stop()
    assert untouched(model)
    compression.stop()
    assert untouched(model)
    assert compression.last_cache.packed_tokens > 0
    assert torch.equal(generate(model, prompt), expected)


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


def test_a_second_call_takes_the_place_of_the_first(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    first = compress(model, TURBOQUANT)
    second = compress(model, KIVI, fused=False)
    assert model.config._attn_implementation == "sdpa"
    generate(model, prompt)
    assert second.last_cache.packed_tokens > 0
    assert first.cache is None
    second.stop()
    assert untouched(model)
    first.stop()
    assert untouched(model)


def test_stopped_in_the_order_of_the_calls(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    first, second = compress(model, TURBOQUANT), compress(model, KIVI)
    first.stop()
    generate(model, prompt)
    assert second.last_cache.packed_tokens > 0
    second.stop()
    assert untouched(model)


def test_a_block_interrupts_what_was_begun_without_one(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    outer = compress(model, TURBOQUANT)
    with compress(model, KIVI) as block:
        generate(model, prompt)
        assert block.last_cache.compression.keys.method == "kivi"
    generate(model, prompt)
    assert outer.last_cache.packed_tokens > 0
    with compress(model, KIVI) as block:
        block.stop()
        generate(model, prompt)
        assert block.cache is None
    assert outer.last_cache.packed_tokens > 0
    outer.stop()
    assert untouched(model)


def test_without_a_block_inside_of_one(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """What a call within a block begins outlives the block, and its end leaves an open block alone."""
    with compress(model, TURBOQUANT) as block:
        compress(model, KIVI).stop()
        generate(model, prompt)
        assert block.last_cache.packed_tokens > 0
        lasting = compress(model, KIVI)
    generate(model, prompt)
    assert lasting.last_cache.packed_tokens > 0
    lasting.stop()
    assert untouched(model)


def test_a_block_between_two_lasting_calls(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """The end of a call within a block leaves what was on before the block, which is on again after it."""
    outer = compress(model, TURBOQUANT)
    with compress(model, KIVI):
        compress(model, KIVI).stop()
    generate(model, prompt)
    assert outer.last_cache.packed_tokens > 0
    outer.stop()
    assert untouched(model)


def test_a_handle_has_one_block(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    compression = compress(model, TURBOQUANT)
    with compression as block:
        assert block is compression
        with pytest.raises(RuntimeError, match="call compress"), compression:
            pass
        generate(model, prompt)
        assert block.last_cache.packed_tokens > 0
    assert untouched(model)
    with pytest.raises(RuntimeError, match="call compress"), compression:
        pass
    assert untouched(model)


def test_stop_in_another_thread(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """Another thread may stop, but not begin; the `generate` that runs meanwhile keeps its cache."""
    compression = compress(model, TURBOQUANT)
    assert isinstance(in_thread(lambda: compress(model, KIVI)), ValueError)

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        in_thread(compression.stop)
        return scores

    generate(model, prompt, logits_processor=[look])
    assert compression.last_cache.packed_tokens > 0
    assert compression.last_cache.get_seq_length() == 63
    assert untouched(model)
    assert in_thread(lambda: compress(model, KIVI).stop()) is None


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
