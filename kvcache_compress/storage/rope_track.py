"""Cos and sin of the rotation that RoPE gave each cached token, kept once for all layers of a cache.

They make left padding, partial rotary and scaled RoPE right for codecs that encode keys before RoPE.
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
"""Dtype of the cos and sin that are kept."""


@cache
def _warn_of_positions() -> None:
    logger.warning(
        "the model does not hand over its position embeddings, so commvq encodes left-padded rows as if at other "
        "positions, and less exactly: call enable_fused_attention(model), or register_position_hooks(model)"
    )


class RopeTrack:
    """Cos and sin of every cached token, `[B, capacity, 2 * rotary]`, shared by the layers of a cache.

    With fused attention an attention module hands over the position embeddings of its step (`inputs`). Without them,
    the model's own embedding of the tokens' indices in the cache is used. In left-padded rows these are not the tokens'
    positions: keys are decoded as exactly, but encoded as if at other positions.
    A model on several devices has a copy on each (`at`); the first one handles operations on all of them.
    """

    def __init__(self, config: PreTrainedConfig, layout: RopeLayout) -> None:
        self.layout = layout
        self.inputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._config = config
        self._embed: Callable[..., tuple[Any, Any]] | None = None
        self.leader: int | None = None
        """Index of the layer that writes; the others on its device read."""
        self._device: torch.device | None = None
        self._first: RopeTrack | None = None
        self._others: dict[torch.device, RopeTrack] = {}
        self._forget()

    def _forget(self) -> None:
        self.tokens = 0
        self.is_static = False
        self.buffer = torch.empty(0, 0, 2 * self.layout.rotary, dtype=DTYPE)

    def at(self, device: torch.device, layer: int) -> RopeTrack:
        """Return the track on `device`: every device of a model has its own copy, written by its first layer."""
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
        """Empty the track on every device."""
        for track in self._copies():
            track._forget()

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return and clear the cos and sin that were handed over for this step, or two None."""
        inputs, self.inputs = self.inputs, None
        return inputs or (None, None)

    def extend(self, start: int, states: torch.Tensor, again: bool = False) -> None:
        """Append the factors of a step with keys `states` `[B, H, T, D]`, whose first token has index `start`.

        `again` is True for the layers after the first, whose factors are already there.
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
        """Allocate `tokens` tokens for the batch of `states`, once and for all; spare capacity is zero."""
        self.is_static = True
        if self.buffer.shape[:2] != (states.shape[0], tokens):
            self.buffer = self.buffer.new_zeros(states.shape[0], tokens, self.buffer.shape[2], device=states.device)

    def write(self, positions: torch.Tensor, states: torch.Tensor, again: bool = False) -> None:
        """Write the factors of tokens at `positions` `[n]` to the static buffer, without counting the tokens."""
        cos, sin = self.take()
        if again:
            return
        if cos is None or sin is None or cos.shape[1] != len(positions):
            cos, sin = self._by_index(positions, states)
        factors = torch.cat(self.layout.factors((cos, sin)), -1).to(DTYPE).expand(self.buffer.shape[0], -1, -1)
        self.buffer.index_copy_(1, positions.clamp(max=self.buffer.shape[1] - 1), factors)

    def gather(self, positions: torch.Tensor) -> Rope:
        """Return cos and sin `[B, n, rotary]` of the tokens at `positions` `[n]` of the static buffer."""
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
        """Return cos and sin `[B, stop - start, rotary]` of tokens `[start, stop)`."""
        cos, sin = self.buffer[:, start:stop].chunk(2, -1)
        return cos, sin

    def bytes_used(self) -> int:
        return sum(track.buffer[:, : track.tokens].nbytes for track in self._copies())

    def bytes_allocated(self) -> int:
        return sum(track.buffer.nbytes for track in self._copies())

    def truncate(self, tokens: int) -> None:
        """Keep at most the first `tokens` tokens, on every device."""
        for track in self._copies():
            track.tokens = min(track.tokens, tokens)

    def restore(self, factors: torch.Tensor) -> None:
        """Set cos and sin `[B, T, 2 * rotary]` of all tokens, within a static buffer if there is one."""
        batch, tokens, _ = factors.shape
        if self.buffer.shape[0] != batch or self.buffer.shape[1] < tokens:
            self.buffer = factors.clone()
        self.buffer[:, :tokens] = factors
        self.tokens = tokens

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the buffer of every device by `change(buffer)`, as the layers change their batch."""
        for track in self._copies():
            track._apply(change)

    def _apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self.tokens:
            return
        with torch.inference_mode(torch.is_inference_mode_enabled() and not self.is_static):
            self.buffer = change(self.buffer).contiguous()
