"""Buffers of one side of a layer: packed fields and the dense tail."""

from collections.abc import Callable
from typing import Any

import torch

from kvcache_compress.codecs.base import Fields
from kvcache_compress.codecs.layout import Field, group_tokens

SLACK = 1 / 32
"""Largest share of a growing buffer that may be unused."""


def grown_capacity(tokens: int, multiple: int) -> int:
    """Capacity, in tokens, of a growing buffer that must hold `tokens`."""
    return max(tokens, int(tokens * (1 + SLACK)) // multiple * multiple)


def _writable(buffer: torch.Tensor) -> torch.Tensor:
    """Return the buffer, or a copy if it was made in inference mode and cannot be written outside of it."""
    return buffer.clone() if buffer.is_inference() and not torch.is_inference_mode_enabled() else buffer


class PackedStore:
    """Append-only buffers, one per field: `[B, H, capacity / field.tokens, *field.shape]`.

    A full buffer grows by `SLACK`, so each token is copied about 32
    times in all. Fields grow one after the other, so only one is held twice.
    """

    def __init__(self, fields: tuple[Field, ...], batch: int, heads: int, device: torch.device) -> None:
        self.fields = fields
        self.group = group_tokens(fields)
        self.tokens = 0
        self.capacity = 0
        self.is_static = False
        self.buffers: Fields = tuple(
            torch.empty(batch, heads, 0, *field.shape, dtype=field.dtype, device=device) for field in fields
        )
        """One buffer per field; replacing any of them makes a new tuple."""
        self.described: Any = None
        """A back end's description of the buffers for its attention; dropped when a buffer is replaced."""

    def make_static(self, capacity: int) -> None:
        """Allocate zeroed buffers for `capacity` tokens, a multiple of `group`, that never grow."""
        self._grow(capacity)
        for buffer in self.buffers:
            buffer.zero_()
        self.is_static = True

    def write(self, groups: torch.Tensor, encoded: Fields, where: torch.Tensor) -> None:
        """Write encoded groups with indices `groups` `[n]` if `where` `[]` is true, without counting their tokens."""
        for field, buffer, new in zip(self.fields, self.buffers, encoded, strict=True):
            each = self.group // field.tokens
            rows = (groups[:, None] * each + torch.arange(each, device=groups.device)).flatten()
            buffer.index_copy_(2, rows, torch.where(where, new, buffer.index_select(2, rows)))

    def ensure_capacity(self, tokens: int, growing: bool) -> None:
        """Make room for `tokens` more, a multiple of `group`; `growing` adds spare capacity."""
        needed = self.tokens + tokens
        if needed > self.capacity:
            self._grow(grown_capacity(needed, self.group) if growing else needed)

    def append(self, encoded: Fields, tokens: int, growing: bool) -> None:
        """Append `tokens` encoded tokens; `growing` adds spare capacity."""
        done = self.tokens + tokens
        self.ensure_capacity(tokens, growing)
        self.buffers = tuple(_writable(buffer) for buffer in self.buffers)
        for field, buffer, new in zip(self.fields, self.buffers, encoded, strict=True):
            buffer[:, :, self.tokens // field.tokens : done // field.tokens] = new
        self.tokens = done

    def _grow(self, capacity: int) -> None:
        self.described = None
        for index, field in enumerate(self.fields):
            old = self.buffers[index]
            batch, heads = old.shape[:2]
            new = old.new_empty(batch, heads, capacity // field.tokens, *field.shape)
            used = self.tokens // field.tokens
            new[:, :, :used] = old[:, :, :used]
            self.buffers = (*self.buffers[:index], new, *self.buffers[index + 1 :])
        self.capacity = capacity

    def read(self, start: int, stop: int) -> Fields:
        """Return views of the fields of tokens `[start, stop)`, both multiples of `group`."""
        return tuple(
            buffer[:, :, start // field.tokens : stop // field.tokens]
            for field, buffer in zip(self.fields, self.buffers, strict=True)
        )

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens, a multiple of `group`, and free excess capacity unless static."""
        self.tokens = tokens
        if not self.is_static and self.capacity > (fitting := grown_capacity(tokens, self.group)):
            self._grow(fitting)

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.described = None
        self.buffers = tuple(change(buffer).contiguous() for buffer in self.buffers)

    def bytes_used(self) -> dict[str, int]:
        rows = self.buffers[0].shape[0] * self.buffers[0].shape[1]
        return {field.name: round(rows * self.tokens * field.bytes_per_token) for field in self.fields}

    def bytes_allocated(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


FIRST_TOKENS = 256
"""Initial capacity of a tail that may hold as many tokens; enough for the windows of all presets."""


def tail_capacity(tokens: int, usual: int) -> int:
    """Capacity of a tail that must hold `tokens`, and normally holds at most `usual`."""
    grown = grown_capacity(tokens, 1)
    return grown if tokens > usual else min(max(grown, FIRST_TOKENS), usual)


class TailBuffer:
    """Dense tokens of one side after the packed ones, `[B, H, capacity, D]`, written in place.

    The buffer grows by `SLACK` at a time, so each token is copied about 32 times at most.

    Args:
        like: `[B, H, T, D]`, for shape, dtype and device.
        usual: most tokens that it normally holds; only more tokens raise the capacity above it.
    """

    def __init__(self, like: torch.Tensor, usual: int) -> None:
        batch, heads, _, dim = like.shape
        self.tokens = 0
        self.usual = usual
        self.buffer = like.new_empty(batch, heads, tail_capacity(0, usual), dim)

    def view(self) -> torch.Tensor:
        return self.buffer[:, :, : self.tokens]

    def append(self, x: torch.Tensor) -> None:
        count = x.shape[2]
        self.ensure_capacity(count)
        self.buffer[:, :, self.tokens : self.tokens + count] = x
        self.tokens += count

    def ensure_capacity(self, count: int) -> None:
        """Make room for `count` more tokens; the caller writes them and adds to `tokens`."""
        if self.tokens + count > self.buffer.shape[2]:
            old, self.buffer = self.view(), self.new_buffer(self.tokens + count)
            self.buffer[:, :, : self.tokens] = old
        self.buffer = _writable(self.buffer)

    def replace(self, x: torch.Tensor) -> None:
        """Replace the contents by a copy of `x` `[B, H, T, D]`; tensors from `view` keep the old contents."""
        self.buffer = self.new_buffer(x.shape[2], x.shape[0])
        self.tokens = 0
        self.append(x)

    def new_buffer(self, tokens: int, batch: int | None = None) -> torch.Tensor:
        """Allocate a buffer for `tokens` tokens with the usual spare capacity; `batch` defaults to the current one."""
        own, heads, _, dim = self.buffer.shape
        return self.buffer.new_empty(own if batch is None else batch, heads, tail_capacity(tokens, self.usual), dim)

    def clear(self) -> None:
        """Drop all tokens and free their memory."""
        self.tokens = 0
        self.buffer = self.buffer[:, :, :0].clone()

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.buffer = change(self.buffer).contiguous()
