"""Gradients reach a step's own keys and values as through a dense cache; tokens of earlier steps are constants."""

import copy
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models import family_cases
from support.models.small_model import VOCAB, method_config, mixed_config, small_model
from transformers import Cache, DynamicCache, LlamaForCausalLM

from kvcache_compress import CompressedCache, enable_fused_attention

PROMPT = 60
CONFIGS: dict[str, dict[str, Any]] = {
    "turboquant": method_config("turboquant"),
    "kivi": method_config("kivi"),
    "mixed": mixed_config(),
    "one-none": {**method_config("turboquant"), "layers": [{"match": 0, "method": "none"}]},
}


def tokens(count: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, (2, count), generator=torch.Generator().manual_seed(1))


def gradients(model: Any, step: Any, cache: Cache, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the language model's loss over `ids`, by weight."""
    model.zero_grad()
    step(input_ids=ids, **with_cache(cache), labels=ids).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def expected_gradients(model: Any, cache: CompressedCache, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients through a dense cache that holds the decoded tokens of earlier steps.

    A step of a few tokens attends to the cache after tokens that leave the window are packed, a prompt chunk to the
    cache before that.
    """
    seen = copy.deepcopy(cache)
    length, few = int(seen.get_seq_length()), ids.shape[1] <= 16
    if few:
        with torch.no_grad():
            model(input_ids=ids, **with_cache(seen))
    dense = DynamicCache()
    for index, layer in enumerate(seen.layers if length else ()):
        dense.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
    return gradients(model, model, dense, ids)


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert all(grad is not None for grad in found.values())
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-3)


@pytest.fixture(params=[False, True], ids=["decoded", "fused"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    model = small_model()
    if request.param:
        enable_fused_attention(model)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_of_steps(model: Any, name: str, capacity: int | None) -> None:
    """Steps of one, two and a few tokens, and a chunk, have gradients after a prompt without."""
    ids = tokens(PROMPT + 28)
    cache = CompressedCache(model.config, {**CONFIGS[name], "max_cache_len": capacity})
    # Transformers' static layers cannot be used outside the inference mode they were made in.
    with torch.no_grad() if "none" in name else torch.inference_mode():
        model(input_ids=ids[:, :PROMPT], **with_cache(cache))
    assert cache.packed_tokens > 0
    # Transformers' own layers keep the graph of a step, which allows one backward pass only.
    sizes = [28] if "none" in name else [2, 6, 20]
    for part in ids[:, PROMPT:].split(sizes, 1):
        expected = expected_gradients(model, cache, part)
        check(gradients(model, model, cache, part), expected)


@pytest.mark.parametrize("sizes", [[3, 1], [5, 40, 5]], ids=str)
def test_from_the_first_token_on(model: Any, sizes: list[int], capacity: int | None) -> None:
    """All parts of a prompt have gradients: the first, those that fill the sinks, and those before any packing."""
    ids = tokens(sum(sizes))
    cache = CompressedCache(model.config, {**CONFIGS["turboquant"], "max_cache_len": capacity})
    for part in ids.split(sizes, 1):
        expected = expected_gradients(model, cache, part)
        check(gradients(model, model, cache, part), expected)
        assert not any(
            tensor.requires_grad for layer in cache.layers for tensor in layer.sides["keys"].tensors().values()
        )


@pytest.mark.parametrize(("model", "capacity"), [(True, "growing")], indirect=True)
def test_compiled_code_has_none(model: Any, capacity: int | None) -> None:
    ids = tokens(PROMPT + 1)
    cache = CompressedCache(model.config, {**CONFIGS["turboquant"], "max_cache_len": capacity})
    with torch.no_grad():
        model(input_ids=ids[:, :PROMPT], **with_cache(cache))
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="compiled models cannot backpropagate"):
        compiled(input_ids=ids[:, PROMPT:], **with_cache(cache))
    torch._dynamo.reset()
    assert int(cache.get_seq_length()) == PROMPT
    with torch.no_grad():
        compiled(input_ids=ids[:, PROMPT:], **with_cache(cache))
    torch._dynamo.reset()
    assert int(cache.get_seq_length()) == PROMPT + 1


@pytest.mark.parametrize("weight", ["self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.sinks"])
def test_of_one_weight(weight: str) -> None:
    """Keys, values and learned sink logits have gradients even if the queries have none."""
    model = family_cases.build("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"])
    enable_fused_attention(model)
    model.requires_grad_(False)
    name = f"model.layers.0.{weight}"
    model.get_parameter(name).requires_grad_(True)
    ids = tokens(PROMPT + 1)
    cache = CompressedCache(model.config, CONFIGS["turboquant"])
    with torch.no_grad():
        model(input_ids=ids[:, :PROMPT], **with_cache(cache))
    expected = expected_gradients(model, cache, ids[:, PROMPT:])
    found = gradients(model, model, cache, ids[:, PROMPT:])
    assert [other for other, grad in found.items() if grad is not None] == [name]
    torch.testing.assert_close(found[name], expected[name], atol=2e-5, rtol=1e-3)
