"""Bad input at the public boundary: `ValueError`s with clear messages, which leave caches unchanged."""

import copy
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    T5Config,
)

from kvcache_compress import (
    CompressedCache,
    KIVICache,
    TurboQuantCache,
    compress,
    disable_fused_attention,
    enable_fused_attention,
)
from kvcache_compress.backends import triton as backend
from kvcache_compress.config import get_method, register_method
from kvcache_compress.storage.packed_store import TailBuffer

TURBOQUANT: dict[str, Any] = {"keys": {"method": "turboquant"}, "values": {"method": "turboquant"}}
SMALL: dict[str, Any] = {"sink_tokens": 4, "recent_tokens": 8}


def llama(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    return LlamaConfig(**{**sizes, **changes})


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama()).eval()


# Models that cannot be compressed


def test_encoder_decoder() -> None:
    with pytest.raises(ValueError, match="t5 is an encoder-decoder model"):
        TurboQuantCache(T5Config())


def test_attention_free() -> None:
    with pytest.raises(ValueError, match=r"mamba has no full-attention layer to compress .*no attention at all"):
        TurboQuantCache(MambaConfig(num_hidden_layers=2))


def test_all_sliding() -> None:
    with pytest.raises(ValueError, match=r"mistral has no full-attention layer to compress .*[sS]liding"):
        TurboQuantCache(MistralConfig(sliding_window=16, num_hidden_layers=2))


@pytest.mark.parametrize("head_dim", [20, 12, 8])
def test_head_dim_that_turboquant_cannot_take(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim={head_dim} for turboquant: allowed multiples of 8 from 16"):
        TurboQuantCache(llama(head_dim=head_dim))


def test_head_dim_that_kivi_cannot_take() -> None:
    with pytest.raises(ValueError, match="group_size=32 for kivi values: allowed divisors of the head dimension 80"):
        KIVICache(llama(head_dim=80))
    with pytest.raises(ValueError, match="head_dim=20 for kivi: allowed multiples of 8"):
        KIVICache(llama(head_dim=20))
    KIVICache(llama(head_dim=80), group_size=16)
    CompressedCache(llama(head_dim=80), {"keys": "kivi", "values": "none"})


def test_layers_that_no_method_touches_take_any_head_dim() -> None:
    CompressedCache(llama(head_dim=20), {"keys": "none", "values": "none"})


# Attention that cannot be switched


class BuiltIn(LlamaForCausalLM):
    """A model whose class has its attention built in, as Transformers reports it."""

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False


@pytest.fixture
def stubborn(model: LlamaForCausalLM) -> LlamaForCausalLM:
    return BuiltIn(model.config).eval()


def test_attention_that_cannot_be_switched(stubborn: LlamaForCausalLM) -> None:
    before = stubborn.config._attn_implementation
    with pytest.raises(ValueError, match="BuiltIn does not take its attention from"):
        enable_fused_attention(stubborn)
    with pytest.raises(ValueError, match="does not take its attention"), compress(stubborn, TURBOQUANT, fused=True):
        pass
    assert stubborn.config._attn_implementation == before
    assert "generate" not in vars(stubborn)


def test_compress_works_without_the_switch(stubborn: LlamaForCausalLM) -> None:
    """`compress` decodes at each step if attention cannot be switched, with the same tokens as an unfused cache."""
    prompt = torch.arange(1, 61)[None]
    cache = CompressedCache(stubborn.config, TURBOQUANT | SMALL)
    expected = stubborn.generate(prompt, **with_cache(cache), max_new_tokens=6, do_sample=False)
    with compress(stubborn, TURBOQUANT | SMALL) as handle:
        got = stubborn.generate(prompt, max_new_tokens=6, do_sample=False)
    assert handle.last_cache.packed_tokens > 0
    assert torch.equal(got, expected)


class HandMade(PreTrainedModel):
    """A model defined outside of Transformers, with its own attention."""

    config_class = LlamaConfig

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False


def test_other_models() -> None:
    with pytest.raises(ValueError, match="HandMade does not take its attention"):
        enable_fused_attention(HandMade(llama()))
    for function in (enable_fused_attention, disable_fused_attention):
        with pytest.raises(ValueError, match="a transformers PreTrainedModel, or a PeftModel of one"):
            function(torch.nn.Linear(2, 2))


# Backends


def test_triton_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match='backend="triton" is unavailable: triton is not installed'):
        TurboQuantCache(llama(), backend="triton")
    TurboQuantCache(llama(), backend="auto")


