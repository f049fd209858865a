"""Cache files: refused files and their errors, atomic writing, and layers of every kind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from support.commvq_files import FOLDER, random_codebooks
from support.paths import ROOT
from support.saved_files import Change, changed, config, filled, states
from support.small_model import codebooks, method_config, small_config

from kvcache_compress import CompressedCache, TurboQuantCache
from kvcache_compress.files import tensors as tensor_file
from kvcache_compress.methods.commvq.codebook_file import describe_model, write_codebooks
from kvcache_compress.validation.messages import quoted


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a cache with 60 tokens."""
    filled().save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


def refuses(path: Path, message: str, model_config: Any = None, **options: Any) -> None:
    with pytest.raises(ValueError, match=f"cache file '.*{path.name}': {message}") as refused:
        CompressedCache.load(path, model_config or config(), **options)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


# Files that are refused


def _state(layer: int = 0, **values: Any) -> Change:
    return lambda h, t, m: h["layers"][layer]["state"].update(values)


def _attribute(layer: int, name: str, value: Any) -> Change:
    return lambda h, t, m: h["layers"][layer]["attributes"].update({name: value})


def _resized(layer: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change the shape of keys and values of a layer that is Transformers' own."""
    return lambda h, t, m: t.update(
        {name: change(t[name]).contiguous() for name in (f"layers.{layer}.keys", f"layers.{layer}.values")}
    )


def _shorter_tail(header: Any, tensors: Any, metadata: Any) -> None:
    header["layers"][0]["state"]["tail"] -= 1
    for name in ("layers.0.keys.tail", "layers.0.values.tail"):
        tensors[name] = tensors[name][:, :, 1:].contiguous()


def _part_of_a_group(header: Any, tensors: Any, metadata: Any) -> None:
    header["layers"][3]["state"].update(packed=40, tail=16)
    for name in ("layers.3.keys.tail", "layers.3.values.tail"):
        tensors[name] = tensors[name][:, :, 8:].contiguous()


KEYS, ROPE = "layers.0.keys", "rope.2.1"
CHANGES: dict[str, tuple[Change, str]] = {
    "format": (lambda h, t, m: m.update(format="pt"), "not a cache file of kvcache-compress"),
    "no metadata": (lambda h, t, m: m.clear(), "not a cache file of kvcache-compress"),
    "newer": (lambda h, t, m: m.update(version="5"), "format version '5': this release reads up to 4"),
    "version": (lambda h, t, m: m.update(version="-1"), "format version '-1'"),
    "unknown key": (lambda h, t, m: h.update(more=1), "damaged: more: Extra inputs"),
    "no model": (lambda h, t, m: h.pop("model"), "damaged: model: Field required"),
    "type": (_state(sinks="4"), r"damaged: layers\.0\.state\.sinks: Input should be a valid integer"),
    "negative": (_state(tail=-1), r"damaged: layers\.0\.state\.tail: Input should be greater"),
    "method": (lambda h, t, m: h["config"]["keys"].update(method="zip"), "config: keys: unknown method 'zip'"),
    "option": (lambda h, t, m: h["config"]["keys"].update(bits=9), "config: keys.bits=9 for turboquant"),
    "fewer layers": (lambda h, t, m: h["layers"].pop(), "made by another model, 'org/small': layers"),
    "kind": (lambda h, t, m: h["layers"][2].update(kind="StaticLayer"), "made by another model"),
    "heads": (
        _state(heads=3),
        r"layer 0: damaged: keys\.sinks is float32 \[2, 2, 4, 32\], not float32 \[2, 3, 4, 32\]",
    ),
    "batch": (_state(batch=3), r"layer 0: damaged: keys\.sinks"),
    "no batch": (_state(batch=0), "layer 0: damaged"),
    "packed": (_state(packed=64), r"layer 0: damaged: keys\.packed\.codes0 is int16 \[2, 2, 32, 2\], not"),
    "group": (_part_of_a_group, "layer 3: damaged: 40 packed tokens, in groups of 32"),
    "sinks": (_state(sinks=9), "layer 0: damaged: 9 sinks of 65 tokens, where the config has sink_tokens=4"),
    "fewer sinks": (_state(sinks=3), "layer 0: damaged: 3 sinks"),
    "head_dim": (_state(head_dims={"keys": 24, "values": 32}), "layer 0: damaged: keys"),
    "odd head_dim": (_state(head_dims={"keys": 33, "values": 32}), "layer 0: damaged: keys.sinks"),
    "one head_dim": (_state(head_dims={"keys": 32}), "damaged: layers.0.state.head_dims"),
    "dtype": (_state(dtypes={"keys": "int8", "values": "float32"}), r"damaged: layers\.0\.state\.dtypes"),
    "other dtype": (_state(dtypes={"keys": "float16", "values": "float32"}), r"damaged: keys\.sinks is float32"),
    "unprepared": (_state(prepared=False), "layer 0: damaged: packed tokens without statistics"),
    "state": (lambda h, t, m: h["layers"][0].update(state=None), "layer 0: tensors of an empty layer"),
    "no tensor": (lambda h, t, m: t.pop(f"{KEYS}.tail"), "layer 0: damaged: no tensor 'keys.tail'"),
    "no statistics": (lambda h, t, m: t.pop(f"{KEYS}.statistics.mean"), "no tensor 'keys.statistics.mean'"),
    "superfluous": (lambda h, t, m: t.update({f"{KEYS}.x": torch.ones(1)}), r"a superfluous tensor 'keys\.x'"),
    "foreign tensor": (lambda h, t, m: t.update(x=torch.ones(1)), "damaged: an unknown tensor 'x'"),
    "NaN": (lambda h, t, m: t[f"{KEYS}.statistics.mean"].view(-1)[3:4].fill_(torch.nan), "statistics.mean holds NaN"),
    "codes": (
        lambda h, t, m: t[f"{KEYS}.packed.codes0"].bitwise_not_(),
        "layer 0: its keys do not decode as they did when it was saved",
    ),
    "seed": (lambda h, t, m: h["config"].update(seed=1), "layer 0: its keys do not decode as"),
    "rope": (lambda h, t, m: t.pop(ROPE), "layer 1: damaged: no tensor 'rope.2.1'"),
    "short rope": (
        lambda h, t, m: t.update({ROPE: t[ROPE][:, :50].clone()}),
        r"layer 1: damaged: rope.2.1 is float16 \[2, 50, 32\], not float16 \[2, 58, 32\]",
    ),
    "rope's dtype": (lambda h, t, m: t.update({ROPE: t[ROPE].float()}), "damaged: rope.2.1 is float32"),
    "other rope": (lambda h, t, m: t.update({"rope.4.1": t[ROPE].clone()}), "damaged: an unknown tensor 'rope.4.1'"),
    "rope of version 1": (lambda h, t, m: h.update(rope=[2, 60]), "damaged: no tensor 'rope'"),
    "no rope of version 1": (lambda h, t, m: t.update(rope=t[ROPE].clone()), "damaged: an unknown tensor 'rope'"),
    "attribute": (_attribute(2, "update", 1), "layer 2: damaged, or of another release of Transformers: update=1"),
    "no attribute": (lambda h, t, m: h["layers"][2]["attributes"].pop("keys"), "layer 2: damaged.*: no keys"),
    "value": (_attribute(2, "is_initialized", 3), "is_initialized=3"),
    "tensor": (_attribute(2, "keys", {"tensor": "elsewhere"}), r"layer 2: damaged: keys=\{'tensor': 'elsewhere'\}"),
    "tag": (_attribute(2, "dtype", {"dtype": "load"}), r"layer 2: damaged: dtype=\{'dtype': 'load'\}"),
    "empty tag": (_attribute(2, "keys", {}), r"layer 2: damaged: keys=\{\}"),
    "not initialized": (_attribute(2, "is_initialized", False), "damaged: is_initialized=False with 2 tensors"),
    "shapes": (
        lambda h, t, m: t.update({"layers.2.values": t["layers.2.values"][:, :, 1:].clone()}),
        r"layer 2: damaged: keys and values of shapes \[\[2, 2, 60, 32\], \[2, 2, 59, 32\]\]",
    ),
    "shorter": (_resized(2, lambda x: x[:, :, 1:]), "damaged: a length of 60 in layer 0, of 59 in layer 2"),
    "shorter tail": (_shorter_tail, "damaged: a length of 59 in layer 0, of 60 in layer 1"),
    "one row": (_resized(2, lambda x: x[:1]), "damaged: a batch of 2 in layer 0, of 1 in layer 2"),
    "one head": (_resized(2, lambda x: x[:, :1]), "damaged: keys of layer 2 have 1 heads, where the model has 2"),
    "narrower": (
        _resized(2, lambda x: x[..., :16]),
        "keys of layer 2 have 16 numbers per head, where the model has 32",
    ),
    "integers": (_resized(2, lambda x: x.long()), "layer 2: damaged: keys and values of torch.int64 and torch.int64"),
    "NaN in a tail": (lambda h, t, m: t[f"{KEYS}.tail"].view(-1)[:1].fill_(torch.nan), "keys.tail holds NaN"),
    "infinite sinks": (lambda h, t, m: t[f"{KEYS}.sinks"].view(-1)[:1].fill_(torch.inf), "keys.sinks holds NaN"),
    "NaN in another layer": (_resized(2, lambda x: x * torch.nan), r"damaged: layers\.2\.keys holds NaN"),
    "infinite sample": (
        lambda h, t, m: t[f"{KEYS}.check"].fill_(torch.inf),
        r"damaged: layers\.0\.keys\.check holds NaN",
    ),
    "huge sample": (lambda h, t, m: t[f"{KEYS}.check"].fill_(1e30), "layer 0: its keys do not decode as"),
    "NaN scales": (lambda h, t, m: t[f"{KEYS}.packed.scale"][1].fill_(torch.nan), r"keys\.packed\.scale holds NaN"),
    "infinite zeros": (
        lambda h, t, m: t["layers.3.values.packed.zero"].view(-1)[-1:].fill_(-torch.inf),
        r"damaged: layers\.3\.values\.packed\.zero holds NaN or infinity",
    ),
    "attributes": (lambda h, t, m: h["layers"][0].update(attributes={"keys": 1}), "layer 0: damaged: attributes are"),
    "no attributes": (lambda h, t, m: h["layers"][2].update(attributes=None), "layer 2: damaged: attributes are"),
    "state of another": (
        lambda h, t, m: h["layers"][2].update(state=h["layers"][0]["state"]),
        "layer 2: damaged: the state",
    ),
    "unknown attribute": (_attribute(2, "more", 3), "layer 2: damaged, .*: more=3"),
    "number for a type": (_attribute(2, "dtype", 3), "layer 2: damaged, .*: dtype=3"),
    "type for a device": (_attribute(2, "device", {"dtype": "float32"}), "layer 2: damaged, .*: device="),
    "device's value": (_attribute(2, "device", {"device": "cuda"}), "layer 2: damaged: device="),
    "number for a tensor": (_attribute(2, "keys", 3), "layer 2: damaged, .*: keys=3"),
    "tensors for a tensor": (
        _attribute(2, "keys", {"items": {"0": {"tensor": "keys"}}}),
        r"layer 2: damaged, .*: keys=\{'items': \{'0': \{'tensor': 'keys'\}\}\}",
    ),
    "wider type": (_attribute(2, "dtype", {"dtype": "float64"}), "layer 2: damaged: .* in a layer of torch.float64"),
    "no such floats": (_resized(2, lambda x: x.to(torch.float8_e4m3fn)), "damaged: keys and values of torch.float8"),
    "a long name": (_attribute(2, "x\ny " * 9999, 1), "layer 2: damaged"),
    "NaN in rope": (lambda h, t, m: t[ROPE].view(-1)[:1].fill_(torch.nan), "damaged: rope.2.1 holds NaN or infinity"),
    "share": (lambda h, t, m: h["share"].update(number=1), r"damaged: share\.number=1 of 1 shares"),
    "no share": (lambda h, t, m: h["share"].update(of=0), r"damaged: share\.of: Input should be greater"),
    "packed shape": (
        lambda h, t, m: t.update({f"{KEYS}.packed.codes0": t[f"{KEYS}.packed.codes0"][:1].clone()}),
        r"layer 0: damaged: keys\.packed\.codes0 is \[1, 2, 32, 2\], not \[2, 2\] with 32 tokens",
    ),
    "padding of other rows": (
        lambda h, t, m: t.update(padding=torch.tensor([3, 0, 0])),
        r"damaged: padding is torch\.int64 \[3\] for a batch of 2",
    ),
    "negative padding": (lambda h, t, m: t.update(padding=torch.tensor([3, -1])), "damaged: padding is negative"),
    "unused": (lambda h, t, m: t.update({"layers.2.more": torch.ones(1)}), r"superfluous tensors \['more'\]"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_by_hand(path: Path, name: str) -> None:
    """Headers and tensors that do not fit are refused, even with the right checksum, before a layer holds them."""
    change, message = CHANGES[name]
    refuses(changed(path, change), f".*{message}")


@pytest.mark.parametrize(
    "change",
    [
        lambda h, t, m: t["layers.1.values.tail"].view(-1)[:1].add_(1),
        lambda h, t, m: h["layers"][0]["state"].update(tail=1),
        lambda h, t, m: m.pop("sha256"),
    ],
)
def test_changed_by_accident(path: Path, change: Change) -> None:
    refuses(changed(path, change, honest=False), "damaged: its contents do not agree with its checksum")


def test_not_readable(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    broken = tmp_path / "broken"
    for content in (whole[: len(whole) // 2], whole[:-1], whole[:20], whole[:7], b"", b"no safetensors", whole + b"x"):
        broken.write_bytes(content)
        refuses(broken, "not readable: damaged, or no safetensors file")
    with pytest.raises(FileNotFoundError, match=r"cache file '.*nowhere': there is no such file"):
        CompressedCache.load(tmp_path / "nowhere", config())
    with pytest.raises(FileNotFoundError, match="no such file"):
        CompressedCache.load(tmp_path, config())
    refuses(Path(codebooks(4)), "not a cache file of kvcache-compress")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name_or_path": "org/other"}, "made by another model, 'org/small', not 'org/other'.*say any_model=True"),
        ({"num_key_value_heads": 4}, "'org/small': kv_heads 2 in the file, 4 in the model"),
        (
            {"head_dim": 64, "hidden_size": 32},
            "hidden_size 64 in the file, 32 in the model; head_dim 32 in",
        ),
        ({"rope_theta": 5e5}, "rope .*10000.* in the file, .*500000.* in the model"),
        ({"num_hidden_layers": 3}, r"layer_types \["),
    ],
)
def test_another_model(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    cache = TurboQuantCache(config(), sink_tokens=4, recent_tokens=8)
    cache.update(*states(60), 0)
    assert cache.packed_tokens > 0
    cache.save(tmp_path / "x")
    other = small_config(**{"layers": 4, **{{"num_hidden_layers": "layers"}.get(k, k): v for k, v in changes.items()}})
    refuses(tmp_path / "x", f".*{message}", other)
    if list(changes) == ["name_or_path"]:
        assert CompressedCache.load(tmp_path / "x", other, any_model=True).get_seq_length() == 60
    assert CompressedCache.load(tmp_path / "x", small_config(4)).get_seq_length() == 60, "an unnamed model"


def test_devices(path: Path, tmp_path: Path) -> None:
    for device in ("nowhere", "meta", torch.device("meta"), "hpu", "xla", "cuda:99", "", 1.5, [], 10**30):
        refuses(path, f"device={re.escape(quoted(device))} is unavailable: .", device=device)
    assert CompressedCache.load(path, config(), device="cpu").layers[0].keys.device.type == "cpu"
    cache = TurboQuantCache(config(), sink_tokens=4, recent_tokens=8)
    cache.update(*(x.to("meta") for x in states(3)), 0)
    with pytest.raises(ValueError, match=r"layers\.0\.keys\.sinks is on the meta device"):
        cache.save(tmp_path / "x")
    with pytest.raises(ValueError, match="a folder; the name of a file is needed"):
        cache.save(tmp_path)


def test_a_float64_model(tmp_path: Path) -> None:
    cache = TurboQuantCache(config(), sink_tokens=4, recent_tokens=8)
    for index in range(4):
        cache.update(*(x.double() for x in states(60, index)), index)
    assert cache.packed_tokens > 0
    cache.save(tmp_path / "x")
    for layer, again in zip(cache.layers, CompressedCache.load(tmp_path / "x", config()).layers, strict=True):
        assert again.keys.dtype == torch.float64
        assert torch.equal(layer.keys, again.keys)


def test_an_offloaded_cache(path: Path, tmp_path: Path) -> None:
    cache = CompressedCache.load(path, config())
    for layer in cache.layers:
        layer.offload()
    cache.save(tmp_path / "again")
    tensors, again = load_file(path), load_file(tmp_path / "again")
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())


def test_a_file_of_version_1(path: Path) -> None:
    """Files with cos and sin of all tokens, those of sinks included, are read."""

    def as_before(header: Any, tensors: Any, metadata: Any) -> None:
        metadata["version"] = "1"
        header["rope"] = [2, 60]
        tensors["rope"] = torch.cat([torch.ones(2, 2, 32).half(), tensors.pop(ROPE)], 1)

    old, new = (CompressedCache.load(file, config()) for file in (changed(path, as_before), path))
    for cache in (old, new):
        cache.crop(-20)
        for index in range(4):
            cache.update(*states(60, 7), index)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(old.layers, new.layers, strict=True))


# Codebooks


def test_codebooks_that_moved(tmp_path: Path) -> None:
    """A saved cache loads after its codebook file has moved; other codebooks are noticed."""
    here, there, others = (FOLDER / f"saving-{name}.safetensors" for name in ("here", "there", "others"))
    here.write_bytes(Path(codebooks(3)).read_bytes())
    own = {"method": "commvq", "codebooks": str(here)}
    rules = [{"match": 0, "keys": own, "values": own}, {"match": 1, "values": own}]
    some = {**method_config("turboquant"), "layers": rules}
    cache = CompressedCache(small_config(3), some)
    for index in range(3):
        cache.update(*states(60, index), index)
    assert cache.packed_tokens > 0
    cache.save(tmp_path / "x")
    here.rename(there)
    refuses(tmp_path / "x", "codebooks='.*here.safetensors' for commvq: there is no such file", small_config(3))
    loaded = CompressedCache.load(tmp_path / "x", small_config(3), codebooks=there)
    assert loaded.compression.layers[0].keys.model_extra["codebooks"] == str(there)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(loaded.layers, cache.layers, strict=True))
    tensors = {name: -books for name, books in random_codebooks(small_config(3), 1, (3, 16), (5, 16)).items()}
    write_codebooks(describe_model(small_config(3), others), tensors)
    refuses(tmp_path / "x", "layer 0: its keys do not decode as", small_config(3), codebooks=others)


def test_codebooks_that_cannot_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache file may name any path as codebooks; devices and the like are refused with that path."""
    opened = tensor_file.safe_open

    def no_device(file: Any, **options: Any) -> Any:
        if str(file) == codebooks(4):
            raise OSError(19, "No such device")
        return opened(file, **options)

    monkeypatch.setattr(tensor_file, "safe_open", no_device)
    refuses(path, f".*codebooks='{codebooks(4)}' for commvq: .* cannot be read: .*No such device")


# Writing


def test_one_prefix_serves_many(path: Path) -> None:
    """Caches loaded from one file do not affect each other or the file, which may be replaced meanwhile."""
    before = path.read_bytes()
    one, other = (CompressedCache.load(path, config()) for _ in range(2))
    filled(40).save(path)
    one.batch_repeat_interleave(3)
    for index in range(4):
        one.update(*states(50, 7, batch=6), index)
        other.update(*states(50, 8), index)
    other.save(path)
    assert path.read_bytes() != before
    expected = filled()
    for index in range(4):
        expected.update(*states(50, 8), index)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(expected.layers, other.layers, strict=True))


@pytest.mark.parametrize("stage", ["save_file", "replace"])
def test_an_error_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    before, cache = path.read_bytes(), filled(20)

    def full(*args: Any, **kwargs: Any) -> None:
        if stage == "save_file":
            Path(args[1]).write_bytes(b"half")
            raise SafetensorError("No space left on device")
        raise KeyboardInterrupt

    monkeypatch.setattr(tensor_file if stage == "save_file" else os, stage, full)
    with pytest.raises(OSError if stage == "save_file" else KeyboardInterrupt):
        cache.save(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_folders_and_permissions(tmp_path: Path) -> None:
    cache = filled(20)
    cache.save(tmp_path / "a" / "b" / "cache")
    for mask, mode in ((0o022, 0o644), (0o002, 0o664), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            cache.save(tmp_path / f"{mode:o}")
        finally:
            os.umask(before)
        assert (tmp_path / f"{mode:o}").stat().st_mode & 0o777 == mode
        cache.save(tmp_path / f"{mode:o}")
        assert (tmp_path / f"{mode:o}").stat().st_mode & 0o777 == mode, "the old file's"
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        cache.save(tmp_path / "file" / "cache")


KILLED = """
import sys
import torch
from support.small_model import small_config
from kvcache_compress import CompressedCache

torch.set_num_threads(1)
config = {"keys": {"method": "turboquant", "bits": 1}, "values": "none", "sink_tokens": 0, "recent_tokens": 0}
cache = CompressedCache(small_config(3), config)
for index in range(3):
    cache.update(*torch.randn(2, 8, 2, 10_016, 32), index)
print("ready", flush=True)
while True:
    cache.save(sys.argv[1])
"""


def test_a_killed_process(tmp_path: Path) -> None:
    """A process killed while it overwrites a file leaves the old file or the new one, complete."""
    path = tmp_path / "cache.safetensors"
    cache = TurboQuantCache(small_config(3), sink_tokens=0, recent_tokens=0)
    cache.update(*states(64), 0)
    cache.save(path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while [file.name for file in tmp_path.iterdir()] == [path.name]:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    loaded = CompressedCache.load(path, small_config(3))
    assert loaded.packed_tokens == loaded.get_seq_length()
    assert (loaded.packed_tokens, loaded.layers[0].batch_size) in ((64, 2), (10_016, 8))
