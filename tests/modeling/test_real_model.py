"""SmolLM2-135M generates from compressed caches: batch, left padding, fused and not fused."""

from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from transformers import DynamicCache

from kvcache_compress import CompressedCache, disable_fused_attention, enable_fused_attention, register_position_hooks
from kvcache_compress.modeling.loading import load_model

pytestmark = pytest.mark.slow
STORY = (
    "The keeper of the lighthouse wrote down the weather every evening: the wind, the height of the waves, and the "
    "ships that went by. On the first day of winter he counted three of them, and on the second day none at all. "
    "His sister, who lived in the village, sent him bread and letters by the boat that came on Mondays. In her last "
    "letter she asked him how many ships he had counted on the first day of winter."
)


@pytest.fixture(scope="module")
def real() -> Any:
    """The model and a batch of two prompts of different length, padded on the left."""
    torch.set_num_threads(1)
    model, tokenizer = load_model("smollm2-135m")
    chats = [[{"role": "user", "content": f"{STORY}{more}"}] for more in (" What did he answer?", f" {STORY} Why?")]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    assert (batch["attention_mask"] == 0).any()
    assert (batch["attention_mask"][:, -1] == 1).all()
    return model, tokenizer, dict(batch)


def test_fused_equals_not_fused(real: Any) -> None:
    """Tokens are the same, and logits of size 10 to 20 agree within 1e-2 (another order of float32 sums, 30 layers)."""
    model, _, batch = real
    outputs = []
    for fused in (True, False):
        hooks = register_position_hooks(model)
        if fused:
            enable_fused_attention(model)
        cache = CompressedCache(model.config, "turboquant-4bit")
        how = {"max_new_tokens": 36, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        outputs.append(model.generate(**batch, **with_cache(cache), **how))
        assert cache.packed_tokens > 64
        disable_fused_attention(model)
        hooks.remove()
    assert torch.equal(*(one.sequences for one in outputs))
    torch.testing.assert_close(*(torch.stack(one.logits) for one in outputs), atol=1e-2, rtol=0)


def test_logits_stay_close_to_a_full_cache(real: Any) -> None:
    """At 4 bits the next-token distribution of held-out steps barely changes; at 1 bit, the control, it does."""
    model, _, batch = real
    ids = batch["input_ids"][1:]
    prompt, rest = ids[:, :-16], ids[:, -16:]

    def next_tokens(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            model(input_ids=prompt, **with_cache(cache))
            return model(input_ids=rest, **with_cache(cache)).logits.log_softmax(-1)

    full = next_tokens(CompressedCache(model.config, {"keys": "none", "values": "none"}))
    divergence = {}
    for bits in (4, 1):
        side = {"method": "turboquant", "bits": bits}
        cache = CompressedCache(model.config, {"keys": side, "values": side})
        lossy = next_tokens(cache)
        assert cache.packed_tokens > 64
        divergence[bits] = (full.exp() * (full - lossy)).sum(-1).mean().item()
    assert divergence[4] < 0.02
    assert divergence[1] > 0.05


def test_padding_costs_a_row_nothing(real: Any) -> None:
    """The loss of a left-padded row is at most 1.1 times that of the row alone.

    Padding is a multiple of the 32 tokens that are packed together, so that the same tokens of the row are packed.
    """
    model, tokenizer, _ = real
    row = tokenizer(STORY * 4, return_tensors="pt").input_ids[:, :330]
    enable_fused_attention(model)

    def next_tokens(cache: Any, padding: int) -> torch.Tensor:
        ids = torch.nn.functional.pad(row, (padding, 0))
        mask = torch.nn.functional.pad(torch.ones_like(row), (padding, 0))
        positions, start = (mask.cumsum(-1) - 1).clamp_min(0), ids.shape[1] - 48
        logits = []
        with torch.no_grad():
            for at in (slice(0, start), *(slice(i, i + 16) for i in range(start, ids.shape[1], 16))):
                seen = {"attention_mask": mask[:, : at.stop], "position_ids": positions[:, at]}
                logits.append(model(ids[:, at], **with_cache(cache), **seen, logits_to_keep=16).logits)
        return torch.cat(logits, 1).log_softmax(-1)

    losses = []
    for padding in (0, 32, 288):
        cache = CompressedCache(model.config, "best-2bit")
        full, lossy = (next_tokens(one, padding) for one in (DynamicCache(config=model.config), cache))
        assert cache.packed_tokens > 64
        losses.append((full.exp() * (full - lossy)).sum(-1).mean().item())
    disable_fused_attention(model)
    assert max(losses) <= 1.1 * losses[0]
