"""Scales of KIVI's values times weights, in float16."""

import pytest
import torch
from support.kernels.segment_makers import make_codec

from kvcache_compress.storage.checks import LONGEST
from kvcache_compress.triton_kernels.decode import kivi


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_no_weight_is_too_large_for_float16(bits: int) -> None:
    longest = torch.zeros(1, 1, 1, 64)
    longest[..., :2] = torch.tensor([LONGEST, -LONGEST]) / 2**0.5
    codec = make_codec("kivi", {"bits": bits, "group_size": 32}, "values", 64)
    scale = codec.encode(longest)[-2]
    weight = torch.tensor(kivi.weight_unit(bits), dtype=torch.float16)  # of a token that outweighs all others
    assert (scale * weight).isfinite().all()
    assert scale.amax() * weight > LONGEST / 3, "as large as it may be"
