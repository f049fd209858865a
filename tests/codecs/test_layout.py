"""Byte arithmetic: planes, words, channel order, growth - against sums done by hand."""

import pytest
import torch

from kvcache_compress.codecs.layout import Field, bytes_per_token, words_per_token


def test_fields_per_group() -> None:
    """A number shared by 32 tokens counts as 1/32 per token."""
    assert Field("scale", torch.float16, (64,), tokens=32).bytes_per_token == 4
    assert Field("scale", torch.float16).bytes_per_token == 2
    assert bytes_per_token((Field("a", torch.int32, (8,)), Field("b", torch.float16, (2,), 4))) == 33


def test_widths_that_do_not_pack() -> None:
    for width in (4, 12, 20, 63):
        with pytest.raises(ValueError, match=f"{width} codes per token cannot be packed: a multiple of 8"):
            words_per_token(width)
