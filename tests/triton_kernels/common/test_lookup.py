"""The kernels' assembly, run by a PTX interpreter, against `packing.unpack` and the codebook."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.ptx import inline

from kvcache_compress.codecs import packing, trellis
from kvcache_compress.codecs.layout import PLANES, words_per_token
from kvcache_compress.codecs.lloyd_max import lloyd_max_levels, outward
from kvcache_compress.triton_kernels.common import assembly, in_place, lookup
from kvcache_compress.triton_kernels.decode import trellis_codes

TOKENS = 64
TEXTS = {
    (2, True): lookup.TWO_BITS,
    (2, False): lookup.TWO_BITS,
    (3, True): lookup.THREE_BITS,
    (3, False): lookup.THREE_BITS,
    (4, True): lookup.FOUR_EVEN_BITS,
    (4, False): lookup.FOUR_BITS,
}
"""Assembly and register constraints by bits and evenness of the levels."""


def halves(plane: torch.Tensor, keys: bool) -> inline.Register:
    """Registers of two 16-bit words, loaded directly or out of 32-bit words."""
    (both,) = inline.held(plane, keys)
    if plane.shape[-1] < 16:
        twos = plane.contiguous().view(torch.int32).repeat_interleave(2, -1)
        registers = inline.held(twos, keys) + inline.held(assembly.places(plane.shape[-1]).expand(TOKENS, -1), keys)
        (picked,) = inline.run(assembly.HALF.value, {f"${1 + i}": register for i, register in enumerate(registers)}, 1)
        assert np.array_equal(picked, both)
    return both


def operands(bits: int, planes: tuple[torch.Tensor, ...], table: list[int], keys: bool) -> dict[str, inline.Register]:
    """Operands that Triton passes to assembly: two elements of each argument (`pack=2`), 16-bit ones in a register."""
    held: list[inline.Register] = []
    if bits == 4:
        held += inline.held(planes[0], keys)
    elif bits > 1:
        held.append(halves(planes[0], keys))
    if bits in (1, 3):
        held += inline.held(planes[-1].contiguous().view(torch.int32).repeat_interleave(4, -1), keys)
        held += inline.held(assembly.places(planes[0].shape[-1]).expand(TOKENS, -1), keys)
    held += inline.constants(table, len(held[0]))
    return {f"${8 + i}": register for i, register in enumerate(held)}


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    """The assembly is executed here, in NumPy, whichever device the other tests use."""
    with torch.device("cpu"):
        yield


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize(("bits", "even"), TEXTS)
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_text_gives_the_levels_of_the_codes(width: int, bits: int, even: bool, keys: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (TOKENS, width), generator=generator)
    planes = packing.pack(codes, bits)
    levels = lloyd_max_levels(width, bits).half()
    if bits == 4:
        levels = outward(levels)
    if even:
        levels = (torch.arange(2**bits) - (2**bits - 1) / 2).half() * lookup.unit(bits)
    table = [] if even and bits == 4 else assembly.byte_table(levels, bits).tolist()
    inputs = operands(bits, planes, table, keys)
    text, constraints = TEXTS[bits, even].value
    assert len(inputs) == constraints.count(",r")
    outputs = inline.run(text, inputs, 8)
    expected = levels[codes].view(torch.int16).view(TOKENS, 8, words_per_token(width))
    for field, output in enumerate(outputs):
        assert np.array_equal(output, inline.held(expected[:, field], keys)[0])


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_text_gives_the_levels_of_trellis_codes(width: int, bits: int, keys: bool) -> None:
    codes = torch.randint(0, 2**bits, (TOKENS, width), generator=torch.Generator().manual_seed(bits))
    planes = packing.pack(codes, bits)
    levels = trellis.trellis_levels(width, bits).half()
    words = planes[0].int() & 0xFFFF
    held = inline.held(words << 16 | words.roll(1, -1), keys)  # as `load_pairs` returns them
    if bits == 3:
        held += inline.held(planes[1].contiguous().view(torch.int32).repeat_interleave(4, -1), keys)
        held += inline.held(assembly.places(words.shape[-1]).expand(TOKENS, -1), keys)
    held += inline.constants(assembly.byte_table(levels, bits + 1).tolist(), len(held[0]))
    texts = {
        2: trellis_codes.TRELLIS_TWO,
        3: trellis_codes.TRELLIS_THREE,
    }
    text, constraints = texts[bits].value
    inputs = {f"${8 + i}": register for i, register in enumerate(held)}
    assert len(inputs) == constraints.count(",r")
    outputs = inline.run(text, inputs, 8)
    looked_up = packing.channel_order(trellis.look_up(planes, bits, levels))
    expected = looked_up.view(torch.int16).view(TOKENS, 8, words_per_token(width))
    for field, output in enumerate(outputs):
        assert np.array_equal(output, inline.held(expected[:, field], keys)[0])


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("width", [96, 128, 256])
def test_text_gives_the_levels_of_trellis_codes_in_words_of_32_bits(width: int, bits: int, keys: bool) -> None:
    codes = torch.randint(0, 2**bits, (TOKENS, width), generator=torch.Generator().manual_seed(width))
    planes = packing.pack(codes, bits)
    levels = trellis.trellis_levels(width, bits).half()
    twos = planes[0].contiguous().view(torch.int32)
    held = inline.held(twos, keys) + inline.held(twos.roll(1, -1), keys)
    if bits == 3:
        held.append(halves(planes[1].contiguous().view(torch.int16), keys))
    held += inline.constants(trellis_codes.trellis_table(levels, bits, 16).tolist(), len(held[0]))
    inputs = {f"${16 + i}": register for i, register in enumerate(held)}
    text, constraints = {
        2: trellis_codes.TWO_WORDS,
        3: trellis_codes.THREE_WORDS,
    }[bits].value
    assert len(inputs) == constraints.count(",r")
    outputs = inline.run(text, inputs, 16)
    looked_up = packing.channel_order(trellis.look_up(planes, bits, levels))
    expected = looked_up.view(torch.int16).view(TOKENS, 8, words_per_token(width) // 2, 2)
    for field, output in enumerate(outputs):
        assert np.array_equal(output, inline.held(expected[:, field % 8, :, field // 8], keys)[0])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_tables_are_bytes_of_levels(bits: int) -> None:
    levels = lloyd_max_levels(128, bits)
    table = assembly.byte_table(levels, bits)
    upper = levels.half()[-len(table) * 2 :]
    low, high = table.view(torch.uint8).view(2, -1)
    assert torch.equal((low.int() | high.int() << 8).to(torch.int16).view(torch.float16), upper)


def test_only_levels_symmetric_about_zero_are_looked_up_by_magnitude() -> None:
    for width in (64, 80, 96, 128, 256):
        negative, positive = outward(lloyd_max_levels(width, 4).half()).chunk(2)
        assert torch.equal(negative, -positive)


def test_what_fits() -> None:
    assert all(lookup.fits(width, bits) for width, bits in ((128, 3), (96, 1), (80, 4), (64, 3)))
    assert not lookup.fits(80, 3), "ten bytes per token are no whole int32 words"
    assert not lookup.fits(40, 2), "five words of 16 bits are no whole int32 words"
    assert not lookup.fits(32, 4), "of four words per token a thread of the tensor cores has no pair"
    assert not lookup.fits(128, 5)
    assert all(len(PLANES[bits]) == 1 or bits == 3 for bits in PLANES if lookup.fits(128, bits))


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_text_leaves_codes_in_place(width: int, bits: int, keys: bool) -> None:
    """As bits of float16 below its normal numbers, a code at `place` is that power of two times the smallest one."""
    codes = torch.randint(0, 2**bits, (TOKENS, width), generator=torch.Generator().manual_seed(bits))
    planes = packing.pack(codes, bits)
    text, constraints = {
        1: in_place.PLACED_ONE,
        2: in_place.PLACED_TWO,
        4: in_place.PLACED_FOUR,
    }[bits].value
    inputs = operands(bits, planes, [], keys)
    assert len(inputs) == constraints.count(",r")
    outputs = inline.run(text, inputs, 8)
    fields = codes.view(TOKENS, 8, words_per_token(width))
    for field, output in enumerate(outputs):
        numbers = (fields[:, field] << in_place.place(field, bits)).to(torch.int16)
        assert numbers.max() < 1024, "no bit of the exponent"
        assert np.array_equal(output, inline.held(numbers, keys)[0])


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_maps_of_codes_in_place_give_levels(bits: int, keys: bool) -> None:
    """Placed codes and the constants of the middle, multiplied with the map, are levels times the basis."""
    generator = torch.Generator().manual_seed(bits)
    rows = torch.randn(1, 64, 64, generator=generator, dtype=torch.float64)
    codes = torch.randint(0, 2**bits, (64,), generator=generator)
    fields = torch.arange(8).repeat_interleave(8)
    placed = codes * 2.0 ** torch.tensor([in_place.place(int(field), bits) for field in fields])
    operand = torch.cat([placed, torch.full((16,), 2.0**bits)]).double()
    expected = (codes - (2**bits - 1) / 2).double() @ rows[0]
    found = operand @ in_place.in_place(rows, bits, keys)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
