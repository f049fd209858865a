"""Bad inputs: each gives a clear error, which leaves the cache as it was, or a correct result.

`saved_files.outcome` defines a clear error; `test_saving.py` does the same for files.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.files.saved_files import ACCEPTED, config, fill, filled, outcome, states
from support.models import family_cases
from support.models.small_model import METHODS, method_config, small_config

from kvcache_compress import (
    CommVQCache,
    CompressedCache,
    CompressionConfig,
    KIVICache,
    PolarQuantCache,
    QJLCache,
    TurboQuantCache,
    load_config,
)
from kvcache_compress.config import get_method
from kvcache_compress.storage.packed_store import TailBuffer

ODD: tuple[Any, ...] = (
    -1, 0, 7, 2**40, 10**5000, 1.5, float("nan"), float("inf"), "x", "4", "x" * 10**6, "", None, [], {}, [1, 2], True
)  # fmt: skip


TURBOQUANT: dict[str, Any] = {"keys": "turboquant", "values": "turboquant"}
SMALL: dict[str, Any] = {"sink_tokens": 4, "recent_tokens": 8}


def contents(cache: CompressedCache) -> list[Any]:
    """Keys, values and reported sizes of a cache."""
    held: list[Any] = []
    for layer in cache.layers:
        pair = [None if x is None else x.clone() for x in (layer.keys, layer.values)]
        held.append((layer.get_seq_length(), getattr(layer, "packed_tokens", 0), *pair))
    return held


def same(one: list[Any], other: list[Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return (
            torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a is b or a == b)
        )

    return all(equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True))


def use(cache: CompressedCache) -> None:
    """Use a cache that was accepted: a prompt, steps and a crop give finite results."""
    for index in range(len(cache.layers)):
        for tokens in (90, 1, 2):
            cache.update(*states(tokens, index), index)
    cache.crop(-5)
    assert cache.packed_tokens > 0 or cache.compression.recent_tokens > 88 or cache.compression.sink_tokens > 88
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (2, 2, 88, 32)
        assert layer.keys.isfinite().all()
        assert layer.values.isfinite().all()


def assert_same_kind(kept: Any, value: Any) -> None:
    assert all(isinstance(kept, kind) == isinstance(value, kind) for kind in (bool, str))


@pytest.mark.parametrize("method", METHODS)
def test_options(method: str, one_era: None) -> None:
    """Booleans, numbers and texts are not converted to each other, except YAML's booleans for `center`."""
    base = method_config(method)
    found = []
    for option in get_method(method).Options.model_fields:
        for value in ODD:
            for side in ("keys", "values"):
                given = copy.deepcopy(base)
                given[side] = {**given["keys"], option: value}
                found.append(outcome(lambda given=given: use(CompressedCache(small_config(), given))))
                if found[-1] == ACCEPTED and value is not None and option != "center":
                    assert_same_kind(getattr(getattr(load_config(given), side).options(), option), value)
    refused = [text for text in found if text != ACCEPTED]
    assert len(found) > 50
    assert len(refused) > len(found) / 2
    assert all(10 < len(text) < 1000 for text in refused)


def test_fields_of_a_configuration() -> None:
    found = []
    for name in [*CompressionConfig.model_fields, "unknown"]:
        for value in ODD:
            if (name, value) != ("max_cache_len", 7):  # which is used up by the first prompt
                given = {**method_config("turboquant"), name: value}
                found.append(outcome(lambda given=given: use(CompressedCache(small_config(), given))))
                if found[-1] == ACCEPTED and name not in ("keys", "values"):
                    assert_same_kind(getattr(load_config(given), name), value)
    assert len(found) > 100
    assert found.count(ACCEPTED) < 25


