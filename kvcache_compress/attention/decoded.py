"""Decoded keys and values for foreign code: tensors whose in-place changes reach the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from kvcache_compress.codecs.base import Side

    from .handle import Step


class DecodedTensor(torch.Tensor):
    """Decoded keys or values of a layer, or a view of them; in-place changes are written to the layer as well.

    Dense tokens can be written. A change of packed tokens is undone, and raises `ValueError`. Once the layer has
    changed (a step, a crop, other rows), writes no longer reach it. Results that do not share the tensor's memory are
    plain tensors. Writes in compiled code (`torch.compile`) do not reach the cache.
    """

    origin: Origin

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(kind, torch.Tensor) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling():
                return func(*args, **kwargs or {})
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DecodedTensor)]
            before = [x._version for x in given]
            result = func(*args, **kwargs or {})
            for x, version in zip(given, before, strict=True):
                if x._version != version or not x.origin.shares(x):
                    x.origin.write_back(x)
            return tree_map(lambda x: _tied(x, given), result)

    def __copy__(self) -> torch.Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class Origin:
    """Source of decoded tokens: one side of a step, as it was when they were decoded."""

    def __init__(self, step: Step, side: Side) -> None:
        self.step, self.side = step, side
        self.segments = step.side(side)
        self.base = step.decode(self.segments)
        self._storage = self.base.untyped_storage().data_ptr()

    def shares(self, x: torch.Tensor) -> bool:
        """Return True if `x` is a view of these tokens."""
        return bool(self._storage) and x.layout == torch.strided and x.untyped_storage().data_ptr() == self._storage

    def write_back(self, x: torch.Tensor) -> None:
        """Write changes made through `x`, a view of these tokens, to the layer, if it still holds them."""
        layer = None if self.step.layer is None else self.step.layer()
        if layer is None:
            return
        base = self.base.detach()
        try:
            if base.numel() and not self.shares(x):
                raise ValueError(f"the memory of a cache's {self.side} cannot be replaced; use copy_() instead")
            layer.write(self.side, base, self.step.decode(self.segments))
        except ValueError:
            base.copy_(self.step.dense(self.side))
            raise


def _tied(x: Any, given: list[DecodedTensor]) -> Any:
    """If a result is a view of a given tensor, tie it to that tensor's origin."""
    if type(x) is torch.Tensor and (origin := next((y.origin for y in given if y.origin.shares(x)), None)) is not None:
        x = x.as_subclass(DecodedTensor)
        x.origin = origin
    return x


def decoded(step: Step, side: Side) -> torch.Tensor:
    """Decode a side of a step, `[B, H, T, D]`; writes into the result reach the step's layer."""
    with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode do not count their changes
        origin = Origin(step, side)
        x = origin.base.as_subclass(DecodedTensor)
        x.origin = origin
        return x
