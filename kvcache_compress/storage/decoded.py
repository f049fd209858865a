"""Decoded keys and values for foreign code, whose in-place changes are written back to the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


class DecodedTensor(torch.Tensor):
    """Decoded keys or values, or a tensor view of them; in-place changes are written to the layer.

    Dense tokens can be written. Changing packed tokens is undone and raises `ValueError`. After the layer changes (a
    step, a crop, another batch), writes no longer reach it. Results with memory of their own are plain tensors. Writes
    in compiled code (`torch.compile`) do not reach the cache.
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
    """The memory that decoded tensors share, and how to write its changes back.

    Args:
        base: the decoded tokens.
        write: called after a change with the tokens, and with True if their memory was replaced.
    """

    def __init__(self, base: torch.Tensor, write: Callable[[torch.Tensor, bool], None]) -> None:
        self.base, self.write = base, write
        self._storage = base.untyped_storage().data_ptr()

    def shares(self, x: torch.Tensor) -> bool:
        """Return True if `x` is a tensor view of these tokens."""
        return bool(self._storage) and x.layout == torch.strided and x.untyped_storage().data_ptr() == self._storage

    def write_back(self, x: torch.Tensor) -> None:
        """Write back changes made through `x`."""
        base = self.base.detach()
        self.write(base, bool(base.numel()) and not self.shares(x))

    def tied(self, x: torch.Tensor) -> torch.Tensor:
        """Make `x`, which shares this memory, a `DecodedTensor`."""
        x = x.as_subclass(DecodedTensor)
        x.origin = self
        return x


def _tied(x: Any, given: list[DecodedTensor]) -> Any:
    """Make a result that shares memory with a given tensor a `DecodedTensor` too."""
    origin = next((y.origin for y in given if y.origin.shares(x)), None) if type(x) is torch.Tensor else None
    return x if origin is None else origin.tied(x)
