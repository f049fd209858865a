"""Packing of codes: hand-computed words, and round trips."""

import pytest
import torch

from kvcache_compress.codecs.packing import channel_order, level_table, look_up, memory_order, pack, unpack


def test_four_bits_by_hand() -> None:
    """16 channels are 2 words of eight codes; word c holds channels c, c + 2, c + 4 ..., the first lowest."""
    codes = torch.arange(16)
    (words,) = pack(codes, 4)
    assert words.dtype == torch.int32
    # Channels 0, 2, 4, ..., 14 and 1, 3, 5, ..., 15 as hexadecimal digits, the last on the left.
    assert [word & 0xFFFFFFFF for word in words.tolist()] == [0xECA86420, 0xFDB97531]


def test_two_bits_by_hand() -> None:
    (words,) = pack(torch.tensor([0, 1, 2, 3, 3, 2, 1, 1]), 2)
    assert words.dtype == torch.int16
    assert words.tolist()[0] & 0xFFFF == 0b01_01_10_11_11_10_01_00


def test_one_bit_by_hand() -> None:
    (words,) = pack(torch.tensor([1, 0, 0, 1, 1, 0, 1, 0]), 1)
    assert words.dtype == torch.uint8
    assert words.tolist() == [0b01011001]


@pytest.mark.parametrize(
    ("bits", "low", "high"),
    [
        (3, (torch.int16, 2), (torch.uint8, 1)),
        (5, (torch.int32, 4), (torch.uint8, 1)),
        (6, (torch.int32, 4), (torch.int16, 2)),
    ],
)
def test_two_planes_by_hand(bits: int, low: tuple[torch.dtype, int], high: tuple[torch.dtype, int]) -> None:
    """The low plane holds each code's lowest bits, the high plane the rest."""
    codes = torch.tensor([2**bits - 1, 0, 1, 2**bits - 2, 5, 6, 7, 3])
    planes = pack(codes, bits)
    assert [(plane.dtype, plane.shape) for plane in planes] == [(low[0], (1,)), (high[0], (1,))]
    low_word = sum((code % 2 ** low[1]) << (low[1] * i) for i, code in enumerate(codes.tolist()))
    high_word = sum((code >> low[1]) << (high[1] * i) for i, code in enumerate(codes.tolist()))
    assert planes[0].item() % 2 ** (8 * low[1]) == low_word
    assert planes[1].item() % 2 ** (8 * high[1]) == high_word


@pytest.mark.parametrize("width", [8, 16, 40, 64, 80, 128])
@pytest.mark.parametrize("bits", range(1, 7))
def test_round_trip(bits: int, width: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 3, 17, width), generator=torch.Generator().manual_seed(bits))
    planes = pack(codes, bits)
    assert torch.equal(unpack(planes, bits), codes)
    assert sum(plane.nbytes for plane in planes) * 8 == codes.numel() * bits


@pytest.mark.parametrize("width", [8, 16, 40, 64, 80, 128])
@pytest.mark.parametrize("bits", range(1, 7))
def test_look_up_gives_the_levels_of_the_codes(bits: int, width: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (2, 3, 17, width), generator=generator)
    levels = torch.randn(2**bits, generator=generator)
    # A run of tokens of a longer buffer, as a store hands it out.
    planes = tuple(plane[:, :, 4:12] for plane in pack(codes, bits))
    found = look_up(planes, bits, level_table(levels, bits))
    assert found.dtype == torch.float32
    assert torch.equal(channel_order(found), levels[codes[:, :, 4:12]])
    assert torch.equal(memory_order(levels[codes[:, :, 4:12]]), found)


@pytest.mark.parametrize("bits", range(1, 7))
def test_extremes(bits: int) -> None:
    for value in (0, 2**bits - 1):
        codes = torch.full((1, 64), value)
        assert torch.equal(unpack(pack(codes, bits), bits), codes)
    empty = torch.zeros(2, 0, 64, dtype=torch.int64)
    assert unpack(pack(empty, bits), bits).shape == (2, 0, 64)