def test_triton_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match='backend="triton" is unavailable: there is no GPU'):
        TurboQuantCache(llama(), backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    TurboQuantCache(llama(), backend="triton")


def test_triton_for_tensors_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is refused for tensors on the CPU, even if there is a GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cache = TurboQuantCache(llama(), backend="triton")
    x = torch.randn(1, 2, 20, 16)
    with pytest.raises(ValueError, match=r"unavailable for tensors on cpu; use backend=\"auto\""):
        cache.update(x, x, 0)
    assert cache.get_seq_length() == 0


# Options that exclude each other


def test_center_for_values() -> None:
    """Centring of values is refused when the cache is made, not at the first token."""
    config = {**TURBOQUANT, "values": {"method": "turboquant", "center": "on"}}
    with pytest.raises(ValueError, match="center='on' for values of turboquant: allowed 'off'"):
        CompressedCache(llama(), config)


def test_scalar_with_prod() -> None:
    with pytest.raises(ValueError, match="scalar='unbiased' for turboquant with estimator 'prod': allowed 'norm'"):
        TurboQuantCache(llama(), estimator="prod", scalar="unbiased")
    TurboQuantCache(llama(), estimator="prod", scalar="norm")


def test_register_method_refuses() -> None:
    codec = get_method("kivi")
    for name in ("", "Kivi", "ki vi"):
        with pytest.raises(ValueError, match="a method's name is lower-case"):
            register_method(type("Codec2", (codec,), {"name": name}))
    with pytest.raises(ValueError, match="'kivi' is already registered by KIVICodec"):
        register_method(type("Codec2", (codec,), {"name": "kivi"}))
    assert register_method(codec) is codec


# Tensors that do not belong in a cache


def states(tokens: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 2, tokens, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("method", ["turboquant", "kivi"])
def test_non_finite_prompt(method: str, side: str, bad: float) -> None:
    """A chunk with NaN is refused, the first or a later one; the cache stays as it was and can be used."""
    options = {
        "keys": {"method": method},
        "values": {"method": method, "group_size": 16} if method == "kivi" else method,
    }
    cache = CompressedCache(llama(), {**options, **SMALL})
    broken = states(150, seed=1)
    broken[1, 0, 10, 3] = bad
    pair = (broken, states(150)) if side == "keys" else (states(150), broken)
    message = f"{side} of layer 0 hold NaN, infinity"
    with pytest.raises(ValueError, match=message):
        cache.update(*pair, 0)
    assert cache.get_seq_length() == cache.packed_tokens == 0
    assert not any(state.prepared for state in cache.layers[0].sides.values()), "no statistics of refused tokens"
    twin = copy.deepcopy(cache)
    twin.update(states(60, batch=1), states(60, batch=1), 0)
    assert twin.packed_tokens > 0, "not even the refused batch's size is kept"
    cache.update(states(60), states(60, seed=2), 0)
    before = cache.layers[0].keys.clone(), cache.layers[0].values.clone()
    packed = cache.packed_tokens
    assert packed > 0
    with pytest.raises(ValueError, match=message):
        cache.update(*pair, 0)
    assert (cache.get_seq_length(), cache.packed_tokens) == (60, packed)
    assert torch.equal(cache.layers[0].keys, before[0])
    assert torch.equal(cache.layers[0].values, before[1])
    cache.update(states(40), states(40), 0)
    assert cache.get_seq_length() == 100
    assert cache.layers[0].keys.isfinite().all()


def test_non_finite_chunk_with_sinks_of_a_padded_row() -> None:
    """A refused chunk leaves the sinks of a row as they were, whose place its tokens would have taken."""
    cache = CompressedCache(llama(), {**TURBOQUANT, **SMALL})
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[1, :18] = 0
    cache.receive_mask(mask[:, :20])
    cache.update(states(20), states(20, seed=1), 0)
    before = cache.layers[0].keys.clone()
    with pytest.raises(ValueError, match="keys of layer 0 hold NaN"):
        cache.update(torch.full_like(states(180), torch.nan), states(180), 0)
    assert torch.equal(cache.layers[0].keys, before)
    cache.update(states(180, seed=2), states(180, seed=3), 0)
    assert cache.packed_tokens > 0
    assert cache.layers[0].keys.isfinite().all()
    sinks = torch.cat([before[1, :, 18:], states(180, seed=2)[1, :, :2]], 1)
    assert torch.equal(cache.layers[0].keys[1, :, 18:22], sinks)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_non_finite_step(side: str) -> None:
    """A NaN in a step stays in the tail; the flush that would pack it is refused until a crop removes it."""
    cache = CompressedCache(llama(), {**TURBOQUANT, **SMALL})
    cache.update(states(60), states(60), 0)
    broken = states(1)
    broken[0, 1, 0, 0] = torch.nan
    cache.update(*((broken, states(1)) if side == "keys" else (states(1), broken)), 0)
    at, packed = cache.get_seq_length(), cache.packed_tokens
    while (cache.get_seq_length() - 4 - packed) - 8 < 32:
        cache.update(states(1), states(1), 0)
    length = cache.get_seq_length()
    with pytest.raises(ValueError, match=f"{side} of layer 0"):
        cache.update(states(1), states(1), 0)
    assert (cache.get_seq_length(), cache.packed_tokens) == (length, packed)
    cache.crop(-(length - at + 1))
    for _ in range(60):
        cache.update(states(1), states(1), 0)
    assert cache.packed_tokens > packed
    assert cache.layers[0].keys.isfinite().all()
    assert cache.layers[0].values.isfinite().all()


def test_non_finite_token_in_the_window_does_not_spoil_the_statistics() -> None:
    """Means and outlier channels, measured on the first prompt, leave out a NaN in its recent window."""
    for options in ({"center": "on"}, {"center": "auto"}, {"bits": 3.5}):
        config = {"keys": {"method": "turboquant", **options}, "values": "turboquant", **SMALL}
        for bad in (torch.nan, torch.inf):
            cache = CompressedCache(llama(), config)
            broken = states(60) + 3
            broken[0, 0, -1, 0] = bad
            try:
                cache.update(broken, states(60), 0)
            except ValueError:
                assert cache.get_seq_length() == 0
                continue
            assert cache.packed_tokens > 0
            cache.crop(-1)
            assert cache.layers[0].keys.isfinite().all(), options


def test_generation_goes_on_after_a_refused_prompt(model: LlamaForCausalLM) -> None:
    """Weights that overflow raise in the first forward pass; the cache can then be used as if it were new."""
    prompt = torch.arange(1, 61)[None]
    cache, new = (CompressedCache(model.config, TURBOQUANT | SMALL) for _ in range(2))
    weight = model.model.layers[0].self_attn.k_proj.weight
    saved = weight.detach().clone()
    weight.data[3] = torch.inf
    with pytest.raises(ValueError, match="keys of layer 0 hold NaN, infinity"):
        model.generate(prompt, **with_cache(cache), max_new_tokens=6, do_sample=False)
    assert cache.get_seq_length() == 0
    weight.data.copy_(saved)
    got = model.generate(prompt, **with_cache(cache), max_new_tokens=6, do_sample=False)
    assert torch.equal(got, model.generate(prompt, **with_cache(new), max_new_tokens=6, do_sample=False))
    assert cache.packed_tokens > 0


def test_batch_that_changes_size() -> None:
    cache = CompressedCache(llama(), {**TURBOQUANT, **SMALL})
    cache.update(states(60), states(60), 0)
    for tokens in (1, 40):
        with pytest.raises(ValueError, match="batch of 3 for a cache that holds 2"):
            cache.update(states(tokens, batch=3), states(tokens, batch=3), 0)
        assert (cache.get_seq_length(), cache.packed_tokens) == (60, 32)
    cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ValueError, match="batch of 2 for a cache that holds 1"):
        cache.update(states(1), states(1), 0)
    cache.update(states(1, batch=1), states(1, batch=1), 0)
    cache.reset()
    cache.update(states(60, batch=3), states(60, batch=3), 0)
    assert cache.packed_tokens > 0


@pytest.mark.parametrize(
    ("keys", "values"),
    [((2, 2, 1, 32), (2, 2, 2, 32)), ((2, 3, 1, 32), (2, 3, 1, 32)), ((2, 2, 32), (2, 2, 32))],
    ids=["tokens", "heads", "dimensions"],
)
def test_shapes_that_do_not_fit(keys: tuple[int, ...], values: tuple[int, ...]) -> None:
    cache = CompressedCache(llama(), {**TURBOQUANT, **SMALL})
    cache.update(states(60), states(60), 0)
    with pytest.raises(ValueError, match="layer 0: allowed"):
        cache.update(torch.zeros(keys), torch.zeros(values), 0)
    assert (cache.get_seq_length(), cache.packed_tokens) == (60, 32)


def test_vectors_too_long_for_16_bits_are_refused() -> None:
    cache = CompressedCache(llama(), {**TURBOQUANT, **SMALL})
    with pytest.raises(ValueError, match="vectors longer than 65504"):
        cache.update(states(60) * 1e5, states(60), 0)


def test_options_that_belong_elsewhere() -> None:
    with pytest.raises(ValueError, match="'method' is no option here"):
        TurboQuantCache(llama(), method="kivi")
    with pytest.raises(ValueError, match="seed"):
        TurboQuantCache(llama(), seed=2**62)
    with pytest.raises(ValueError, match=r"model\.config"):
        TurboQuantCache("a model")
    with pytest.raises(ValueError, match="bits=7") as error:
        TurboQuantCache(llama(), bits=7)
    assert str(error.value).count("bits=7") == 1


def test_centring_is_for_keys_alone() -> None:
    cache = TurboQuantCache(llama(), center="on", **SMALL)
    cache.update(states(60) + 1, states(60), 0)
    assert cache.layers[0].sides["keys"].codec.mean is not None
    assert cache.layers[0].sides["values"].codec.mean is None


def test_crop_to_a_length_as_early_versions_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompressedCache(llama(), {**TURBOQUANT, **SMALL})
    cache.update(states(60), states(60), 0)
    monkeypatch.setattr("kvcache_compress.storage.checks.CROPS_TO_LENGTH", True)
    cache.layers[0].crop(50)
    assert (cache.get_seq_length(), cache.packed_tokens) == (50, 32)
    cache.layers[0].crop(80)
    assert cache.get_seq_length() == 50


def test_no_memory_for_one_side_leaves_both_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompressedCache(llama(), {**TURBOQUANT, **SMALL, "quantize_generated": False, "backend": "torch"})
    layer, resize = cache.layers[0], TailBuffer._resize
    cache.update(torch.randn(1, 2, 40, 64), torch.randn(1, 2, 40, 64), 0)
    values = layer.sides["values"].tail

    def refuse(tail: TailBuffer, capacity: int) -> None:
        if tail is values:
            raise torch.OutOfMemoryError("no room")
        resize(tail, capacity)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return cache.update(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64), 0)

    while values.tokens < values.buffer.shape[2]:
        step()
    monkeypatch.setattr(TailBuffer, "_resize", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        step()
    monkeypatch.undo()
    tokens = cache.get_seq_length()
    keys, stored = step()
    assert keys.shape[2] == stored.shape[2] == tokens + 1


@pytest.mark.parametrize("first", ["sliding_attention", "linear_attention"])
def test_a_refused_step_says_why_beside_layers_that_cannot_step_back(first: str) -> None:
    """The error names the refused tokens even if other layers cannot step back: full sliding and linear ones."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    kinds = [first, "full_attention", "full_attention"]
    config = {"sliding_attention": Gemma3TextConfig, "linear_attention": Qwen3NextConfig}[first](
        head_dim=32, sliding_window=16, layer_types=kinds, vocab_size=64, **sizes
    )
    cache = CompressedCache(config, {**TURBOQUANT, "sink_tokens": 0, "recent_tokens": 0})
    good = torch.randn(1, 2, 160, 32)
    attending = [index for index, kind in enumerate(kinds) if kind != "linear_attention"]
    for index in attending:
        cache.update(good, good, index)
    assert cache.packed_tokens == 160
    for index in attending[:-1]:
        cache.update(good, good, index)
    with pytest.raises(ValueError, match=r"keys of layer 2 hold NaN.*cannot be packed"):
        cache.update(good.clone().fill_(torch.nan), good, 2)
