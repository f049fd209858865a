"""Packing of codes: hand-computed words, round trips, and levels of codes."""

import pytest
import torch

from kvcache_compress.codecs.layout import PLANE_WORD, PLANES, words_per_token
from kvcache_compress.codecs.packing import channel_order, level_table, look_up, memory_order, pack, unpack

# Channels 0 to 15 make two words: word 0 holds the even channels and word 1 the odd ones, the first channel lowest.
CHANNEL = list(range(16))
BY_HAND = {
    1: ([1, 0, 0, 1] * 4, [[0x55, 0xAA]]),
    2: ([c % 4 for c in CHANNEL], [[0x8888, 0xDDDD]]),
    3: ([c % 8 for c in CHANNEL], [[0x8888, 0xDDDD], [0xCC, 0xCC]]),
    4: (CHANNEL, [[0xECA86420, 0xFDB97531]]),
    5: ([c + 16 * (c >= 8) for c in CHANNEL], [[0xECA86420, 0xFDB97531], [0xF0, 0xF0]]),
    6: ([c + 16 * (c % 4) for c in CHANNEL], [[0xECA86420, 0xFDB97531], [0x8888, 0xDDDD]]),
}


@pytest.mark.parametrize("bits", BY_HAND)
def test_words_worked_out_by_hand(bits: int) -> None:
    channels, words = BY_HAND[bits]
    planes = pack(torch.tensor(channels), bits)
    expected = [torch.tensor(plane).to(PLANE_WORD[w]) for plane, w in zip(words, PLANES[bits], strict=True)]
    assert all(map(torch.equal, planes, expected))


@pytest.mark.parametrize("width", [8, 80, 128])
@pytest.mark.parametrize("bits", range(1, 7))
def test_codes_and_their_levels_come_back(bits: int, width: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (2, 3, 17, width), generator=generator)
    levels = torch.randn(2**bits, generator=generator)
    # A run of tokens of a longer buffer, as a store hands it out.
    packed = pack(codes, bits)
    assert torch.equal(unpack(packed, bits), codes)
    assert sum(plane.nbytes for plane in packed) * 8 == codes.numel() * bits
    planes = tuple(plane[:, :, 4:12] for plane in packed)
    found = look_up(planes, bits, level_table(levels, bits))
    assert found.dtype == torch.float32
    assert torch.equal(channel_order(found), levels[codes[:, :, 4:12]])
    assert torch.equal(memory_order(levels[codes[:, :, 4:12]]), found)


def test_widths_that_do_not_pack() -> None:
    for width in (4, 12, 20, 63):
        with pytest.raises(ValueError, match=f"{width} codes per token cannot be packed: a multiple of 8"):
            words_per_token(width)
