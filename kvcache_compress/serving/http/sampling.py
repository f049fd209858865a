"""Sampling settings of each request, applied by the engine's only logits processor."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

GREEDY = 1e-6
"""Temperatures below are 0."""
KEPT = 64
LIKELY = 1024
"""Tokens among which those of `top_p` are looked for first."""


@dataclass
class Sampling:
    """Settings of one request, with the names and meanings of OpenAI's interface.

    Attributes:
        temperature: 0 chooses the most probable token.
        top_p, top_k: 1 and 0 keep all tokens.
        seed: makes the tokens of this request reproducible.
        kept: where given, receives the model's log-probabilities of the first `KEPT` tokens, `[vocabulary]`.
        shared_tokens: prompt tokens found in shared pages, set by the engine.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    kept: list[torch.Tensor] | None = None
    shared_tokens: int = field(default=0, init=False)
    _generator: torch.Generator | None = field(default=None, init=False)

    def apply(self, scores: torch.Tensor, written: list[int]) -> None:
        """Change scores `[vocabulary]` in place so that the largest is the next token after those `written`."""
        if self.kept is not None and len(self.kept) < KEPT:
            self.kept.append(scores.log_softmax(-1))
        if self.logit_bias:
            biased = torch.tensor(list(self.logit_bias), device=scores.device)
            scores.index_add_(0, biased, torch.tensor(list(self.logit_bias.values()), device=scores.device))
        if written and (self.frequency_penalty or self.presence_penalty):
            counts = torch.bincount(torch.tensor(written, device=scores.device), minlength=len(scores))
            scores -= self.frequency_penalty * counts + self.presence_penalty * (counts > 0)
        if self.temperature < GREEDY:
            return
        if self._generator is None:  # not the global one, whose seed other requests set
            self._generator = torch.Generator(scores.device)
            self._generator.seed() if self.seed is None else self._generator.manual_seed(self.seed)
        probabilities, tokens = self._choices(scores / self.temperature)
        noise = torch.empty_like(probabilities).exponential_(generator=self._generator)
        chosen = (probabilities / noise).argmax()  # as `multinomial`, which would wait for a GPU
        chosen = chosen if tokens is None else tokens[chosen]
        scores.fill_(-torch.inf).index_fill_(0, chosen[None], 0)

    def _choices(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Probabilities of the tokens that `top_k` and `top_p` keep, and these tokens, or None for all."""
        if not self.top_k and self.top_p == 1:
            return logits.softmax(-1), None
        values, tokens = logits.topk(min(self.top_k or LIKELY, len(logits)))
        probabilities = values.softmax(-1) if self.top_k else (values - logits.logsumexp(-1)).exp()
        if not self.top_k and probabilities.sum() < self.top_p:
            values, tokens = logits.sort(descending=True)
            probabilities = values.softmax(-1)
        probabilities[probabilities.cumsum(-1) - probabilities >= self.top_p] = 0
        return probabilities, tokens


class Sampler(ContinuousBatchingLogitsProcessor):
    """Applies each request's `Sampling`, its argument `sampling`; without one, the most probable token is chosen."""

    supported_kwargs: ClassVar[dict[str, type]] = {"sampling": Sampling}
    ignored_kwargs = ()

    def __init__(self) -> None:
        self._requests: list[Any] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._requests = [one.state for one in requests_with_new_token]
        return torch.zeros(len(self._requests), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        for row, request in zip(scores, self._requests, strict=True):
            sampling = request.logit_processor_kwargs.get("sampling")
            if sampling is not None:
                sampling.apply(row, request.generated_tokens)
        return scores
