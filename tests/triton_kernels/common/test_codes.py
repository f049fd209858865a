"""Bit planes: the kernels' packing and unpacking against words worked out by hand."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.layout import PLANE_WORD, PLANES, code_order, padded_width, padded_words, words_per_token
from kvcache_compress.triton_kernels.common.codes import load_codes, store_codes, tile_channels
from kvcache_compress.triton_kernels.common.lookup import joined

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


@triton.jit
def load_kernel(
    p_low, p_high, p_out, p_channels, N,
    BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_t = tl.arange(0, BLOCK)
    b_codes = load_codes(p_low, p_high, 0, o_t, o_t < N, BITS, WORDS, PADDED, WORDS)
    for i in tl.static_range(len(b_codes)):
        o_c = i * b_codes[i].shape[1] + tl.arange(0, b_codes[i].shape[1])
        o_d, m_d = tile_channels(i, WORDS, PADDED)
        tl.store(p_out + o_t[:, None] * (8 * PADDED) + o_c[None, :], b_codes[i], mask=(o_t < N)[:, None])
        tl.store(p_channels + o_c, tl.where(m_d, o_d, -1))


@triton.jit
def join_kernel(p_tiles, p_out, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    o_t, o_c = tl.arange(0, BLOCK)[:, None], tl.arange(0, PADDED)[None, :]
    b_tiles = ()
    for j in tl.static_range(8):
        b_tile = tl.load(p_tiles + o_t * (8 * PADDED) + j * PADDED + o_c)
        b_tiles = b_tiles + (b_tile,)  # noqa: RUF005 - Triton knows no unpacking
    b_joined = joined(b_tiles)
    for i in tl.static_range(len(b_joined)):
        o_p = i * b_joined[i].shape[1] + tl.arange(0, b_joined[i].shape[1])[None, :]
        tl.store(p_out + o_t * (8 * PADDED) + o_p, b_joined[i])


@triton.jit
def store_kernel(
    p_codes, p_low, p_high, N,
    BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_n = tl.arange(0, BLOCK)
    o_i = tl.arange(0, 8)[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
    m_n = o_n < N
    b_codes = tl.load(p_codes + o_n[:, None, None] * (8 * PADDED) + o_i[None, :, :], mask=m_n[:, None, None], other=0)
    store_codes(b_codes, p_low, p_high, o_n, m_n, BITS, WORDS, PADDED)


def in_kernel_order(codes: torch.Tensor) -> torch.Tensor:
    """Reorder codes `[N, width]` to the kernels' order, int32 `[N, padded width]`."""
    width = codes.shape[-1]
    padded = torch.zeros(len(codes), padded_width(width), dtype=torch.int32)
    padded[:, code_order(width)] = codes.to(torch.int32)
    return padded


def stored(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Planes that `store_codes` writes for codes `[N, width]`, followed by a poisoned row."""
    rows, width = codes.shape
    words = words_per_token(width)
    planes = tuple(torch.full((rows + 1, words), -1).to(PLANE_WORD[plane]) for plane in PLANES[bits])
    store_kernel[(1,)](
        p_codes=in_kernel_order(codes), p_low=planes[0], p_high=planes[-1], N=rows,
        BITS=bits, WORDS=words, PADDED=padded_words(width), BLOCK=triton.next_power_of_2(rows + 1),
    )  # fmt: skip
    assert all((plane[-1] == torch.full((words,), -1).to(plane.dtype)).all() for plane in planes)
    return tuple(plane[:-1] for plane in planes)


def loaded(planes: tuple[torch.Tensor, ...], bits: int, width: int) -> torch.Tensor:
    """Codes in kernel order that `load_codes` reads from `planes`."""
    rows = len(planes[0])
    out = torch.empty(rows, padded_width(width), dtype=torch.int32)
    channels = torch.empty(padded_width(width), dtype=torch.int32)
    load_kernel[(1,)](
        p_low=planes[0], p_high=planes[-1], p_out=out, p_channels=channels, N=rows,
        BITS=bits, WORDS=words_per_token(width), PADDED=padded_words(width), BLOCK=triton.next_power_of_2(rows + 1),
    )  # fmt: skip
    expected = torch.full_like(channels, -1)
    expected[code_order(width)] = torch.arange(width, dtype=torch.int32)
    assert torch.equal(channels, expected)
    return out


@pytest.mark.parametrize("bits", BY_HAND)
def test_words_worked_out_by_hand(bits: int) -> None:
    channels, words = BY_HAND[bits]
    codes = torch.tensor([channels, channels[::-1]])
    expected = [torch.tensor(plane).to(PLANE_WORD[w]) for plane, w in zip(words, PLANES[bits], strict=True)]
    for planes in (stored(codes, bits), packing.pack(codes, bits)):
        assert [plane[0].tolist() for plane in planes] == [plane.tolist() for plane in expected]
    assert torch.equal(loaded(stored(codes, bits), bits, 16), in_kernel_order(codes))
    assert packing.unpack(packing.pack(codes, bits), bits).tolist() == codes.tolist()


@pytest.mark.parametrize("bits", PLANES)
@pytest.mark.parametrize("width", [8, 32, 40, 48, 64, 80, 128])
def test_kernels_equal_packing(bits: int, width: int) -> None:
    codes = torch.randint(
        0, 2**bits, (5, width), generator=torch.Generator(torch.get_default_device()).manual_seed(width)
    )
    planes = stored(codes, bits)
    assert all(torch.equal(*pair) for pair in zip(planes, packing.pack(codes, bits), strict=True))
    assert torch.equal(loaded(planes, bits, width), in_kernel_order(codes))


def test_joined_tiles_of_fields_are_in_code_order() -> None:
    tiles = torch.arange(4 * 64, dtype=torch.int32).view(4, 64)
    out = torch.empty_like(tiles)
    join_kernel[(1,)](p_tiles=tiles, p_out=out, BLOCK=4, PADDED=8)
    assert torch.equal(out, tiles)


@pytest.mark.parametrize("width", [8, 16, 24, 48, 80, 96, 128, 256])
def test_code_order_keeps_channels_apart(width: int) -> None:
    order = code_order(width)
    assert len(order.unique()) == width
    assert int(order.max()) < padded_width(width)
