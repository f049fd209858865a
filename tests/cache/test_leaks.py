"""Caches of finished calls leave nothing in memory."""

import gc
import weakref
from typing import Any

import pytest
import torch
from support.models.small_model import VOCAB, mixed_config
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from transformers import LlamaForCausalLM

from kvcache_compress import compress


def generations(model: LlamaForCausalLM, count: int, fused: bool) -> list[Any]:
    """Weak references to the caches of this many calls."""
    caches, ids = [], torch.randint(1, VOCAB, (2, 80), generator=torch.Generator().manual_seed(1))
    with compress(model, mixed_config(), fused=fused) as handle:
        for _ in range(count):
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
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
def test_generations_leave_nothing(model: LlamaForCausalLM, fused: bool) -> None:
    generations(model, 2, fused)
    before = live_bytes()
    gc.disable()
    try:
        caches = generations(model, 5, fused)
        assert len(caches) == 5
        assert not any(cache() for cache in caches)
    finally:
        gc.enable()
    assert live_bytes() == before
