"""The cos and sin that the model rotated each cached token by, kept once for all layers of a cache.

With them left padding, partial rotary and scaled RoPE are right for codecs that encode keys before RoPE.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvcache_compress.codecs.layout import grown_capacity
from kvcache_compress.modeling.rope import Rope, RopeLayout, rotary_embedding

logger = logging.getLogger(__name__)
DTYPE = torch.float16
"""In which cos and sin are kept per token."""


@cache
def _warn_of_positions() -> None:
    logger.warning(
        "the model does not hand over its position embeddings, so commvq encodes left-padded rows as if at other "
        "positions, and less exactly: call enable_fused_attention(model), or register_position_hooks(model)"
    )


class RopeTrack:
    """cos and sin of every cached token, `[B, capacity, 2 * rotary]`, shared by the layers of a cache.

    An attention module with fused attention hands over the position embeddings of its step (`inputs`). Without them
    the model's own embedding is asked for the tokens' indices in the cache, which differ from the positions of
    left-padded rows: keys then come back as exactly, but are encoded as if at another position.
    A model on several devices has a copy on each (`at`); what concerns all of them is asked of the first.
    """

    def __init__(self, config: PreTrainedConfig, layout: RopeLayout) -> None:
        self.layout = layout
        self.inputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._config = config
        self._embed: Callable[..., tuple[Any, Any]] | None = None
        self.leader: int | None = None
        """The layer that writes; the others on its device find the factors there."""
        self._device: torch.device | None = None
        self._first: RopeTrack | None = None
        self._others: dict[torch.device, RopeTrack] = {}
        self._forget()

    def _forget(self) -> None:
        self.tokens = 0
        self.is_static = False
        self.buffer = torch.empty(0, 0, 2 * self.layout.rotary, dtype=DTYPE)

    def at(self, device: torch.device, layer: int) -> RopeTrack:
        """The track for a layer on `device`: every device of a model has its own copy, led by its first layer."""
        if self._first is not None:
            return self._first.at(device, layer)
        if self._device is None:
            self._device, self.leader = device, layer
        if device == self._device:
            return self
        if device not in self._others:
            other = copy.copy(self)
            other.buffer = self.buffer.to(device)
            other.leader, other._first = layer, self
            self._others[device] = other
        other = self._others[device]
        if self.inputs is not None:
            other.inputs, self.inputs = self.inputs, None
        return other

    def _copies(self) -> list[RopeTrack]:
        return [self, *self._others.values()]

    def reset(self) -> None:
        """Empties the track on every device."""
        for track in self._copies():
            track._forget()

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """What was handed over for this step; the next step has its own."""
        inputs, self.inputs = self.inputs, None
        return inputs or (None, None)

    def extend(self, start: int, states: torch.Tensor, again: bool = False) -> None:
        """Takes up the step's tokens, keys `[B, H, T, D]` from index `start` on.

        `again` is for the layers after the first, which find them there.
        """
        batch, _, count, _ = states.shape
        inputs, self.inputs = self.inputs, None
        if again and start + count == self.tokens:
            return
        if inputs is None or inputs[0].shape[1] != count:
            inputs = self._by_index(torch.arange(start, start + count), states)
        factors = torch.cat(self.layout.factors(inputs), -1)
        if start + count > self.buffer.shape[1] or batch != self.buffer.shape[0]:
            grown = self.buffer.new_empty(
                batch, grown_capacity(start + count, 1), self.buffer.shape[2], device=states.device
            )
            if start:
                grown[:, :start] = self.buffer[:, :start]
            self.buffer = grown
        elif self.buffer.is_inference() and not torch.is_inference_mode_enabled():
            self.buffer = self.buffer.clone()
        self.buffer[:, start : start + count] = factors.to(DTYPE)
        self.tokens = start + count

    def make_static(self, tokens: int, states: torch.Tensor) -> None:
        """Room for `tokens` of the batch of `states` from now on; unused room is zero."""
        self.is_static = True
        if self.buffer.shape[:2] != (states.shape[0], tokens):
            self.buffer = self.buffer.new_zeros(states.shape[0], tokens, self.buffer.shape[2], device=states.device)

    def write(self, positions: torch.Tensor, states: torch.Tensor, again: bool = False) -> None:
        """`extend` within reserved room for tokens at `positions` `[n]`, without counting them."""
        cos, sin = self.take()
        if again:
            return
        if cos is None or sin is None or cos.shape[1] != len(positions):
            cos, sin = self._by_index(positions, states)
        factors = torch.cat(self.layout.factors((cos, sin)), -1).to(DTYPE).expand(self.buffer.shape[0], -1, -1)
        self.buffer.index_copy_(1, positions.clamp(max=self.buffer.shape[1] - 1), factors)

    def gather(self, positions: torch.Tensor) -> Rope:
        """cos and sin `[B, n, rotary]` of the tokens at `positions` `[n]`, within reserved room."""
        cos, sin = self.buffer.index_select(1, positions.clamp(max=self.buffer.shape[1] - 1)).chunk(2, -1)
        return cos, sin

    def _by_index(self, positions: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if states.shape[0] > 1:
            _warn_of_positions()
        if self._embed is None:
            self._embed = rotary_embedding(self._config)
        if self._embed is None:
            raise RuntimeError("a RopeTrack needs a model with RoPE")
        cos, sin = self._embed(torch.zeros(1, dtype=torch.float32, device=positions.device), positions.unsqueeze(0))
        return cos.to(states.device), sin.to(states.device)

    def read(self, start: int, stop: int) -> Rope:
        """cos and sin `[B, stop - start, rotary]` of tokens `[start, stop)`."""
        cos, sin = self.buffer[:, start:stop].chunk(2, -1)
        return cos, sin

    def bytes_used(self) -> int:
        return sum(track.buffer[:, : track.tokens].nbytes for track in self._copies())

    def bytes_allocated(self) -> int:
        return sum(track.buffer.nbytes for track in self._copies())

    def truncate(self, tokens: int) -> None:
        """Keeps at most the first `tokens` tokens, on every device."""
        for track in self._copies():
            track.tokens = min(track.tokens, tokens)

    def restore(self, factors: torch.Tensor) -> None:
        """Takes up cos and sin `[B, T, 2 * rotary]` of all tokens, in reserved room where there is some."""
        batch, tokens, _ = factors.shape
        if self.buffer.shape[0] != batch or self.buffer.shape[1] < tokens:
            self.buffer = factors.clone()
        self.buffer[:, :tokens] = factors
        self.tokens = tokens

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces the buffer of every device by `change(buffer)`: what the layers do to their batch."""
        for track in self._copies():
            track._apply(change)

    def _apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self.tokens:
            return
        with torch.inference_mode(torch.is_inference_mode_enabled() and not self.is_static):
            self.buffer = change(self.buffer).contiguous()
