"""Demonstration: a question about a long text, answered from a full and from compressed caches."""

import time
from collections.abc import Sequence

import torch
from transformers import Cache, PreTrainedTokenizerBase, TextStreamer

from kvcache_compress.attention.interface import enable_fused_attention
from kvcache_compress.eval.caches.caches import full_cache, preset_cache
from kvcache_compress.eval.runner.progress import ProgressLine
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT, Perplexity
from kvcache_compress.eval.tasks.samples import too_long
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

FULL = "full cache"
PASSAGE_TOKENS = 4096
WARM_TOKENS = 400
"""Prompt before anything is timed, long enough for statistics."""
NEEDLE = "\n\nThe pass key is 71839. Remember it: 71839 is the pass key.\n\n"
QUESTION = "What is the pass key? The pass key is"


class Demo:
    """A model and a prompt, for one `answer` from each cache; the arguments are options of `kvcache-compress demo`."""

    def __init__(self, model_name: str, presets: Sequence[str], new_tokens: int) -> None:
        self._specs = {FULL: full_cache(), **{name: preset_cache(name) for name in presets}}
        self.names, self._new_tokens = list(self._specs), new_tokens
        self._model, self._tokenizer = load_model(model_name)
        for spec in self._specs.values():
            spec.make(self._model)  # refuses models without attention before anything runs
        enable_fused_attention(self._model)
        self._prompt = _prompt(self._tokenizer, DEFAULT_TEXT.read_text(encoding="utf-8"))
        self.prompt_tokens = self._prompt.shape[1]
        if problem := too_long(self._model, self.prompt_tokens + new_tokens, "the text and the question"):
            raise ValueError(problem)
        for name in self.names:  # compiles what needs to be compiled, before anything is timed
            self._generate(self._prompt[:, :WARM_TOKENS], self._specs[name].make(self._model), 2, None)

    def answer(self, name: str) -> tuple[float, float, int]:
        """Answer the question from one cache, and print the text as it is generated.

        Returns seconds until the first token, seconds per further token, and bytes that the cache holds.
        """
        cache, stream = self._specs[name].make(self._model), _Stream(self._tokenizer)
        self._generate(self._prompt, cache, self._new_tokens, stream)
        start, first, *rest = stream.times
        held = self._specs[name].measure(cache).total_bytes
        return first - start, (rest[-1] - first) / len(rest) if rest else 0.0, held

    def losses(self) -> dict[str, tuple[float, float]]:
        """Mean KL divergence and share of equal most likely tokens of each compressed cache, on the same text."""
        runner = Runner(self._model, self._tokenizer, on_progress=ProgressLine())
        cells = runner.run("perplexity", Perplexity(windows=1, scored=128), list(self._specs.values()))
        for cell in cells:
            if cell.error is not None:
                raise ValueError(f"{cell.cache['name']}: {cell.error}")
        return {cell.cache["name"]: (cell.scores["kl"], cell.scores["top1"]) for cell in cells[1:]}

    def _generate(self, prompt: torch.Tensor, cache: Cache, new_tokens: int, stream: TextStreamer | None) -> None:
        """Generate greedily."""
        self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{cache_argument(): cache},
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=stream,
        )


class _Stream(TextStreamer):
    """Prints new tokens as they come, and notes when."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times = [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)


def _prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids `[1, T]` of a passage with a pass key in its middle, and a question for it."""
    ids = tokenizer(text, add_special_tokens=False).input_ids[:PASSAGE_TOKENS]
    before, after = (tokenizer.decode(part) for part in (ids[: len(ids) // 2], ids[len(ids) // 2 :]))
    return tokenizer(f"{before}{NEEDLE}{after}\n\n{QUESTION}", return_tensors="pt").input_ids
