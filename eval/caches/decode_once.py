"""Keep decoded tokens, for evaluations on machines where decoding takes most of the time.

Packed tokens never change, so decoding them once gives the same figures as decoding them at each step. The decoded
tokens take the memory of an uncompressed cache, which only an evaluation can afford.
"""

import weakref
from dataclasses import dataclass, field, fields
from functools import partial

import torch
from transformers import Cache

from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.storage.side import SideState
from kvcache_compress.storage.view import View


def decode_once(cache: Cache) -> None:
    """Make a filled cache keep what it decodes; it may no longer be copied, cropped or reordered."""
    for layer in cache.layers:
        if isinstance(layer, CompressedLayer):
            for state in layer.sides.values():
                # A strong reference would close a circle, which holds all decoded tokens until the next collection.
                state.view = partial(_kept_view, weakref.proxy(state), [])  # type: ignore[method-assign]


def _kept_view(
    state: SideState, decoded: list[torch.Tensor], packed: int | None = None, tail: torch.Tensor | None = None
) -> View:
    view = SideState.view(state, packed, tail)
    return _KeptView(**{name.name: getattr(view, name.name) for name in fields(View)}, decoded=decoded)


@dataclass(slots=True, eq=False, repr=False)
class _KeptView(View):
    """A view that adds what it decodes to `decoded`, runs of packed tokens `[B, H, tokens, D]` from the first on."""

    decoded: list[torch.Tensor] = field(default_factory=list)

    def stored(self) -> torch.Tensor:
        if (start := sum(part.shape[2] for part in self.decoded)) < self.packed:
            fresh = self.sinks.new_empty(*self.sinks.shape[:2], self.packed - start, self.sinks.shape[3])
            self.decode_into(fresh, start)
            self.decoded.append(fresh)
        packed = torch.cat(self.decoded, dim=2)[:, :, : self.packed] if self.decoded else self.sinks[:, :, :0]
        return torch.cat([self.sinks, packed, self.tail], dim=2)
