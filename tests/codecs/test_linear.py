"""Linear codecs, with an example computed by hand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcache_compress.codecs.base import CodecContext, Fields, MethodOptions, Rope
from kvcache_compress.codecs.layout import Field
from kvcache_compress.codecs.linear import LinearCodec, Part
from kvcache_compress.codecs.transforms.centering import Center


class Options(MethodOptions):
    center: Center | None = None


class ThreeRows(LinearCodec):
    """Codec with three rows: the two channels, which share a scale, and their diagonal without a scale."""

    name = "three_rows"

    @classmethod
    def layout(cls, options: Any, side: Any, head_dim: int) -> tuple[Field, ...]:
        return Field("numbers", torch.float32, (3,)), Field("scale", torch.float32), Field("group", torch.int8, (), 4)

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        """Store the channels unchanged, with a scale of one."""
        ones, group = torch.ones(x.shape[:3]), torch.zeros(*x.shape[:2], x.shape[2] // 4, dtype=torch.int8)
        return torch.nn.functional.pad(x, (0, 1)), ones, group

    def parts(self, fields: Fields) -> Iterator[Part]:
        yield Part(slice(2), fields[0][..., :2], fields[1])
        yield Part(slice(2, 3), fields[0][..., 2:])


@pytest.fixture
def codec() -> ThreeRows:
    return ThreeRows(Options(), CodecContext("keys", 2, 1, 0, 0, 16, torch.float32, torch.device("cpu")))


@pytest.mark.parametrize("mean", [False, True])
def test_by_hand(codec: ThreeRows, mean: bool) -> None:
    codec.basis = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
    fields = (torch.tensor([[[[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]]]), torch.tensor([[[2.0, 5.0]]]))
    decoded = torch.tensor([[[[5.0, 7.0], [0.0, 5.0]]]])
    if mean:
        codec.set_statistics({"mean": torch.tensor([[10.0, 0.0]])})
        decoded[..., 0] += 10
    assert torch.equal(codec.decode(fields), decoded)
    x = torch.tensor([[[[3.0, -1.0]] * 4]])
    assert torch.equal(codec.decode(codec.encode(x)) - codec.decode(codec.encode(0 * x)), x)
    mapped = codec.map_query(torch.tensor([[[[1.0, 2.0]]]]))
    assert mapped.flatten().tolist() == [1, 2, 3] + mean * [10]
    assert codec.score(mapped, fields).flatten().tolist() == [19 + 10 * mean, 10 + 10 * mean]
    if not mean:
        summed = codec.accumulate(torch.tensor([[[[0.5, 2.0]]]]), fields)
        assert summed.flatten().tolist() == [1, 12, 1.5]
        assert codec.map_output(summed).flatten().tolist() == [2.5, 13.5]


def test_the_mean_is_that_of_the_first_tokens(codec: ThreeRows) -> None:
    assert (codec.center, codec.group) == ("auto", 4)
    x = torch.tensor([[[[1.0, 0.0], [3.0, 0.0]]]])
    codec.prepare(x)
    assert codec.mean is not None
    assert codec.mean.tolist() == [[2.0, 0.0]]


def test_a_basis_is_needed(codec: ThreeRows) -> None:
    with pytest.raises(RuntimeError, match=r"the basis of three_rows must be set by prepare\(\) before"):
        codec.map_query(torch.ones(1, 1, 1, 2))
