"""Compare a share of the server's answers with a full cache."""

import logging
import queue
import threading

import torch
from transformers import PreTrainedModel

from .metrics import Metrics

logger = logging.getLogger(__name__)
WAITING = 2
"""Answers that may wait to be compared; more are left out."""


class Verifier:
    """Reads finished answers again, without a cache, in a thread of its own once `start` is called.

    Args:
        model: the model that serves.
        metrics: gets the sums.
        rate: share of the requests to compare, up to 1.

    Raises:
        ValueError: the model's RoPE changes with the longest text of a step, so the engine and this thread would set it
            for each other.
    """

    def __init__(self, model: PreTrainedModel, metrics: Metrics, rate: float) -> None:
        kinds = {str(getattr(module, "rope_type", "")) for module in model.modules()}  # by layer type in some
        if changing := [kind for kind in kinds if "dynamic" in kind or "longrope" in kind]:
            raise ValueError(f"verify={rate}: not with RoPE that changes with the text ({changing[0]}); leave it out")
        self.model, self.metrics, self.rate = model, metrics, rate
        self._answers: queue.Queue[tuple[list[int], list[int], list[torch.Tensor]]] = queue.Queue(WAITING)

    def start(self) -> None:
        threading.Thread(target=self._run, name="verifier", daemon=True).start()

    def submit(self, prompt: list[int], written: list[int], kept: list[torch.Tensor]) -> None:
        """Compare the tokens of `written` whose log-probabilities, `[vocabulary]` each, were kept."""
        try:
            self._answers.put_nowait((prompt, written, kept))
        except queue.Full:
            logger.info("an answer is not compared with a full cache: %d others wait", WAITING)

    def _run(self) -> None:
        while True:
            answer = self._answers.get()
            try:
                self.compare(*answer)
            except Exception:
                logger.exception("an answer could not be compared with a full cache")

    @torch.no_grad()
    def compare(self, prompt: list[int], written: list[int], kept: list[torch.Tensor]) -> float:
        """Count, and return the mean KL divergence of the compressed cache from the full one, in nats per token."""
        count = min(len(kept), len(written))
        ids = torch.tensor([[*prompt, *written[: count - 1]]], device=self.model.device)
        full = self.model(ids, use_cache=False, logits_to_keep=count).logits[0].float().log_softmax(-1)
        compressed = torch.stack(kept[:count]).float()
        divergence = (full.exp() * (full - compressed)).sum(-1).clamp(min=0).sum()
        equal = (full.argmax(-1) == compressed.argmax(-1)).sum()
        self.metrics.verified_tokens.inc(count)
        self.metrics.verified_equal.inc(float(equal))
        self.metrics.verified_kl.inc(float(divergence))
        return float(divergence) / count
