"""Damaged or edited files by the hundred: refused with a clear error, or loaded as a cache that works."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.commvq_files import CONTRACT_MODEL, codebook_file
from support.saved_files import ACCEPTED, changed, config, filled, outcome, states
from support.small_model import METHODS, codebooks, method_config, small_config
from transformers import LlamaConfig

from kvcache_compress import CommVQCache, CompressedCache


def damaged(whole: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yield copies cut short, or with one bit flipped in the header's length, the header or the data."""
    generator = random.Random(seed)
    (length,) = struct.unpack("<Q", whole[:8])
    for start, stop, share in ((0, 8, 8), (8, 8 + length, count // 2), (8 + length, len(whole), count // 2)):
        for _ in range(share):
            copied = bytearray(whole)
            copied[generator.randrange(start, stop)] ^= 1 << generator.randrange(8)
            yield bytes(copied)
    for _ in range(count // 4):
        yield whole[: generator.randrange(len(whole))]


def test_damaged_caches(tmp_path: Path) -> None:
    """A cache file with any bit flipped is refused."""
    filled().save(tmp_path / "cache")
    for content in damaged((tmp_path / "cache").read_bytes(), 120, seed=0):
        (tmp_path / "damaged").write_bytes(content)
        text = outcome(lambda: CompressedCache.load(tmp_path / "damaged", config()))
        assert text.startswith(f"cache file '{tmp_path / 'damaged'}': ")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in nested JSON."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(item, (*path, key))


EDITS: tuple[Any, ...] = (-1, 0, 3, 2**33, 2**70, 1.5, "x", None, [], {}, True, {"tensor": "keys"}, {"dtype": "int8"})


def test_edited_caches(tmp_path: Path) -> None:
    """A header with any value replaced, and a correct checksum, is refused, or the cache works."""
    filled().save(tmp_path / "cache")
    with safe_open(tmp_path / "cache", framework="pt") as file:
        header = json.loads(file.metadata()["header"])
    generator, found = random.Random(0), []

    def work() -> None:
        cache = CompressedCache.load(tmp_path / "changed.safetensors", config())
        for index in range(4):
            for tokens in (1, 40):
                cache.update(*states(tokens, index), index)
        cache.crop(-30)
        assert all(layer.keys.shape == (2, 2, 71, 32) for layer in cache.layers)

    for path in places(header):
        value = generator.choice(EDITS)

        def edit(header: Any, tensors: Any, metadata: Any, path: Any = path, value: Any = value) -> None:
            for key in path[:-1]:
                header = header[key]
            header[path[-1]] = value

        changed(tmp_path / "cache", edit)
        found.append(outcome(work))
    assert len(found) > 100
    assert found.count(ACCEPTED) < len(found) / 8


def edited(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield tensors of the same shape with all numbers, those of the last row, or the last one replaced."""
    if x.is_floating_point():
        most = torch.finfo(x.dtype).max
        numbers: tuple[float, ...] = (torch.nan, torch.inf, -torch.inf, 0, most, -most)
    else:
        numbers = (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max, 0)
    for number in numbers:
        for start in (0, x.numel() * (len(x) - 1) // len(x), x.numel() - 1):
            copied = x.clone()
            copied.view(-1)[start:] = number
            yield copied


@pytest.mark.parametrize("method", METHODS)
def test_edited_tensors(method: str, tmp_path: Path) -> None:
    """Tensors with extreme numbers, and a correct checksum, are refused, or keys and values stay finite."""
    model = small_config(1)
    cache = CompressedCache(model, method_config(method, 1))
    cache.update(*states(60), 0)
    assert cache.packed_tokens > 0
    cache.save(tmp_path / "cache")
    found = []

    def work() -> None:
        (layer,) = CompressedCache.load(tmp_path / "changed.safetensors", model).layers
        assert layer.keys.isfinite().all()
        assert layer.values.isfinite().all()
        layer.crop(-35)
        assert layer.keys.isfinite().all()

    for name, tensor in load_file(tmp_path / "cache").items():
        for copied in edited(tensor):
            changed(tmp_path / "cache", lambda h, t, m, name=name, copied=copied: t.update({name: copied}))
            found.append((name, copied, outcome(work)))
    assert len(found) > 100
    for name, copied, text in found:
        assert text != ACCEPTED or copied.isfinite().all(), name


METADATA = ("-1", "0", "99999999999999999999", "x", "", "{", "[]", "{}", "null", "1.5", '{"order": 3}', "[" * 3000)
TENSORS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x[None], lambda x: x[0], lambda x: x.float(), lambda x: x.new_zeros(()), lambda x: x[:0],
    lambda x: x.flatten(), lambda x: x * torch.inf, lambda x: x * 0, lambda x: x * 0 + 6e4,
)  # fmt: skip


@pytest.mark.parametrize("form", ["residual", "encoder"])
def test_damaged_codebooks(tmp_path: Path, form: str) -> None:
    """Damaged bits, metadata and tensors of CommVQ's file are refused with its name, or the codebooks work."""
    model = LlamaConfig(**CONTRACT_MODEL) if form == "encoder" else small_config()
    source = Path(codebook_file(32, encoder_bits=96) if form == "encoder" else codebooks())
    path, found = tmp_path / "x.safetensors", []

    def attempt() -> None:
        cache = CommVQCache(model, path, sink_tokens=4, recent_tokens=8)
        cache.update(*states(60), 0)
        assert cache.packed_tokens > 0
        assert cache.layers[0].keys.isfinite().all()
        assert cache.layers[0].values.isfinite().all()

    def work() -> str:
        return outcome(attempt)

    for content in damaged(source.read_bytes(), 60, seed=1):
        path.write_bytes(content)
        found.append(work())
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
    for name in metadata:
        for value in METADATA:
            save_file(load_file(source), path, metadata={**metadata, name: value})
            found.append(work())
    for name in list(load_file(source))[:3]:
        for change in TENSORS:
            tensors = load_file(source)
            tensors[name] = change(tensors[name]).contiguous().clone()
            save_file(tensors, path, metadata=metadata)
            found.append(work())
    refused = [text for text in found if text != ACCEPTED]
    assert len(found) > 200
    assert len(refused) > 80
    assert all("codebooks=" in text for text in refused)
