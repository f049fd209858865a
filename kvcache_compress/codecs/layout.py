"""Memory layout of packed tokens: fields, bit planes and the order of codes.

All byte arithmetic is in this module. A *field* is a buffer `[B, H, tokens / field.tokens, *field.shape]`.

Codes of `bits` bits are split into bit planes of 4, 2 or 1 bits (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2), so that no code
straddles a byte. A plane packs the `width` codes of a token into `width / 8` words of eight codes. The word type
follows the plane: int32 for 4 bits, int16 for 2, uint8 for 1. Bits `[w * j, w * (j + 1))` of word `c` hold the code of
channel `j * width / 8 + c`. So all planes share one channel order, a word unpacks into eight contiguous runs of
channels, and a token's row is read with wide loads.
"""

import math
from dataclasses import dataclass

import torch

CODES_PER_WORD = 8
PLANE_WORD = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}


@dataclass(frozen=True)
class Field:
    """A stored quantity: `shape` numbers of `dtype` for every `tokens` consecutive tokens of a key/value head."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    tokens: int = 1

    @property
    def bytes_per_token(self) -> float:
        return self.dtype.itemsize * math.prod(self.shape) / self.tokens


def code_fields(bits: int, width: int, prefix: str = "") -> tuple[Field, ...]:
    """Fields of the bit planes for `width` codes of `bits` bits per token, low plane first."""
    words = words_per_token(width)
    return tuple(Field(f"{prefix}codes{i}", PLANE_WORD[w], (words,)) for i, w in enumerate(PLANES[bits]))


def check_head_dim(method: str, head_dim: int, multiple: int, least: int) -> None:
    """Raise `ValueError` for a head dimension that a method does not support, naming methods that do."""
    if head_dim % multiple or head_dim < least:
        advice = "use none" if method == "turboquant" else "use turboquant (multiples of 8 from 16) or none (any)"
        raise ValueError(
            f"head_dim={head_dim} for {method} must be a multiple of {multiple}, at least {least}; {advice}"
        )


def words_per_token(width: int) -> int:
    if width % CODES_PER_WORD:
        raise ValueError(f"{width} codes per token cannot be packed: a multiple of {CODES_PER_WORD} is needed")
    return width // CODES_PER_WORD


def padded_words(width: int) -> int:
    """Words per token as kernels see them: the next power of two, at least 2 (tensor cores need 16 channels)."""
    return max(2, 1 << (words_per_token(width) - 1).bit_length())


def padded_width(width: int) -> int:
    return CODES_PER_WORD * padded_words(width)


def code_order(width: int) -> torch.Tensor:
    """Position of each channel in the kernels' padded code order: int64 `[width]`, below `padded_width(width)`."""
    channel = torch.arange(width, device="cpu")
    words = words_per_token(width)
    return channel // words * padded_words(width) + channel % words


def group_tokens(fields: tuple[Field, ...]) -> int:
    """Number of tokens that are encoded together, so that every field has whole entries."""
    return math.lcm(*(field.tokens for field in fields))


def bytes_per_token(fields: tuple[Field, ...]) -> float:
    """Bytes stored per token of one key/value head."""
    return sum(field.bytes_per_token for field in fields)
