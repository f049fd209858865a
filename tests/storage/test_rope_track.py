"""Cos and sin of groups: the rows of static caches, and layers that need different ones."""

import pytest
import torch
from support.method_cases import half_layout
from support.models.small_model import HEAD_DIM, method_config, small_config
from transformers import LlamaConfig

from kvcache_compress import CompressedCache
from kvcache_compress.methods.commvq.codec import CommVQCodec
from kvcache_compress.storage.shared.rope_track import DTYPE, RopeTrack

LAYERS, PADDED = 3, 5
SPECTRAL, COMMVQ = (method_config(name, LAYERS) for name in ("spectral", "commvq"))


def embeddings(start: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's cos and sin `[2, T, D]` of tokens from `start` on; the second row has `PADDED` tokens of padding."""
    positions = start + torch.arange(tokens) - PADDED * torch.arange(2)[:, None]
    angles = positions.clamp_min(0)[..., None] * 10_000 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def expected(first: int, stride: int, rows: int) -> torch.Tensor:
    """Rows that a track of 600 tokens has, `[2, rows, D]`."""
    cos, sin = embeddings(0, 600)
    return torch.cat([x[:, first::stride, : HEAD_DIM // 2] for x in (cos, sin)], -1)[:, :rows].to(DTYPE)


@pytest.mark.parametrize(("first", "stride"), [(4, 1), (7, 32), (200, 32)])
def test_static_rows(first: int, stride: int) -> None:
    """Steps write the rows of groups' first tokens; tokens beyond the capacity, or that begin no group, write none."""
    capacity, states = 128, torch.empty(2, 1, 1, 1)
    track = RopeTrack(LlamaConfig(), half_layout(HEAD_DIM), first, stride)
    track.make_static(capacity, states)
    for start in range(0, 300, 16):
        count = min(16, 300 - start)
        track.write(torch.arange(start, start + count), embeddings(start, count))
        rows = min(-(-max(0, start + count - first) // stride), capacity // stride)
        assert torch.equal(track.buffer[:, :rows], expected(first, stride, rows))
        assert not track.buffer[:, rows:-1].any()
    groups = torch.arange(capacity // stride)
    assert torch.equal(torch.cat(track.gather(groups), -1), expected(first, stride, len(groups)))
    buffer = track.buffer
    track.make_static(capacity // 2, states)
    assert track.buffer is buffer, "a layer that needs less"
    track.make_static(2 * capacity, states)
    assert torch.equal(track.buffer[:, : len(groups)], expected(first, stride, len(groups)))
    assert not track.buffer[:, len(groups) :].any()


def test_groups_of_two_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommVQCodec, "rope_use", classmethod(lambda *_: "factors"))
    with pytest.raises(ValueError, match=r"spectral for keys and commvq for values need .* groups of 1 and 32 tokens"):
        CompressedCache(small_config(LAYERS), {**SPECTRAL, "values": COMMVQ["values"]})
