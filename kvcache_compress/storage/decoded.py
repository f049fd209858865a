"""Decoded keys and values for foreign code: tensors whose in-place changes reach the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


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
    """Source of decoded tokens.

    Args:
        base: the tokens as they were decoded.
        write: called after changes, with the tokens and True if their memory was replaced by other memory.
    """

    def __init__(self, base: torch.Tensor, write: Callable[[torch.Tensor, bool], None]) -> None:
        self.base, self.write = base, write
        self._storage = base.untyped_storage().data_ptr()

    def shares(self, x: torch.Tensor) -> bool:
        """Return True if `x` is a view of these tokens."""
        return bool(self._storage) and x.layout == torch.strided and x.untyped_storage().data_ptr() == self._storage

    def write_back(self, x: torch.Tensor) -> None:
        """Hand on changes made through `x`, a view of these tokens."""
        base = self.base.detach()
        self.write(base, bool(base.numel()) and not self.shares(x))

    def tied(self, x: torch.Tensor) -> torch.Tensor:
        """Let changes of `x`, these tokens or a view of them, be handed on."""
        x = x.as_subclass(DecodedTensor)
        x.origin = self
        return x


def _tied(x: Any, given: list[DecodedTensor]) -> Any:
    """If a result is a view of a given tensor, tie it to that tensor's origin."""
    origin = next((y.origin for y in given if y.origin.shares(x)), None) if type(x) is torch.Tensor else None
    return x if origin is None else origin.tied(x)