def test_constructors() -> None:
    """Constructors with wrong types, misspelled presets and rules for missing layers raise clear errors."""
    rows: list[Callable[[], Any]] = []
    turboquant = method_config("turboquant")
    names = ("turboquant-5bit", "TURBOQUANT-4BIT", "../turboquant-4bit", "no.yaml", "a\nb")
    for value in (*ODD, *names, object(), b"x", print):
        rows += [
            lambda value=value: load_config(value),
            lambda value=value: CompressedCache(small_config(), value),
            lambda value=value: CompressedCache(value, turboquant),
            lambda value=value: CompressedCache(value, value),
            lambda value=value: CompressedCache.load(value, small_config()),
            lambda value=value: CompressedCache(
                small_config(), {**turboquant, "layers": [{"match": value, "sink_tokens": 3}]}
            ),
        ]
        for kind in (TurboQuantCache, KIVICache, QJLCache, PolarQuantCache, CommVQCache):
            rows.append(lambda value=value, kind=kind: kind(value))
    found = [outcome(row) for row in rows]
    assert len(found) > 200
    assert found.count(ACCEPTED) < 15


def tensors(tokens: int) -> dict[str, tuple[Any, Any]]:
    """Keys and values that do not fit a cache of two rows, two heads and D = 32, each in its own way."""
    good = torch.randn(2, 2, tokens, 32, generator=torch.Generator().manual_seed(1))
    shapes = {
        "3-D": (2, tokens, 32), "5-D": (2, 2, tokens, 32, 1), "heads": (2, 3, tokens, 32), "batch": (3, 2, tokens, 32),
        "no batch": (0, 2, tokens, 32), "D 16": (2, 2, tokens, 16), "D 1": (2, 2, tokens, 1),
        "D 64": (2, 2, tokens, 64),
    }  # fmt: skip
    found: dict[str, tuple[Any, Any]] = {name: (torch.ones(shape),) * 2 for name, shape in shapes.items()}
    for name, kind in (("integers", torch.long), ("booleans", torch.bool), ("complex", torch.complex64)):
        found[name] = (good.to(kind),) * 2
    for name, other in (("D", good[..., :1]), ("T", good[:, :, 1:]), ("H", good[:, :1]), ("B", good[:1])):
        found |= {f"{name} of values": (good, other), f"{name} of keys": (other, good)}
    for name, other in (("meta", good.to("meta")), ("None", None), ("list", [1.0]), ("numpy", good.numpy())):
        found |= {f"{name}, values": (good, other), f"{name}, keys": (other, good)}
    return found


@pytest.fixture(scope="module")
def cache() -> CompressedCache:
    """A cache of 60 tokens in four layers: two with the chosen methods, one with CommVQ's keys, one dense."""
    return filled()


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_updates(cache: CompressedCache, layer: int, tokens: int) -> None:
    """Steps and chunks that do not fit are refused, also by an empty cache if no cache could hold them."""
    before = contents(cache)
    for name, pair in tensors(tokens).items():
        assert outcome(lambda pair=pair: cache.update(*pair, layer)) != ACCEPTED, name
        assert same(contents(cache), before), name
    for name in ("3-D", "5-D", "T of values", "B of keys", "H of keys", "integers", "None, keys", "numpy, values"):
        new = CompressedCache(config(), cache.compression)
        pair = tensors(tokens)[name]
        assert outcome(lambda new=new, pair=pair: new.update(*pair, layer)) != ACCEPTED, name
        assert new.get_seq_length(layer) == 0
        use(new)


