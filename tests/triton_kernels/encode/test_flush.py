"""Tokens that leave a tail are checked, and encoded by a kernel as PyTorch's operators encode them."""

import copy
from typing import Any, Literal

import pytest
import torch
from support.files.spectral_files import statistics_of
from support.kernels.device import DEVICE, INTERPRETED
from support.kernels.encode_cases import assert_equal_but_for_ties
from support.models.small_model import small_config, small_model

from kvcache_compress import CompressedCache
from kvcache_compress.bench.layers import use_backend
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.triton_kernels.encode import launch as encode

HEADS, PROMPT = 2, 90
Options = dict[str, Any]
TURBOQUANT: Options = {"method": "turboquant", "bits": 4}
FRACTIONAL: Options = {"method": "turboquant", "bits": 2.5, "scalar": "unbiased"}
TRELLIS: Options = {"method": "turboquant", "bits": 2, "codebook": "trellis"}
TRELLISES: Options = {"method": "turboquant", "bits": 1.5, "codebook": "trellis"}
GROUPS: Options = {"method": "kivi", "bits": 3, "group_size": 64}
SKETCHES: Options = {"method": "qjl", "outlier_channels": 8}
PAIRS: Options = {"method": "polarquant_rope", "scalar": "match"}
TREE: Options = {"method": "polarquant_recursive"}
RADII: Options = {"method": "polarquant_recursive", "levels": 3, "bits": [4, 2, 2], "radius_bits": 16}
ANCHORS: Options = {"method": "spectral", "bits": 2, "statistics": statistics_of(small_config(1, head_dim=48), "flush")}
OPTIONS = {
    "4": (TURBOQUANT, TURBOQUANT),
    "2.5": (FRACTIONAL, FRACTIONAL),
    "trellis": (TRELLIS, TRELLISES),
    "groups": (GROUPS, GROUPS),
    "sketch": ({"method": "qjl"}, TURBOQUANT),
    "sketches": (SKETCHES, TURBOQUANT),
    "tree": (TREE, TREE),
    "blocks": (RADII, RADII),
    "pairs": (PAIRS, TURBOQUANT),
    "pairs by channel": ({**PAIRS, "radius_scale": "channel"}, TURBOQUANT),
    "anchors": (ANCHORS, TURBOQUANT),
}
"""Configs of keys and values."""


def filled(
    backend: str, keys: Options = TURBOQUANT, values: Options = TURBOQUANT, recent: int = 10, dim: int = 48
) -> CompressedLayer:
    """Layer filled with the same prompt and tokens in every call, just before a step that encodes."""
    config = {"keys": keys, "values": values, "sink_tokens": 4, "recent_tokens": recent, "backend": "torch"}
    layer = CompressedCache(small_model(1, head_dim=dim).config, config).layers[0]
    assert isinstance(layer, CompressedLayer)
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    tokens = torch.randn(2, HEADS, PROMPT + 80, dim, generator=generator)
    layer.update(tokens[:, :, :PROMPT], 2 * tokens[:, :, :PROMPT])
    use_backend(layer, backend)
    at = PROMPT
    while layer.sides["keys"].tail.tokens < recent + layer.flush_tokens:
        step(layer, tokens[:, :, at : at + 1])
        at += 1
    return layer


def step(layer: CompressedLayer, token: torch.Tensor) -> None:
    layer.update(token, 2 * token)


@pytest.mark.parametrize(
    ("recent", "name"),
    [*((0, name) for name in OPTIONS if name != "trellis" or not INTERPRETED), (10, "4"), (10, "anchors")],
)
def test_equals_operators(name: str, recent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trellis codes, whose search the interpreter takes long for, are compared as compiled (`test_compiled.py`)."""
    dim = 64 if name in ("groups", "trellis") else 48
    ours, theirs = (filled(backend, *OPTIONS[name], recent, dim) for backend in ("triton", "torch"))
    before = ours.packed_tokens
    token = torch.randn(2, HEADS, 1, dim)
    calls, launch = [], encode.encoded
    monkeypatch.setattr(encode, "encoded", lambda *given: calls.append(given[1].shape[2]) or launch(*given))
    for layer in (ours, theirs):
        step(layer, token)
    assert calls == [ours.flush_tokens] * 2, "a launch per side"
    assert ours.packed_tokens == theirs.packed_tokens == before + ours.flush_tokens
    sides: tuple[Literal["keys", "values"], ...] = ("keys", "values")
    for side in sides:
        mine, yours = ours.sides[side], theirs.sides[side]
        assert torch.equal(mine.tail.view(), yours.tail.view())
        stored = [state.store.read(0, ours.packed_tokens) for state in (mine, yours)]
        assert_equal_but_for_ties(mine.codec, *stored, rope=mine.rope(0, ours.packed_tokens))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU's findings are read later")
@pytest.mark.parametrize(("name", "bad"), [("keys", float("nan")), ("values", float("inf")), ("values", 5e4)])
def test_what_cannot_be_packed_is_refused(name: Literal["keys", "values"], bad: float) -> None:
    """Bad vectors in one head are refused, and nothing is changed in any."""
    layer = filled("triton")
    layer.sides[name].tail.buffer[1, 0, 31, [0, 40]] = bad
    held = copy.deepcopy({side: state.tensors() for side, state in layer.sides.items()})
    token = torch.randn(2, HEADS, 1, 48)
    with pytest.raises(ValueError, match=f"{name} of layer 0 hold NaN"):
        step(layer, token)
    for side, state in layer.sides.items():
        for key, x in state.tensors().items():
            torch.testing.assert_close(x, held[side][key], rtol=0, atol=0, equal_nan=True)
    layer.sides[name].tail.buffer[1, 0, 31] = 1.0
    packed = layer.packed_tokens
    step(layer, token)
    assert layer.packed_tokens == packed + 32


def test_what_stays_is_not_checked() -> None:
    layer = filled("triton")
    layer.sides["keys"].tail.buffer[0, 0, 32] = torch.nan
    packed = layer.packed_tokens
    step(layer, torch.randn(2, HEADS, 1, 48))
    assert layer.packed_tokens == packed + 32
