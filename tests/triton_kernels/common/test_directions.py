"""The assembly for angles, run by a PTX interpreter, against the codec's unit vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.ptx import inline

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.base import Codec
from kvcache_compress.codecs.layout import words_per_token
from kvcache_compress.triton_kernels.common import assembly, directions

TOKENS = 64
TEXTS = {
    4: directions.FOUR_BITS,
    5: directions.FIVE_BITS,
}


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    """The assembly is executed here, in NumPy, whichever device the other tests use."""
    with torch.device("cpu"):
        yield


def points_of(bits: int, reconstruction: str, make_codec: Callable[..., Codec]) -> torch.Tensor:
    codec = make_codec("polarquant_rope", {"angle_bits": bits, "reconstruction": reconstruction}, "keys", 64)
    return codec.points.cpu()


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize(("bits", "reconstruction"), [(4, "midpoint"), (4, "edge"), (5, "midpoint")])
@pytest.mark.parametrize("width", [64, 96, 128])
def test_text_gives_cos_and_sin_of_the_codes(
    width: int, bits: int, reconstruction: str, keys: bool, make_codec: Callable[..., Codec]
) -> None:
    points = points_of(bits, reconstruction, make_codec)
    codes = torch.randint(0, 2**bits, (TOKENS, width), generator=torch.Generator().manual_seed(bits))
    low, *high = packing.pack(codes, bits)
    held = inline.held(low, keys)
    for plane in high:
        held += inline.held(plane.contiguous().view(torch.int32).repeat_interleave(4, -1), keys)
        held += inline.held(assembly.places(plane.shape[-1]).expand(TOKENS, -1), keys)
    held += inline.constants(directions.tables(points).tolist(), len(held[0]))
    text, constraints = TEXTS[bits].value
    assert len(held) == constraints.count(",r")
    outputs = inline.run(text, {f"${16 + i}": register for i, register in enumerate(held)}, 16)
    expected = points.half()[codes].view(torch.int16).view(TOKENS, 8, words_per_token(width), 2)
    for field in range(8):
        for output, part in zip(outputs[field::8], expected[:, field].unbind(-1), strict=True):
            numbers, wanted = output.view(np.float16), inline.held(part, keys)[0].view(np.float16)
            # The cosine of a right angle is only nearly zero.
            assert np.allclose(numbers, wanted, rtol=0, atol=1e-6)


def test_what_fits(make_codec: Callable[..., Codec]) -> None:
    assert directions.fits(points_of(4, "edge", make_codec), 64)
    assert directions.fits(points_of(5, "midpoint", make_codec), 64)
    assert not directions.fits(points_of(5, "edge", make_codec), 64), (
        "cos and sin of a cell's edge are no mirror images"
    )
    assert not directions.fits(points_of(3, "midpoint", make_codec), 64)
    assert not directions.fits(points_of(5, "midpoint", make_codec), 40), "five bytes are no whole words"
