"""Generated bad inputs: each gives a clear error or a correct result, and an error leaves the cache as it was.

`saved_files.outcome` defines a clear error; `test_saving.py` does the same for files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.files.saved_files import ACCEPTED, config, filled, outcome, states
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

ODD: tuple[Any, ...] = (-1, 0, 7, 2**40, 1.5, float("nan"), float("inf"), "x", "", None, [], {}, [1, 2], True)


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


# Configurations and constructors


@pytest.mark.parametrize("method", METHODS)
def test_options(method: str) -> None:
    """Options of every method with values of every kind are refused, or the cache works."""
    base = method_config(method)
    found = []
    for option in get_method(method).Options.model_fields:
        for value in ODD:
            for side in ("keys", "values"):
                given = copy.deepcopy(base)
                given[side] = {**given["keys"], option: value}
                found.append(outcome(lambda given=given: use(CompressedCache(small_config(), given))))
    refused = [text for text in found if text != ACCEPTED]
    assert len(found) > 50
    assert len(refused) > len(found) / 2
    assert all(len(text) > 10 for text in refused)


def test_fields_of_a_configuration() -> None:
    found = []
    for name in [*CompressionConfig.model_fields, "unknown"]:
        for value in ODD:
            if (name, value) != ("max_cache_len", 7):  # which is used up by the first prompt
                given = {**method_config("turboquant"), name: value}
                found.append(outcome(lambda given=given: use(CompressedCache(small_config(), given))))
    assert len(found) > 100
    assert found.count(ACCEPTED) < 25


def test_constructors() -> None:
    """Constructors with wrong types, misspelled presets and rules for missing layers raise clear errors."""
    rows: list[Callable[[], Any]] = []
    turboquant = method_config("turboquant")
    names = (
        "turboquant-5bit",
        "TURBOQUANT-4BIT",
        "turboquant_4bit",
        "../turboquant-4bit",
        "x" * 100,
        "no.yaml",
        "a\nb",
    )
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


# Operations


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
    """Steps and chunks that do not fit are refused, also by an empty cache if no cache could take them."""
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """A cache accepts other dtypes and widens the tokens it holds, as Transformers' own layers do."""
    for first, second in ((torch.float32, dtype), (dtype, torch.float32)):
        new = CompressedCache(config(), filled(3).compression)
        for index in (0, 1, 3):
            for tokens, kind in ((3, first), (2, second), (60, second), (1, first)):
                new.update(*(x.to(kind) for x in states(tokens, index)), index)
            assert new.layers[index].keys.dtype == new.layers[index].values.dtype == torch.promote_types(first, second)
            assert new.layers[index].keys.isfinite().all()
        assert new.packed_tokens > 0


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_numbers_that_cannot_be_packed(value: float, tokens: int) -> None:
    """Tokens that are not finite are refused when they would be packed; until then the cache works, as after a crop."""
    for layer in (0, 1, 3):
        for side in (0, 1):
            cache = filled()
            before = contents(cache)
            pair = states(tokens)
            pair[side][1, 0, 0, 5] = value
            if outcome(lambda cache=cache, pair=pair, layer=layer: cache.update(*pair, layer)) == ACCEPTED:
                cache.layers[layer].crop(-tokens)
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
        cache = CompressedCache(
            config(), {**cache.compression.model_dump(), "layers": [{"match": 0, "method": "none"}]}
        )
        for index in range(4):
            cache.update(*states(60, index), index)
    before = contents(cache)
    assert outcome(lambda: getattr(cache, method)(argument)) != ACCEPTED
    assert same(contents(cache), before)
    assert all(track.buffer.shape[0] == 2 for track in cache.rope_tracks)


GOOD_ROWS: tuple[Any, ...] = (t(1, 0), t(-1), t(True, False), [1, 1, 0], t(0, 1, dtype=torch.int32), t(1, 0, 1, 1))


@pytest.mark.parametrize("method", ["reorder_cache", "batch_select_indices"])
@pytest.mark.parametrize("rows", GOOD_ROWS, ids=str)
def test_rows_in_other_words(method: str, rows: Any) -> None:
    """Rows may be given as negative numbers, masks, lists or 32-bit integers."""
    cache, expected = filled(), contents(filled())
    getattr(cache, method)(rows)
    chosen = torch.arange(2)[rows]
    assert same(contents(cache), [(*sizes, keys[chosen], values[chosen]) for *sizes, keys, values in expected])


def test_crop_that_a_sliding_layer_cannot_follow() -> None:
    """A crop that a sliding layer does not support is refused before the compressed layers are cropped."""
    model = family_cases.model("gemma3")
    cache = CompressedCache(model.config, family_cases.method_config("gemma3", "turboquant"))
    with torch.no_grad():
        model(input_ids=torch.ones(2, 60, dtype=torch.long), **with_cache(cache))
    before = contents(cache)
    assert cache.packed_tokens > 0
    assert "keeps no past to go back to" in outcome(lambda: cache.crop(-3))
    assert same(contents(cache), before)
