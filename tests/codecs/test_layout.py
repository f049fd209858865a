"""Byte arithmetic: planes, words, channel order, growth - against sums done by hand."""

import pytest
import torch

from kvcache_compress.codecs.layout import PLANES, Field, bytes_per_token, code_fields, words_per_token


def test_planes_add_up() -> None:
    assert all(sum(planes) == bits for bits, planes in PLANES.items())
    assert all(list(planes) == sorted(planes, reverse=True) for planes in PLANES.values())


@pytest.mark.parametrize(("bits", "size"), [(1, 8), (2, 16), (3, 24), (4, 32), (5, 40), (6, 48)])
def test_codes_take_their_bits(bits: int, size: int) -> None:
    """64 codes of b bits are 8 b bytes: no padding, no straddling."""
    fields = code_fields(bits, 64, "x_")
    assert bytes_per_token(fields) == size
    assert [field.name for field in fields] == [f"x_codes{i}" for i in range(len(PLANES[bits]))]
    assert all(field.shape == (8,) for field in fields)


def test_fields_per_group() -> None:
    """A number shared by 32 tokens counts as 1/32 per token."""
    assert Field("scale", torch.float16, (64,), tokens=32).bytes_per_token == 4
    assert Field("scale", torch.float16).bytes_per_token == 2
    assert bytes_per_token((Field("a", torch.int32, (8,)), Field("b", torch.float16, (2,), 4))) == 33


def test_widths_that_do_not_pack() -> None:
    for width in (4, 12, 20, 63):
        with pytest.raises(ValueError, match=f"{width} codes per token cannot be packed: a multiple of 8"):
            words_per_token(width)
