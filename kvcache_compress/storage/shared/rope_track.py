"""Cos and sin of RoPE at the first token of each packed group, kept once for all layers of a cache."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvcache_compress.modeling.rope import Rope, RopeLayout, rotary_embedding

from ..packed_store import grown_capacity

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_warn_once = cache(logging.getLogger(__name__).warning)
DTYPE = torch.float16


def rope_rows(tokens: int, first: int, stride: int) -> int:
    """Number of groups of `stride` tokens, counted from token `first`, that the first `tokens` tokens start."""
    return -(-max(0, tokens - first) // stride)


class RopeTrack:
    """Cos and sin of every `stride`-th token from `first` on, shared by layers with as many sinks and the same groups.

    Row g of `buffer` `[B, capacity, 2 * rotary]` belongs to token `first + g * stride`, the first token of packed group
    g. The last row of a static track belongs to no group.

    Hooks on the model provide each step's position embeddings (`inputs`); without them the track computes those of the
    tokens' indices. A model on several devices has one copy per device (`at`); the first applies operations to all.
    """

    def __init__(self, config: PreTrainedConfig, layout: RopeLayout, first: int, stride: int) -> None:
        self.layout = layout
        self.first, self.stride = first, stride
        self.inputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._config = config
        self._embed: Callable[..., tuple[Any, Any]] | None = None
        self.leader: int | None = None
        """Index of the layer that writes; the other layers on its device only read."""
        self._device: torch.device | None = None
        self._first: RopeTrack | None = None
        self._others: dict[torch.device, RopeTrack] = {}
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """State without the model's embedding, which cannot be pickled and is rebuilt on demand."""
        return self.__dict__ | {"_embed": None}

    def _forget(self) -> None:
        self.tokens = 0
        self.is_static = False
        self.buffer = torch.empty(0, 0, 2 * self.layout.rotary, dtype=DTYPE)

    def at(self, device: torch.device, layer: int) -> RopeTrack:
        """Return the copy of the track on `device`; the first layer there writes it."""
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

    @property
    def name(self) -> str:
        """Name of its tensor in a saved cache."""
        return f"rope.{self.first}.{self.stride}"

    def rows(self, tokens: int) -> int:
        """Number of rows for the first `tokens` tokens of a sequence, sinks included."""
        return rope_rows(tokens, self.first, self.stride)

    def reset(self) -> None:
        """Empty the track on every device."""
        for track in self._copies():
            track._forget()

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return and clear the step's cos and sin from the hooks, or two None."""
        inputs, self.inputs = self.inputs, None
        return inputs or (None, None)

    def extend(self, start: int, states: torch.Tensor, already_written: bool = False) -> None:
        """Append the cos and sin of a step with keys `states` `[B, H, T, D]` that starts at token `start`.

        `already_written` is True for layers that share the track and come after the one that writes it.
        """
        batch, _, count, _ = states.shape
        inputs, self.inputs = self.inputs, None
        if already_written and start + count == self.tokens:
            return
        begin, end = self.rows(start), self.rows(start + count)
        if end > self.buffer.shape[1] or batch != self.buffer.shape[0]:
            grown = self.buffer.new_empty(batch, grown_capacity(end, 1), self.buffer.shape[2], device=states.device)
            if begin:
                grown[:, :begin] = self.buffer[:, :begin]
            self.buffer = grown
        elif self.buffer.is_inference() and not torch.is_inference_mode_enabled():
            self.buffer = self.buffer.clone()
        if end > begin:
            at = self.first + begin * self.stride - start
            if inputs is None or inputs[0].shape[1] != count:
                inputs = self._by_index(torch.arange(start + at, start + count, self.stride), states)
            else:
                inputs = inputs[0][:, at :: self.stride], inputs[1][:, at :: self.stride]
            self.buffer[:, begin:end] = torch.cat(self.layout.factors(inputs), -1).to(DTYPE)
        self.tokens = start + count

    def make_static(self, packed: int, states: torch.Tensor) -> None:
        """Allocate zeroed rows for at least `packed` packed tokens and the batch of `states`; they never grow."""
        self.is_static = True
        batch, rows, held = states.shape[0], packed // self.stride + 1, self.buffer
        if held.shape[0] != batch or held.shape[1] < rows:
            self.buffer = held.new_zeros(batch, rows, held.shape[2], device=states.device)
            if held.shape[0] == batch:  # a layer with larger groups of values has more room
                kept = held[:, :-1]
                self.buffer[:, : kept.shape[1]] = kept

    def of_step(self, counts: torch.Tensor, states: torch.Tensor, already_written: bool) -> Rope | None:
        """Return the model's cos and sin, `[1 or B, n, C]`, of new tokens `[B, H, n, D]` after `counts` others."""
        cos, sin = self.take()
        if already_written:
            return None
        if cos is None or sin is None or cos.shape[1] != states.shape[2]:
            return self._by_index(torch.arange(states.shape[2], device=counts.device) + counts.sum(), states)
        return cos, sin

    def write(self, positions: torch.Tensor, inputs: Rope) -> None:
        """Write the cos and sin `inputs` of tokens at indices `positions` `[n]` that start a group.

        All other tokens write to the static buffer's unused last row. Tokens are not counted.
        """
        factors = torch.cat(self.layout.factors(inputs), -1).to(DTYPE).expand(self.buffer.shape[0], -1, -1)
        packed, spare = positions - self.first, self.buffer.shape[1] - 1
        begins = (packed >= 0) & (packed % self.stride == 0)
        rows = torch.where(begins, packed // self.stride, spare).clamp(max=spare)
        self.buffer.index_copy_(1, rows, factors)

    def gather(self, groups: torch.Tensor) -> Rope:
        """Return cos and sin `[B, n, rotary]` of groups `[n]` of the static buffer; out-of-range groups are clamped."""
        cos, sin = self.buffer.index_select(1, groups.clamp(0, self.buffer.shape[1] - 1)).chunk(2, -1)
        return cos, sin

    def _embedding(self) -> Callable[..., tuple[Any, Any]]:
        if self._embed is None:
            self._embed = rotary_embedding(self._config)
        if self._embed is None:
            raise RuntimeError("a RopeTrack needs a model with RoPE")
        return self._embed

    def _by_index(self, positions: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if states.shape[0] > 1:
            _warn_once(
                "the cache does not see the model's position embeddings, so keys of left-padded rows are encoded as if "
                "at other positions, which costs accuracy. Call enable_fused_attention(model), or "
                "register_position_hooks(model)"
            )
        like = torch.zeros(1, dtype=torch.float32, device=positions.device)
        cos, sin = self._embedding()(like, positions.unsqueeze(0))
        return cos.to(states.device), sin.to(states.device)

    def first_positions(self, tokens: int, device: torch.device) -> Rope:
        """Return the model's cos and sin `[1, tokens, rotary]`, float32, at positions 0 to `tokens - 1`."""
        cos, sin = self._embedding()(torch.zeros(1), torch.arange(tokens)[None])
        cos, sin = self.layout.factors((cos.float().to(device), sin.float().to(device)))
        return cos, sin

    def read(self, start: int, stop: int) -> Rope:
        """Return cos and sin `[B, (stop - start) / stride, rotary]` of the groups in packed tokens `[start, stop)`."""
        cos, sin = self.buffer[:, start // self.stride : stop // self.stride].chunk(2, -1)
        return cos, sin

    def bytes_used(self, packed: int | None = None) -> int:
        """Bytes in use on this device: for all tokens, or only for the first `packed` packed ones."""
        return self.buffer[:, : self.rows(self.tokens if packed is None else self.first + packed)].nbytes

    def truncate(self, tokens: int) -> None:
        """Keep at most the first `tokens` tokens, on every device."""
        for track in self._copies():
            track.tokens = min(track.tokens, tokens)

    def restore(self, factors: torch.Tensor, tokens: int) -> None:
        """Set the rows `[B, rows, 2 * rotary]` of `tokens` tokens, inside a static buffer if there is one."""
        batch, rows, _ = factors.shape
        if self.buffer.shape[0] != batch or self.buffer.shape[1] < rows:
            self.buffer = factors.clone()
        self.buffer[:, :rows] = factors
        self.tokens = tokens

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the buffer of every device by `change(buffer)` when the batch changes."""
        for track in self._copies():
            if track.tokens:
                with torch.inference_mode(torch.is_inference_mode_enabled() and not track.is_static):
                    track.buffer = change(track.buffer).contiguous()
