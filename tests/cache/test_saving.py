"""Saved caches: refused files and their errors, atomic writing, and layers of every kind."""

import os
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from support.cache_name import feed
from support.files.commvq_files import FOLDER, random_codebooks
from support.files.saved_files import Change, changed, config, fill, filled, states
from support.models import family_cases
from support.models.ranks import as_process
from support.models.small_model import HEAD_DIM, HEADS, codebooks, method_config, small_config

from kvcache_compress import CompressedCache, KIVICache, TurboQuantCache
from kvcache_compress.files import model_file
from kvcache_compress.methods.commvq.codebook_file import write_codebooks
from kvcache_compress.validation import quoted


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a cache with 60 tokens."""
    filled().save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


def refuses(path: Path, message: str, model_config: Any = None, **options: Any) -> None:
    with pytest.raises(ValueError, match=f"cache file '.*{path.name}': .*{message}") as refused:
        CompressedCache.load(path, model_config or config(), **options)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


def _attribute(layer: int, name: str, value: Any) -> Change:
    return lambda h, t, m: h["layers"][layer]["attributes"].update({name: value})


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda h, t, m: t.update({name: change(t[name]).contiguous().clone()})


KEYS, ROPE = "layers.0.keys", "rope.2.1"
CHANGES: dict[str, tuple[Change, str]] = {
    "kind": (lambda h, t, m: m.update(kind="pt"), "not a kvcache-compress file of cache"),
    "newer": (lambda h, t, m: m.update(version="2"), "format version '2', but this release reads '1'"),
    "no model": (lambda h, t, m: h.pop("model"), "model"),
    "method": (lambda h, t, m: h["config"]["keys"].update(method="zip"), "keys: unknown method 'zip'"),
    "kind of a layer": (lambda h, t, m: h["layers"][2].update(kind="StaticLayer"), "StaticLayer.* but"),
    "seed": (lambda h, t, m: h["config"].update(seed=1), "layer 0: its keys do not decode as"),
    "codes": (_tensor(f"{KEYS}.packed.codes0", torch.bitwise_not), "layer 0: its keys do not decode as"),
    "NaN": (_tensor(f"{KEYS}.statistics.0.mean", lambda x: x * torch.nan), "statistics.0.mean holds NaN"),
    "no tail": (lambda h, t, m: t.pop(f"{KEYS}.tail"), "keys.tail"),
    "no statistics": (lambda h, t, m: t.pop(f"{KEYS}.statistics.0.mean"), "mean|do not decode"),
    "rope": (lambda h, t, m: t.pop(ROPE), r"layer 1: damaged: tensor 'rope\.2\.1'"),
    "foreign tensor": (lambda h, t, m: t.update(x=torch.ones(1)), "tensor 'x' belongs to no layer"),
    "attribute": (_attribute(2, "more", 3), "layer 2: saved with another release of Transformers.* more"),
    "no attribute": (lambda h, t, m: h["layers"][2]["attributes"].pop("keys"), "layer 2: .* keys"),
    "tensor": (_attribute(2, "keys", {"tensor": "elsewhere"}), "layer 2: damaged: keys="),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_fit(path: Path, name: str) -> None:
    """Headers and tensors that do not fit this release or each other are refused, even with the right checksum."""
    change, message = CHANGES[name]
    refuses(changed(path, change), message)


def test_damaged_files(path: Path, tmp_path: Path) -> None:
    whole, generator, damaged = path.read_bytes(), random.Random(0), tmp_path / "damaged"
    (length,) = struct.unpack("<Q", whole[:8])
    for start, stop, count in ((0, 8, 8), (8, 8 + length, 40), (8 + length, len(whole), 40)):
        for _ in range(count):
            copied = bytearray(whole)
            copied[generator.randrange(start, stop)] ^= 1 << generator.randrange(8)
            damaged.write_bytes(copied)
            refuses(damaged, ".")
    for content in (whole[: len(whole) // 2], whole[:-1], whole[:7], b"", b"no safetensors", whole + b"x"):
        damaged.write_bytes(content)
        refuses(damaged, "damaged, or not a safetensors file")
    refuses(changed(path, lambda h, t, m: m.pop("sha256"), honest=False), "checksum")
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"cache file '{missing}'"):
            CompressedCache.load(missing, config())
    refuses(Path(codebooks(4)), "not a kvcache-compress file of cache")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name_or_path": "org/other"}, "made for 'org/small', not for 'org/other'.*any_model"),
        ({"num_key_value_heads": 4}, "'org/small'.* kv_heads 2 in the file, 4 here"),
        ({"head_dim": 64}, "head_dim 32 in the file, 64 here"),
        ({"rope_theta": 5e5}, "rope .*10000.* in the file, .*500000.* here"),
        ({"layers": 3}, "layers 4 in the file, 3 here"),
    ],
)
def test_another_model(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fill(TurboQuantCache(config(), sink_tokens=4, recent_tokens=8)).save(tmp_path / "x")
    other = small_config(**{"layers": 4, **changes})
    refuses(tmp_path / "x", message, other)
    if list(changes) == ["name_or_path"]:
        assert CompressedCache.load(tmp_path / "x", other, any_model=True).get_seq_length() == 60
    assert CompressedCache.load(tmp_path / "x", small_config(4)).get_seq_length() == 60, "an unnamed model"


def test_devices(path: Path, tmp_path: Path) -> None:
    for device in ("nowhere", torch.device("meta"), "cuda:99", 1.5):
        refuses(path, f"device={re.escape(quoted(device))} is unavailable: .", device=device)
    assert CompressedCache.load(path, config(), device="cpu").layers[0].keys.device.type == "cpu"
    cache = TurboQuantCache(config(), sink_tokens=4, recent_tokens=8)
    cache.update(*(x.to("meta") for x in states(3)), 0)
    with pytest.raises(ValueError, match=r"layers\.0\.keys\.sinks is on the meta device"):
        cache.save(tmp_path / "x")
    with pytest.raises(ValueError, match=r"path=.* is a folder"):
        cache.save(tmp_path)
    cache = TurboQuantCache(config(), sink_tokens=4, recent_tokens=8)
    keys, values = states(3)
    cache.update(keys.log(), values, 0)
    with pytest.raises(ValueError, match=r"layers\.0\.keys\.sinks holds NaN"):
        cache.save(tmp_path / "x")


def test_shares_of_tensor_parallelism(tmp_path: Path) -> None:
    with as_process(1, 2):
        cache = TurboQuantCache(config(), sink_tokens=4, recent_tokens=8)
        for index in range(4):
            cache.update(*(x[:, 1:] for x in states(60, index)), index)
        assert cache.packed_tokens > 0
        cache.save(tmp_path / "share")
        filled().save(tmp_path / "whole")
    for rank, processes in ((1, 2), (3, 4)):
        with as_process(rank, processes):
            loaded = CompressedCache.load(tmp_path / "share", config())
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(loaded.layers, cache.layers, strict=True))
    for rank, processes in ((0, 1), (0, 2), (2, 4), (1, 3)):
        with as_process(rank, processes):
            refuses(tmp_path / "share", f"share 1 of .* 2 shares: process {rank} of {processes} cannot load it")
    assert CompressedCache.load(tmp_path / "whole", config()).layers[0].keys.shape == (2, 2, 60, 32)


def test_load_returns_the_class_that_it_is_called_on(tmp_path: Path) -> None:
    """A class of one method loads only files of its method; its constructor's own arguments do not matter."""
    saved = fill(KIVICache(config(), bits=4), 200)
    saved.save(tmp_path / "kivi")
    for chosen in (KIVICache, CompressedCache):
        loaded = chosen.load(tmp_path / "kivi", config())
        assert type(loaded) is chosen
        assert loaded.packed_tokens == saved.packed_tokens
    with pytest.raises(ValueError, match=r"its keys are kivi and its values kivi; use CompressedCache\.load"):
        TurboQuantCache.load(tmp_path / "kivi", config())


