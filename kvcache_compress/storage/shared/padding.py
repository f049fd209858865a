"""Record of a batch's left padding, shared by the layers of a cache."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kvcache_compress.codecs.mask import left_padding
from kvcache_compress.codecs.padding import LeftPadding

from ..checks import same_prompt

_warn_once = cache(logging.getLogger(__name__).warning)


class PaddingRecord:
    """Left padding of a cache's batch, shared by its layers.

    Attributes:
        rows: the padding, or None if there is none or it is unknown.
        awaited: True until a mask has shown where the padding of every row ends.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rows: LeftPadding | None = None
        self.awaited = True

    def receive(self, mask: Any, held: int) -> None:
        """Read the padding from the attention `mask` that the model received for the next tokens, in any form.

        Once the cache has `held` tokens, rows whose padding has ended keep it, and unknown padding stays unknown.
        """
        found = left_padding(mask)
        if held and (found is None or self.rows is None):
            self.awaited = False
        elif found is not None:
            tokens, total = found
            if held and self.rows is not None:
                tokens = torch.where(self.rows.tokens < held, self.rows.tokens, tokens)
            self.restore(tokens)
            self.awaited = self.rows is not None and self.rows.longest >= total
        elif self.awaited:
            self.restore(None)

    def truncate(self, tokens: int) -> None:
        """Await masks again if only padding is left of a row."""
        if not tokens:
            self.reset()
        elif self.rows is not None and tokens <= self.rows.longest:
            self.awaited = True

    def restore(self, tokens: torch.Tensor | None, device: torch.device | None = None) -> None:
        """Set the rows' padding, int64 `[B]` or `[1]` (None: no padding), moved to `device` if given."""
        longest = 0 if tokens is None else int(tokens.max())
        self.rows = LeftPadding(tokens.to(device), longest) if tokens is not None and longest else None
        self.awaited = False

    def begin(self, first: torch.Tensor) -> None:
        """Settle the padding when the first tokens `[B, H, T, D]` arrive without a mask for this batch."""
        if self.rows is not None and len(self.rows.tokens) not in (1, len(first)):
            self.restore(None)
        elif self.rows is None and self.awaited:
            self.awaited = False
            if not (first.is_meta or same_prompt(first)):
                _warn_once(
                    "the cache does not see the attention mask: left-padded rows of this batch, if any, lose their "
                    "sinks, which costs accuracy. Call enable_fused_attention(model), or "
                    "register_position_hooks(model), before the first prompt"
                )

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.rows is not None:
            self.rows = self.rows.changed(change)
