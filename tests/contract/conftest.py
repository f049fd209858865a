"""Fixtures of the contract tests: a tiny model, and the configurations of `support/oracle.py` on it."""

from collections.abc import Iterator

import pytest
import torch
from support.models.small_model import small_model
from support.oracle import CASES, LAYERS, VOCAB, Case, Rotary, label, make_case
from transformers import LlamaForCausalLM

from kvcache_compress import disable_fused_attention, enable_fused_attention
from kvcache_compress.attention import interface


@pytest.fixture(autouse=True)
def _no_later_statistics(one_era: None) -> None:
    """Short prompts are packed, as the oracle does."""


@pytest.fixture(scope="session")
def tiny_model() -> LlamaForCausalLM:
    """3 layers, 6 query and 2 key/value heads of 32; weights so large that attention matters."""
    return small_model(LAYERS, vocab_size=VOCAB, hidden_size=192, num_attention_heads=6, initializer_range=0.05)


@pytest.fixture(scope="session")
def assistant() -> LlamaForCausalLM:
    """A smaller model with the same vocabulary, for assisted generation."""
    return small_model(1, seed=1, vocab_size=VOCAB, initializer_range=0.05)


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids `[2, 240]`."""
    return torch.randint(1, VOCAB, (2, 240), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="session")
def rotary(tiny_model: LlamaForCausalLM) -> Iterator[Rotary]:
    made = Rotary(tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "attention_forward", made.attention)
        yield made


@pytest.fixture(params=CASES, ids=label)
def case(request: pytest.FixtureRequest, tiny_model: LlamaForCausalLM, rotary: Rotary) -> Iterator[Case]:
    """Each kind of configuration with fused attention, and some without."""
    name, fused = request.param
    if fused:
        enable_fused_attention(tiny_model)
    with torch.no_grad():
        yield make_case(name, tiny_model, fused, rotary)
    disable_fused_attention(tiny_model)


@pytest.fixture(params=["turboquant-4", "no-statistics"])
def unfused(request: pytest.FixtureRequest, tiny_model: LlamaForCausalLM, rotary: Rotary) -> Iterator[Case]:
    """Configurations with fused attention off until the test switches it on."""
    yield make_case(request.param, tiny_model, False, rotary)
    disable_fused_attention(tiny_model)


@pytest.fixture(params=["growing", "static", "static_shapes"])
def capacity(request: pytest.FixtureRequest) -> int | None:
    """`max_cache_len`: None, or a static capacity with the steps of CPUs or of other devices."""
    if request.param == "static_shapes":
        request.getfixturevalue("static_shapes")
    return None if request.param == "growing" else 230
