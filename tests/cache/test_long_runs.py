"""Long runs: lengths, masks and positions do not drift over thousands of tokens, and nothing leaks."""

import gc
import weakref
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import VOCAB, method_config, mixed_config
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache

from kvcache_compress import CompressedCache, compress, disable_fused_attention, enable_fused_attention
from kvcache_compress.storage.shared.rope_track import DTYPE
from kvcache_compress.storage.side import FLUSH_TOKENS

LAYERS = 2
PADDED = 7


@pytest.fixture
def prompt() -> dict[str, torch.Tensor]:
    """Two prompts of 40 tokens, the second with padding on its left."""
    ids = torch.randint(1, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :PADDED] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model: LlamaForCausalLM, cache: Cache, prompt: dict[str, Any], tokens: int) -> Any:
    """Generate, and return the sequences and, of each step, positions, visible tokens and the lengths before it."""
    steps: list[tuple[Any, ...]] = []

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions, mask = kwargs["position_ids"], kwargs["attention_mask"]
        shown = None if mask is None else (tuple(mask.shape), mask[:, 0, -1].sum(-1).tolist())
        lengths = [cache.get_seq_length(index) for index in range(LAYERS)]
        steps.append((positions.tolist(), shown, lengths, cache.get_mask_sizes(positions.shape[1], 0)))

    with model.model.layers[0].register_forward_pre_hook(record, with_kwargs=True):
        return model.generate(**prompt, **with_cache(cache), max_new_tokens=tokens, do_sample=False), steps


def test_1000_tokens(model: LlamaForCausalLM, prompt: dict[str, torch.Tensor]) -> None:
    """Each of 1,000 steps has the same positions, mask and lengths as with a dense cache."""
    tokens, dense = 1000, DynamicCache()
    prompt = {name: x[1:] for name, x in prompt.items()}
    _, expected = run(model, dense, prompt, tokens)
    enable_fused_attention(model)
    kivi = {side: method_config("kivi")[side] for side in ("keys", "values")}
    cache = CompressedCache(model.config, {**mixed_config(), "layers": [{"match": 1, **kivi}]})
    output, steps = run(model, cache, prompt, tokens)
    disable_fused_attention(model)
    assert output.shape == (1, 40 + tokens)
    assert len(steps) == tokens
    assert steps == expected
    assert cache.get_seq_length() == dense.get_seq_length() == 40 + tokens - 1
    assert cache.packed_tokens > tokens - 2 * FLUSH_TOKENS
    (track,) = cache.rope_tracks
    assert track.tokens == cache.get_seq_length()
    packed = cache.packed_tokens // track.stride * track.stride
    positions = (torch.arange(0, packed, track.stride) + track.first)[None] - PADDED
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions.clamp_min(0))
    stored = track.read(0, packed)
    for factors, exact in zip(stored, track.layout.factors((cos, sin)), strict=True):
        assert torch.equal(factors, exact.to(DTYPE))


def generations(model: LlamaForCausalLM, prompt: dict[str, Any], count: int, fused: bool) -> list[Any]:
    """Weak references to the caches of this many calls."""
    caches = []
    with compress(model, mixed_config(), fused=fused) as handle:
        for _ in range(count):
            model.generate(**prompt, max_new_tokens=3, do_sample=False)
            assert handle.last_cache.packed_tokens > 0
            caches.append(weakref.ref(handle.last_cache))
    return caches


_TRACED = (FakeTensor, FunctionalTensor)


def live_bytes() -> int:
    """Bytes of all tensors in the process, memory that several share counted once."""
    gc.collect()
    # `type(x)`, since a lazy object may import its module when asked for its class. Traced ones have no memory.
    kinds = ((x, type(x)) for x in gc.get_objects())
    tensors = [x for x, kind in kinds if issubclass(kind, torch.Tensor) and not issubclass(kind, _TRACED)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("fused", [False, True])
def test_20_generations_leave_nothing(model: LlamaForCausalLM, prompt: dict[str, torch.Tensor], fused: bool) -> None:
    prompt = {name: x.repeat(1, 2) for name, x in prompt.items()} | {"attention_mask": torch.ones(2, 80).long()}
    generations(model, prompt, 2, fused)
    before = live_bytes()
    gc.disable()
    try:
        caches = generations(model, prompt, 20, fused)
        assert len(caches) == 20
        assert not any(cache() for cache in caches)
    finally:
        gc.enable()
    assert live_bytes() == before
