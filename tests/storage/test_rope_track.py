"""Cos and sin of groups: the rows of the right tokens after any steps, and layers that need different ones."""

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
SIZES = [1, 2, 1, 60, 1, 16, 16, 16, 33, 1, 1]
"""Sizes of steps: the first ones end within the sinks, the others cross groups or end with one."""


def embeddings(start: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's cos and sin `[2, T, D]` of tokens from `start` on; the second row has `PADDED` tokens of padding."""
    positions = start + torch.arange(tokens) - PADDED * torch.arange(2)[:, None]
    angles = positions.clamp_min(0)[..., None] * 10_000 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def extend(track: RopeTrack, start: int, tokens: int) -> None:
    track.inputs = embeddings(start, tokens)
    track.extend(start, torch.empty(2, 1, tokens, 1))


def expected(first: int, stride: int, rows: int) -> torch.Tensor:
    """Rows that a track of 600 tokens has, `[2, rows, D]`."""
    cos, sin = embeddings(0, 600)
    return torch.cat([x[:, first::stride, : HEAD_DIM // 2] for x in (cos, sin)], -1)[:, :rows].to(DTYPE)


def held(track: RopeTrack) -> torch.Tensor:
    return track.buffer[:, : track.rows(track.tokens)]


@pytest.mark.parametrize(("first", "stride"), [(4, 1), (7, 32), (200, 32)])
def test_rows_belong_to_the_first_tokens_of_groups(first: int, stride: int) -> None:
    """Steps of any size, and crops into a group, to its start and into the sinks, leave the rows of a single step."""
    track, tokens = RopeTrack(LlamaConfig(), half_layout(HEAD_DIM), first, stride), 1
    extend(track, 0, 1)
    for left in (300, first + 2 * stride + 1, first + stride, first + 1, first, first // 2, 0):
        track.truncate(left)
        tokens = min(tokens, left)
        assert torch.equal(held(track), expected(first, stride, track.rows(tokens)))
        for size in SIZES:
            extend(track, tokens, size)
            tokens += size
            rows = -(-max(0, tokens - first) // stride)
            assert torch.equal(held(track), expected(first, stride, rows))
            assert track.bytes_used() == 2 * rows * HEAD_DIM * 2


@pytest.mark.parametrize(("first", "stride"), [(4, 1), (7, 32), (200, 32)])
def test_static_rows_are_those_of_a_growing_track(first: int, stride: int) -> None:
    """Steps on the device write the same rows; tokens beyond the capacity, and all that begin no group, write none."""
    capacity, states = 128, torch.empty(2, 1, 1, 1)
    track = RopeTrack(LlamaConfig(), half_layout(HEAD_DIM), first, stride)
    track.make_static(capacity, states)
    for start in range(0, 300, 16):
        count = min(16, 300 - start)
        track.inputs = embeddings(start, count)
        track.write(torch.arange(start, start + count), states)
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
