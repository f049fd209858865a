"""What a codec hands to the C++ attention for its side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch.nn import functional

Form: TypeAlias = Literal["dense", "levels", "groups", "pairs", "tree", "additive", "complex", "bits"]
_LANES = 8
"""Numbers that the C++ code takes at a time."""


@dataclass(frozen=True)
class CPUSide:
    """How one side's fields are decoded; see the decoders in `decode.h`, `polar.h` and `commvq.h`.

    form: which decoder; C++ has a table of the same names.
    options: its options, whole numbers.
    tables: its tables, contiguous: the codec's own, so that they take no memory beside it.
    basis: `[H or 1, W, D]`, D rounded up to a multiple of eight: the axes of code space; None is the identity. That of
        keys is float32 and contiguous; that of values of any dtype, the numbers of an axis side by side.
    mean: float32 `[H, D]`, contiguous: what was subtracted from the tokens.
    """

    form: Form
    options: tuple[int, ...] = ()
    tables: tuple[torch.Tensor, ...] = ()
    basis: torch.Tensor | None = None
    mean: torch.Tensor | None = None

    @cached_property
    def code_space(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Basis and mean as the operator takes them: empty for None, since optional ones in a list cost more time."""
        none = torch.empty(0, device="cpu")
        return none if self.basis is None else self.basis, none if self.mean is None else self.mean


def cpu_side(
    form: Form,
    options: Iterable[int],
    tables: Iterable[torch.Tensor],
    basis: torch.Tensor,
    mean: torch.Tensor | None = None,
) -> CPUSide:
    """A side with a code space; see `CPUSide`. Tensors stay the codec's own wherever they fit."""
    missing = -basis.shape[-1] % _LANES
    basis = functional.pad(basis, (0, missing)) if missing else basis.contiguous()
    return CPUSide(form, tuple(options), tuple(tables), basis, None if mean is None else mean.contiguous())
