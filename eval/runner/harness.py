"""lm-eval's tasks through a cache under test; needs lm-eval.

`HFLM` scores a given answer in one pass over context and answer, in which no token attends to a cache. Here the cache
is filled with the context except its last token. That token and then the answer go through the cache, as in generation.

    lm = CachedLM(cache="turboquant-4bit", pretrained=model, tokenizer=tokenizer)
    simple_evaluate(lm, tasks=["hellaswag"])
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcache_compress.eval.caches.caches import CacheSpec
from kvcache_compress.eval.caches.prefill import prefill
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.tasks.samples import force_answer
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.validation import require

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
else:
    HFLM = require("lm_eval.models.huggingface", "lm-eval's tasks", "lm_eval", "clients").HFLM


class CachedLM(HFLM):
    """A model for lm-eval that scores and generates answers with their context in a cache under test.

    Rolling likelihoods (the perplexity of a text) go through the cache from a window's first token on.

    Args:
        cache: a name that `resolve_cache` takes, or a spec.
        options: options of `HFLM`, such as `pretrained`, `tokenizer` and `max_length`. Answers are scored one by one,
            whatever `batch_size` is.

    Attributes:
        packed_tokens: packed tokens after the context of each scored answer, or after each generated batch. 0 means
            that the context fits into the dense windows, so a short answer tests nothing. (A rolling window has a
            context of one token, and is packed as it goes.)

    Raises:
        ImportError: lm-eval (when the module is imported) or a peer's package is not installed.
        ValueError: There is no such cache.
    """

    def __init__(self, *, cache: str | CacheSpec, **options: Any) -> None:
        super().__init__(**options)
        self.spec = cache if isinstance(cache, CacheSpec) else resolve_cache(cache)
        self.packed_tokens: list[int] = []

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], *ignored: Any, **options: Any
    ) -> list[tuple[float, bool]]:
        """For each (text, context, answer): the sum of log-probabilities, and whether greedy decoding gives the answer.

        Answers to one context share its prefill. A context that is too long loses its first tokens, as in `HFLM`.
        """
        scored = []
        for context, same in itertools.groupby(requests, self._fitting_context):
            members, ids = list(same), torch.tensor([context])
            kept = max(1, len(context) - 1)
            shared = prefill(self.model, ids[:, :kept], ids[:, kept:])
            for text, *_, answer_ids in members:
                run = shared.run(self.spec)
                self.packed_tokens.append(run.measured.packed_tokens)
                logprobs, exact = force_answer(run, answer_ids, step=1)
                scored.append((logprobs.sum().item(), exact))
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, scored[-1])
        return scored

    def _fitting_context(self, request: tuple[Any, list[int], list[int]]) -> list[int]:
        """The context's last tokens, as many as leave room for the answer (whose last token is not fed)."""
        context, answer = request[1:]
        return context[-max(1, self.max_length + 1 - len(answer)) :]

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> Any:
        cache = self.spec.make(self.model)
        output = super()._model_generate(context, max_length, stop, **{cache_argument(): cache}, **options)
        self.packed_tokens.append(self.spec.measure(cache).packed_tokens)
        return output
