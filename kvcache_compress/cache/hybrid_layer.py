"""Compressed layer for models that have attention and a recurrent state in one layer, such as Falcon-H1."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from .layer import CompressedLayer


class HybridCompressedLayer(CompressedLayer, LinearAttentionAndFullAttentionLayer):
    """A `CompressedLayer` with Transformers' recurrent state beside it; batch operations apply to both."""

    is_compileable = False

    def __init__(self, *args: Any, number_of_states: int, **kwargs: Any) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        CompressedLayer.__init__(self, *args, **kwargs)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize keys and values (positional arguments) or states (keyword arguments)."""
        if args:
            CompressedLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """True if the recurrent state can be cropped, as Transformers' own layer decides."""
        return bool(LinearAttentionLayer.is_croppable.__get__(self))

    def crop(self, tokens_to_remove: int) -> None:
        """Crop keys, values and states; raises `RuntimeError`, as Transformers does, without recorded past states."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        CompressedLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        CompressedLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def _apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._apply(change)
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                if state is not None:
                    states[number] = change(state)
