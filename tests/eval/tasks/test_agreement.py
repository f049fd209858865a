"""Agreement: both figures by hand from plain generation, and the full cache's own."""

from pathlib import Path

import pytest
import torch
from support.cache_name import with_cache
from support.models.toy_tokenizers import Letters
from transformers import DynamicCache, LlamaForCausalLM

from kvcache_compress import CompressedCache
from kvcache_compress.eval.caches.caches import full_cache, preset_cache
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.tasks.perplexity import Agreement

CONFIG = {side: {"method": "turboquant", "bits": 1} for side in ("keys", "values")} | {
    "sink_tokens": 2,
    "recent_tokens": 4,
}
TOKENS = 24


@torch.no_grad()
def written(model: LlamaForCausalLM, prompt: torch.Tensor, cache: object) -> list[int]:
    ids, step = [], prompt
    for _ in range(TOKENS):
        logits = model(step, **with_cache(cache)).logits[0, -1]
        ids.append(int(logits.argmax()))
        step = torch.tensor([ids[-1:]])
    return ids


@torch.no_grad()
def test_figures_by_hand(model: LlamaForCausalLM, tmp_path: Path) -> None:
    text = tmp_path / "letters.txt"
    text.write_text("".join(chr(97 + (7 * number * number + number // 5) % 26) for number in range(600)))
    benchmark = Agreement(texts=(text,), prefix=100, scored=TOKENS, windows=3, step=8)
    full, lossy = Runner(model, Letters()).run("agreement", benchmark, [full_cache(), preset_cache(CONFIG, name="low")])
    assert full.scores["same"] == full.scores["same_25"] == TOKENS
    assert full.scores["all"] == 1
    same, logprobs = [], []
    for sample in benchmark.samples(model, Letters()):
        first, second = (
            written(model, sample.prompt, cache)
            for cache in (DynamicCache(config=model.config), CompressedCache(model.config, CONFIG))
        )
        same.append(next((at for at, pair in enumerate(zip(first, second, strict=True)) if len({*pair}) > 1), TOKENS))
        ids = torch.cat([sample.prompt, torch.tensor([second])], 1)
        log_p = model(ids).logits[0, -TOKENS - 1 : -1].log_softmax(-1)
        logprobs.append(log_p.gather(-1, torch.tensor(second)[:, None]).mean().item())
    assert [record["same"] for record in lossy.records] == same
    assert min(same) < TOKENS
    assert lossy.scores["same"] == sorted(same)[1]
    assert lossy.scores["logprob"] == pytest.approx(sum(logprobs) / 3, abs=1e-4)
    assert lossy.packed_tokens["least"] > 0