def test_codebooks_that_moved(tmp_path: Path) -> None:
    here, there, others = (FOLDER / f"saving-{name}.safetensors" for name in ("here", "there", "others"))
    here.write_bytes(Path(codebooks(3)).read_bytes())
    own = {"method": "commvq", "codebooks": str(here)}
    rules = [{"match": 0, "keys": own, "values": own}, {"match": 1, "values": own}]
    some = {**method_config("turboquant"), "layers": rules}
    cache = fill(CompressedCache(small_config(3), some))
    cache.save(tmp_path / "x")
    here.rename(there)
    refuses(tmp_path / "x", "codebooks='.*here.safetensors' for commvq: no such file", small_config(3))
    loaded = CompressedCache.load(tmp_path / "x", small_config(3), codebooks=there)
    assert loaded.compression.layers[0].keys.model_extra["codebooks"] == str(there)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(loaded.layers, cache.layers, strict=True))
    tensors = {name: -books for name, books in random_codebooks(small_config(3), 1, (3, 16), (5, 16)).items()}
    write_codebooks(others, small_config(3), tensors)
    refuses(tmp_path / "x", "layer 0: its keys do not decode as", small_config(3), codebooks=others)


def continued(model: Any, cache: CompressedCache, path: Path, *steps: int) -> CompressedCache:
    """Save a cache after 71 tokens and load it; the steps that follow are equal with both. Returns the loaded one."""
    ids = torch.randint(1, family_cases.VOCAB, (2, 71 + sum(steps)), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        feed(model, cache, ids[:, :71], [70, 1])
        assert cache.packed_tokens > 0
        cache.save(path)
        loaded = CompressedCache.load(path, model.config)
        assert int(loaded.get_seq_length()) == 71
        assert torch.equal(*(feed(model, one, ids[:, 71:], list(steps)) for one in (loaded, cache)))
    return loaded


@pytest.mark.parametrize("family", ["gemma4", "qwen3_next", "gemma2"])
def test_other_layers(family: str, tmp_path: Path) -> None:
    """Sliding, linear, hybrid and shared layers continue as they would have, past their window and when empty."""
    model = family_cases.model(family)
    empty = CompressedCache(model.config, family_cases.method_config(family, "turboquant"))
    empty.save(tmp_path / "empty")
    cache = CompressedCache.load(tmp_path / "empty", model.config)
    loaded = continued(model, cache, tmp_path / "x", 1, 17, 1)
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
    for index in [i for i, layer in enumerate(cache.layers) if type(layer).__name__ == "DynamicSlidingWindowLayer"][:1]:
        refuses(changed(tmp_path / "x", _attribute(index, "sliding_window", 8)), "sliding_window is 8", model.config)


def test_static_layers(tmp_path: Path) -> None:
    """A cache with `max_cache_len`, beside static layers that slide, continues as it would have."""
    model = family_cases.model("gemma3")
    config = family_cases.method_config("gemma3", "turboquant").changed(max_cache_len=100)
    continued(model, CompressedCache(model.config, config), tmp_path / "x", 1, 1, 1, 1, 1, 14)


def test_layers_that_cannot_be_saved(tmp_path: Path) -> None:
    cache = filled()
    cache.layers[2].more = object()
    with pytest.raises(ValueError, match="layer 2, a DynamicLayer, cannot be saved: more is a object"):
        cache.save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_prompt_that_may_end_in_a_draft(tmp_path: Path) -> None:
    """Both sides measure their statistics together, though nothing is packed yet."""
    sides = {side: {"method": "turboquant", "bits": 3.5} for side in ("keys", "values")}
    saved = CompressedCache(small_config(), {**sides, "sink_tokens": 4, "recent_tokens": 8})
    saved.activate_past_recording()
    x = torch.randn(1, HEADS, 140, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        saved.update(x, x, layer)
    assert saved.packed_tokens == 0
    saved.save(tmp_path / "cache.safetensors")
    loaded = CompressedCache.load(tmp_path / "cache.safetensors", small_config())
    loaded.activate_past_recording()
    for cache in (saved, loaded):
        for layer in range(2):
            cache.update(x, x, layer)
    assert saved.packed_tokens > 0
    assert torch.equal(loaded.layers[1].keys, saved.layers[1].keys)


@pytest.mark.parametrize("stage", ["save_file", "replace"])
def test_an_error_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    before, cache = path.read_bytes(), filled(20)

    def full(*args: Any, **kwargs: Any) -> None:
        if stage == "save_file":
            Path(args[1]).write_bytes(b"half")
            raise SafetensorError("No space left on device")
        raise KeyboardInterrupt

    monkeypatch.setattr(model_file if stage == "save_file" else os, stage, full)
    with pytest.raises(OSError if stage == "save_file" else KeyboardInterrupt):
        cache.save(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before
