"""What a codec hands to the C++ attention for its side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

_FORMS = {"dense": 0, "levels": 1, "groups": 2}
_LANES = 8
"""Numbers that the C++ code takes at a time."""


@dataclass(frozen=True)
class CPUSide:
    """How one side's fields are decoded; see `decode.h`.

    form: `dense` has one field of numbers; `levels` components of planes and a scale; `groups` planes, scale and zero.
    options: of `levels` the bits of each component; of `groups` the bits, and the tokens and channels of a group.
    levels: of `levels` the float32 levels of each component, at least eight.
    basis: float32 `[H or 1, W, D]`, contiguous, D rounded up to a multiple of eight: the axes of code space; None is
        the identity.
    mean: float32 `[H, D]`, contiguous: what was subtracted from the tokens.
    """

    form: Literal["dense", "levels", "groups"]
    options: tuple[int, ...] = ()
    levels: tuple[torch.Tensor, ...] = ()
    basis: torch.Tensor | None = None
    mean: torch.Tensor | None = None

    @property
    def code(self) -> list[int]:
        """The form and its options as the operator takes them."""
        return [_FORMS[self.form], *self.options]


def level_side(
    bits: Sequence[int], levels: Sequence[torch.Tensor], basis: torch.Tensor, mean: torch.Tensor | None
) -> CPUSide:
    """The side of components of `bits` and `levels` `[2 ** bits]` along the rows of `basis` `[H or 1, W, D]`."""
    padded = tuple(_padded(x, max(_LANES, len(x))) for x in levels)
    basis = _padded(basis, -(-basis.shape[-1] // _LANES) * _LANES)
    return CPUSide("levels", tuple(bits), padded, basis, None if mean is None else mean.contiguous())


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return functional.pad(x, (0, width - x.shape[-1])) if width > x.shape[-1] else x.contiguous()