@pytest.mark.parametrize("tokens", [1, 40, 150])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_numbers_that_cannot_be_packed(value: float, tokens: int) -> None:
    """Vectors that are not finite, or too long for 16 bits, are refused when they would be packed, without a trace."""
    for layer in (0, 1, 3):
        for side in (0, 1):
            cache = filled()
            before = contents(cache)
            pair = states(tokens)
            pair[side][1, 0, tokens // 4, 5] = value
            accepted = outcome(lambda cache=cache, pair=pair, layer=layer: cache.update(*pair, layer)) == ACCEPTED
            assert accepted == (tokens < 129), "longer ones are packed at once"
            if accepted:
                cache.layers[layer].crop(-tokens)
            else:
                new = CompressedCache(config(), cache.compression)
                assert outcome(lambda new=new, pair=pair, layer=layer: new.update(*pair, layer)) != ACCEPTED
                assert new.get_seq_length(layer) == 0
                use(new)
            assert same(contents(cache), before), (layer, side)


def t(*values: Any, **options: Any) -> torch.Tensor:
    return torch.tensor(values, **options)


ROWS: dict[str, Any] = {
    "too large": t(0, 5), "too small": t(-3), "fractions": t(0.0, 1.0), "2-D": t([0, 1]),
    "no dimension": torch.tensor(0),
    "None": None, "number": 0, "string": "x", "mask too long": t(True, False, True), "mask too short": t(True),
    "ellipsis": ..., "list too large": [7], "nested": [[0, 1]], "object": object(), "complex": t(1j), "huge": t(2**60),
}  # fmt: skip
COUNTS: dict[str, Any] = {
    "zero": 0, "negative": -1, "fraction": 1.5, "None": None, "string": "2", "list": [1], "two": t(1, 2),
    "NaN": torch.nan,
}  # fmt: skip
CROPS: dict[str, Any] = {"positive": 3, "fraction": -1.5, "None": None, "string": "-3", "list": [-1]}
OPERATIONS = [
    *((method, name, rows) for method in ("reorder_cache", "batch_select_indices") for name, rows in ROWS.items()),
    *(("batch_repeat_interleave", name, count) for name, count in COUNTS.items()),
    *(("crop", name, count) for name, count in CROPS.items()),
]


@pytest.mark.parametrize("first", ["compressed", "not compressed"])
@pytest.mark.parametrize(("method", "name", "argument"), OPERATIONS, ids=lambda x: x if isinstance(x, str) else "")
def test_operations(cache: CompressedCache, method: str, name: str, argument: Any, first: str) -> None:
    """Wrong operations are refused before any layer is changed, whichever layer comes first."""
    if first == "not compressed":
        rules = [{"match": 0, "method": "none"}]
        cache = fill(CompressedCache(config(), {**cache.compression.model_dump(), "layers": rules}))
    before = contents(cache)
    assert outcome(lambda: getattr(cache, method)(argument)) != ACCEPTED
    assert same(contents(cache), before)
    assert all(track.buffer.shape[0] == 2 for track in cache.rope_tracks)


def test_crop_that_a_sliding_layer_cannot_follow() -> None:
    model = family_cases.model("gemma3")
    cache = CompressedCache(model.config, family_cases.method_config("gemma3", "turboquant"))
    with torch.no_grad():
        model(input_ids=torch.ones(2, 100, dtype=torch.long), **with_cache(cache))
    before = contents(cache)
    assert cache.packed_tokens > 0
    assert "cannot be cropped" in outcome(lambda: cache.crop(-3))
    assert same(contents(cache), before)


@pytest.mark.parametrize("side", [0, 1])
def test_a_step_that_is_not_finite(side: int) -> None:
    """A NaN in a step stays in the tail; the flush that would pack it is refused until a crop removes it."""
    cache = CompressedCache(small_config(), {**TURBOQUANT, **SMALL})
    cache.update(*states(60), 0)
    broken = states(1)
    broken[side][0, 1, 0, 0] = torch.nan
    cache.update(*broken, 0)
    at, packed = cache.get_seq_length(), cache.packed_tokens
    while (cache.get_seq_length() - 4 - packed) - 8 < 32:
        cache.update(*states(1), 0)
    length = cache.get_seq_length()
    with pytest.raises(ValueError, match=f"{('keys', 'values')[side]} of layer 0"):
        cache.update(*states(1), 0)
    assert (cache.get_seq_length(), cache.packed_tokens) == (length, packed)
    cache.crop(-(length - at + 1))
    for _ in range(60):
        cache.update(*states(1), 0)
    assert cache.packed_tokens > packed
    assert cache.layers[0].keys.isfinite().all()
    assert cache.layers[0].values.isfinite().all()


def test_non_finite_chunk_with_sinks_of_a_padded_row() -> None:
    """A refused chunk leaves the sinks of a row as they were, whose place its tokens would have taken."""
    cache = CompressedCache(small_config(), {**TURBOQUANT, **SMALL})
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[1, :18] = 0
    cache.receive_mask(mask[:, :20])
    cache.update(*states(20), 0)
    before = cache.layers[0].keys.clone()
    keys, values = states(180, 2)
    with pytest.raises(ValueError, match="keys of layer 0 hold NaN"):
        cache.update(torch.full_like(keys, torch.nan), values, 0)
    assert torch.equal(cache.layers[0].keys, before)
    cache.update(keys, values, 0)
    assert cache.packed_tokens > 0
    assert cache.layers[0].keys.isfinite().all()
    sinks = torch.cat([before[1, :, 18:], keys[1, :, :2]], 1)
    assert torch.equal(cache.layers[0].keys[1, :, 18:22], sinks)


def test_non_finite_token_in_the_window_does_not_spoil_the_statistics() -> None:
    """Means and outlier channels, measured on the first prompt, leave out a NaN in its recent window."""
    for options in ({"center": "on"}, {"center": "auto"}, {"bits": 3.5}):
        config = {"keys": {"method": "turboquant", **options}, "values": "turboquant", **SMALL}
        for bad in (torch.nan, torch.inf):
            cache = CompressedCache(small_config(), config)
            keys, values = states(60)
            keys += 3
            keys[0, 0, -1, 0] = bad
            try:
                cache.update(keys, values, 0)
            except ValueError:
                assert cache.get_seq_length() == 0
                continue
            assert cache.packed_tokens > 0
            cache.crop(-1)
            assert cache.layers[0].keys.isfinite().all(), options


def test_no_memory_for_one_side_leaves_both_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompressedCache(small_config(), {**TURBOQUANT, **SMALL, "quantize_generated": False, "backend": "torch"})
    layer, grown = cache.layers[0], TailBuffer.new_buffer
    cache.update(torch.randn(1, 2, 40, 64), torch.randn(1, 2, 40, 64), 0)
    values = layer.sides["values"].tail

    def refuse(tail: TailBuffer, tokens: int, batch: int | None = None) -> torch.Tensor:
        if tail is values:
            raise torch.OutOfMemoryError("no room")
        return grown(tail, tokens, batch)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return cache.update(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64), 0)

    while values.tokens < values.buffer.shape[2]:
        step()
    monkeypatch.setattr(TailBuffer, "new_buffer", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        step()
    monkeypatch.undo()
    tokens = cache.get_seq_length()
    keys, stored = step()
    assert keys.shape[2] == stored.shape[2] == tokens + 1


@pytest.mark.parametrize(("family", "first"), [("gemma3", "sliding_attention"), ("qwen3_next", "linear_attention")])
def test_a_refused_step_says_why_beside_layers_that_cannot_step_back(family: str, first: str) -> None:
    """The error names the refused tokens even if other layers cannot step back: full sliding and linear ones."""
    kinds = [first, "full_attention", "full_attention"]
    config = family_cases.build(family, num_hidden_layers=3, layer_types=kinds).config
    cache = CompressedCache(config, {**TURBOQUANT, "sink_tokens": 0, "recent_tokens": 0})
    good = torch.randn(1, 2, 160, 32)
    attending = [index for index, kind in enumerate(kinds) if kind != "linear_attention"]
    for index in attending:
        cache.update(good, good, index)
    assert cache.packed_tokens == 160
    for index in attending[:-1]:
        cache.update(good, good, index)
    with pytest.raises(ValueError, match=r"keys of layer 2 hold NaN.*cannot be packed"):
        cache.update(good.clone().fill_(torch.nan), good, 2)
