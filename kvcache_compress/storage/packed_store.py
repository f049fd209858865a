"""Growing buffers of one side of a layer: packed fields, and the dense tail."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kvcache_compress.codecs.base import Fields
from kvcache_compress.codecs.layout import Field, grown_capacity


def _writable(buffer: torch.Tensor) -> torch.Tensor:
    """A tensor made under `torch.inference_mode` cannot be written in place outside it; a copy can."""
    return buffer.clone() if buffer.is_inference() and not torch.is_inference_mode_enabled() else buffer


class PackedStore:
    """Append-only buffers, one per field: `[B, H, capacity / field.tokens, *field.shape]`.

    Stored tokens are never rewritten. A full buffer grows by an eighth (`layout.SLACK`), so growth copies each token
    about eight times in all, not once per step, and only one field is held twice while it is copied.
    """

    def __init__(self, fields: tuple[Field, ...], batch: int, heads: int, device: torch.device) -> None:
        self.fields = fields
        self.group = math.lcm(*(field.tokens for field in fields))
        self.tokens = 0
        self.capacity = 0
        self.is_static = False
        self.buffers: list[torch.Tensor] = [
            torch.empty(batch, heads, 0, *field.shape, dtype=field.dtype, device=device) for field in fields
        ]

    def make_static(self, capacity: int) -> None:
        """Makes room for `capacity` tokens, a multiple of `group`, once and for all; unused room is zero."""
        self._grow(capacity)
        for buffer in self.buffers:
            buffer.zero_()
        self.is_static = True

    def write(self, at: torch.Tensor, encoded: Fields, group: int) -> None:
        """Writes encoded groups of `group` tokens as the groups `at` `[n]`, without counting them."""
        for field, buffer, new in zip(self.fields, self.buffers, encoded, strict=True):
            rows = group // field.tokens
            buffer.index_copy_(2, (at[:, None] * rows + torch.arange(rows, device=at.device)).flatten(), new)

    def ensure_capacity(self, tokens: int, growing: bool) -> None:
        """Makes room for `tokens` more, a multiple of `group`; `growing` leaves room beyond that."""
        needed = self.tokens + tokens
        if needed > self.capacity:
            self._grow(grown_capacity(needed, self.group) if growing else needed)

    def append(self, encoded: Fields, tokens: int, growing: bool) -> None:
        """Appends `tokens` encoded tokens; see `ensure_capacity`."""
        done = self.tokens + tokens
        for field, buffer, new in zip(self.fields, self.writable_buffers(tokens, growing), encoded, strict=True):
            buffer[:, :, self.tokens // field.tokens : done // field.tokens] = new
        self.tokens = done

    def writable_buffers(self, tokens: int, growing: bool) -> Fields:
        """The buffers, with room for `tokens` more, which are held once `tokens` counts them; see `ensure_capacity`."""
        self.ensure_capacity(tokens, growing)
        self.buffers = [_writable(buffer) for buffer in self.buffers]
        return tuple(self.buffers)

    def _grow(self, capacity: int) -> None:
        for index, (field, old) in enumerate(zip(self.fields, self.buffers, strict=True)):
            batch, heads = old.shape[:2]
            new = old.new_empty(batch, heads, capacity // field.tokens, *field.shape)
            used = self.tokens // field.tokens
            new[:, :, :used] = old[:, :, :used]
            self.buffers[index] = new
        self.capacity = capacity

    def read(self, start: int, stop: int) -> Fields:
        """Views of tokens `[start, stop)`, both multiples of `group`."""
        return tuple(
            buffer[:, :, start // field.tokens : stop // field.tokens]
            for field, buffer in zip(self.fields, self.buffers, strict=True)
        )

    def truncate(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens, a multiple of `group`, and gives back what is then too much room."""
        self.tokens = tokens
        if not self.is_static and self.capacity > (fitting := grown_capacity(tokens, self.group)):
            self._grow(fitting)

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every buffer by `change(buffer)`: batch selection, moves between devices."""
        self.buffers = [change(buffer).contiguous() for buffer in self.buffers]

    def bytes_used(self) -> dict[str, int]:
        rows = self.buffers[0].shape[0] * self.buffers[0].shape[1]
        return {field.name: round(rows * self.tokens * field.bytes_per_token) for field in self.fields}

    def bytes_allocated(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


FIRST_TOKENS = 256
"""Room in a tail from the start, where it is ever to hold as many: the windows of all presets fit."""


class TailBuffer:
    """The newest tokens in full precision, `[B, H, room, D]`, written in place.

    usual: tokens that it holds at most as a rule. Up to there it grows by an eighth from `FIRST_TOKENS` on, and beyond
    as well, so that each token is copied about eight times at most, and a wide window takes no more than its tokens.
    """

    def __init__(self, like: torch.Tensor, usual: int) -> None:
        batch, heads, _, dim = like.shape
        self.tokens = 0
        self.usual = usual
        self.buffer = like.new_empty(batch, heads, self._capacity(0), dim)

    def _capacity(self, tokens: int) -> int:
        grown = grown_capacity(tokens, 1)
        return grown if tokens > self.usual else min(max(grown, FIRST_TOKENS), self.usual)

    def view(self) -> torch.Tensor:
        return self.buffer[:, :, : self.tokens]

    def append(self, x: torch.Tensor) -> None:
        count = x.shape[2]
        self.ensure_capacity(count)
        self.buffer[:, :, self.tokens : self.tokens + count] = x
        self.tokens += count

    def ensure_capacity(self, count: int) -> None:
        """Makes room in `buffer` for `count` more tokens, which are held once `tokens` counts them."""
        if self.tokens + count > self.buffer.shape[2]:
            self._resize(self._capacity(self.tokens + count))
        self.buffer = _writable(self.buffer)

    def _resize(self, capacity: int) -> None:
        batch, heads, _, dim = self.buffer.shape
        old = self.view()
        self.buffer = old.new_empty(batch, heads, capacity, dim)
        self.buffer[:, :, : self.tokens] = old

    def replace(self, x: torch.Tensor) -> None:
        """Holds a copy of `x` `[B, H, T, D]` and nothing else; views handed out before stay as they are."""
        self.buffer = self.new_buffer(x.shape[2], x.shape[0])
        self.tokens = 0
        self.append(x)

    def new_buffer(self, tokens: int, batch: int | None = None) -> torch.Tensor:
        """A buffer for so many tokens, with the room that there always is."""
        own, heads, _, dim = self.buffer.shape
        return self.buffer.new_empty(own if batch is None else batch, heads, self._capacity(tokens), dim)

    def truncate(self, tokens: int) -> None:
        self.tokens = tokens

    def clear(self) -> None:
        """Holds nothing, and no memory."""
        self.tokens = 0
        self.buffer = self.buffer[:, :, :0].clone()

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.buffer = change(self.buffer).contiguous()
