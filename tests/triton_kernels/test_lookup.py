"""The kernels' assembly, run by an interpreter of PTX, against `packing.unpack` and the codebook."""

from __future__ import annotations

import numpy as np
import ptx
import pytest
import torch

from kvcache_compress import packing
from kvcache_compress.layout import PLANES, words_per_token
from kvcache_compress.lloyd_max import lloyd_max_levels
from kvcache_compress.triton_kernels import lookup

TOKENS = 64
TEXTS = {
    (1, True): (lookup.ONE_BIT, lookup.ONE_BIT_REGISTERS),
    (2, True): (lookup.TWO_BITS, lookup.TWO_BITS_REGISTERS),
    (2, False): (lookup.TWO_BITS, lookup.TWO_BITS_REGISTERS),
    (3, True): (lookup.THREE_BITS, lookup.THREE_BITS_REGISTERS),
    (3, False): (lookup.THREE_BITS, lookup.THREE_BITS_REGISTERS),
    (4, True): (lookup.FOUR_EVEN_BITS, lookup.FOUR_EVEN_BITS_REGISTERS),
    (4, False): (lookup.FOUR_BITS, lookup.FOUR_BITS_REGISTERS),
}
"""Assembly and register constraints by bits, and whether the levels are even."""


def paired(words: torch.Tensor, keys: bool) -> tuple[np.ndarray, np.ndarray]:
    """Words A and B of each pair that a thread holds, of a tile `[T, words]`: neighbours in a token, or in a word."""
    tile = words.reshape(TOKENS, -1)
    tile = tile if keys else tile.T.contiguous()
    return tile.reshape(-1, 2)[:, 0].numpy(), tile.reshape(-1, 2)[:, 1].numpy()


def as_words(values: np.ndarray, bits: int) -> np.ndarray:
    return values.astype(np.int64).astype(np.uint64).astype(np.uint32) & np.uint32(2**bits - 1)


def halves(plane: torch.Tensor, keys: bool) -> np.ndarray:
    """Words of 16 bits, two in a register, as Triton holds them: loaded as they are, or out of words of 32 bits."""
    a, b = (as_words(part, 16) for part in paired(plane, keys))
    both = a | b << np.uint32(16)
    if plane.shape[-1] < 16:
        twos = plane.contiguous().view(torch.int32).repeat_interleave(2, -1)
        places = torch.tensor([0x5410, 0x7632], dtype=torch.int32).repeat(TOKENS, plane.shape[-1] // 2)
        held = [as_words(part, 32) for tile in (twos, places) for part in paired(tile, keys)]
        picked = ptx.run(lookup.HALF.value, {f"${1 + i}": register for i, register in enumerate(held)}, 1)[0]
        assert np.array_equal(picked, both)
    return both


def registers(bits: int, planes: tuple[torch.Tensor, ...], table: list[int], keys: bool) -> dict[str, np.ndarray]:
    """What Triton hands to the text: `pack=2` elements of every argument, two of 16 bits in one register."""
    words = planes[0].shape[-1]
    held: list[np.ndarray] = []
    if bits == 4:
        held += [as_words(part, 32) for part in paired(planes[0], keys)]
    elif bits > 1:
        held.append(halves(planes[0], keys))
    if bits in (1, 3):
        fours = planes[-1].contiguous().view(torch.int32).repeat_interleave(4, -1)
        held += [as_words(part, 32) for part in paired(fours, keys)]
        places = lookup.byte_places(words).expand(TOKENS, -1)
        held += [as_words(part, 32) for part in paired(places, keys)]
    for word in table:
        held += 2 * [np.full(len(held[0]), word & 0xFFFFFFFF, np.uint32)]
    return {f"${8 + i}": register for i, register in enumerate(held)}


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize(("bits", "even"), TEXTS)
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_text_gives_the_levels_of_the_codes(width: int, bits: int, even: bool, keys: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (TOKENS, width), generator=generator, device="cpu")
    planes = tuple(plane.cpu() for plane in packing.pack(codes, bits))
    levels = lloyd_max_levels(width, bits).half()
    if even:
        levels = (torch.arange(2**bits) - (2**bits - 1) / 2).half() * lookup.unit(bits)
    table = [] if even and bits in (1, 4) else lookup.byte_table(levels, bits).tolist()
    operands = registers(bits, planes, table, keys)
    text, constraints = TEXTS[bits, even]
    assert len(operands) == constraints.value.count(",r")
    outputs = ptx.run(text.value, operands, 8)
    expected = levels[codes].view(TOKENS, 8, words_per_token(width))
    for field, output in enumerate(outputs):
        a, b = paired(expected[:, field].contiguous(), keys)
        assert np.array_equal(output.view(np.float16).reshape(-1, 2), np.stack([a, b], 1))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_tables_are_bytes_of_levels(bits: int) -> None:
    levels = lloyd_max_levels(128, bits)
    table = lookup.byte_table(levels, bits)
    upper = levels.half()[-len(table) * 2 :]
    low, high = table.view(torch.uint8).view(2, -1)
    assert torch.equal((low.int() | high.int() << 8).to(torch.int16).view(torch.float16), upper)


def test_only_levels_symmetric_about_zero_are_looked_up_by_magnitude() -> None:
    for width in (64, 80, 96, 128, 256):
        levels = lloyd_max_levels(width, 4).half()
        assert torch.equal(levels, -levels.flip(0))


def test_what_fits() -> None:
    assert all(lookup.fits(width, bits) for width, bits in ((128, 3), (96, 1), (80, 4), (64, 3)))
    assert not lookup.fits(80, 3), "ten bytes per token are no whole int32 words"
    assert not lookup.fits(40, 2), "five words of 16 bits are no whole int32 words"
    assert not lookup.fits(32, 4), "of four words per token a thread of the tensor cores has no pair"
    assert not lookup.fits(128, 5)
    assert all(len(PLANES[bits]) == 1 or bits == 3 for bits in PLANES if lookup.fits(128, bits))
