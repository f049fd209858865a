"""Operands that a codec hands to the C++ attention for its side (keys or values)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

FORMS = ("dense", "levels", "groups", "pairs", "tree", "additive", "bits", "complex", "digits")
"""Names of the decoders; `attend.cpp` has a table of them in the same order."""
_LANES = 8
"""Numbers per vector of the C++ code (`LANES` in `simd.h`)."""


@dataclass(frozen=True)
class CPUSide:
    """Decoder of one side's fields and its operands; see the decoders in `cpu_kernels/decode`.

    form: name of the decoder, one of `FORMS`.
    options: integer options of the decoder.
    tables: contiguous tables of the decoder, shared with the codec so that they take no extra memory.
    basis: axes of code space, `[H or 1, W, D]`, D rounded up to a multiple of eight; None is the identity. Of keys,
        float32 and contiguous; of values, any dtype with stride 1 along an axis.
    mean: float32 `[H, D]`, contiguous, that was subtracted from the tokens.
    """

    form: str
    options: tuple[int, ...] = ()
    tables: tuple[torch.Tensor, ...] = ()
    basis: torch.Tensor | None = None
    mean: torch.Tensor | None = None


def cpu_side(
    form: str,
    options: Iterable[int],
    tables: Iterable[torch.Tensor],
    basis: torch.Tensor,
    mean: torch.Tensor | None = None,
) -> CPUSide:
    """Build a `CPUSide` with a code space; tensors are shared with the codec unless they need padding."""
    missing = -basis.shape[-1] % _LANES
    basis = functional.pad(basis, (0, missing)) if missing else basis.contiguous()
    return CPUSide(form, tuple(options), tuple(tables), basis, None if mean is None else mean.contiguous())
