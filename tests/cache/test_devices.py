"""Layers on several devices, offloaded layers, and models that `accelerate` spreads over memory and disk."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from support.cache_name import with_cache
from support.kernels.fake_device import CPU, fake_devices
from support.models.small_model import (
    HEAD_DIM,
    HEADS,
    METHODS,
    VOCAB,
    method_config,
    mixed_config,
    small_config,
    small_model,
)

from kvcache_compress import (
    CompressedCache,
    TurboQuantCache,
    disable_fused_attention,
    enable_fused_attention,
)
from kvcache_compress.attention.interface import fused_name
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.checks import PackableChecks
from kvcache_compress.storage.view import View

SIZES = [44, 1, 33, 1]
LAYERS = 2


@pytest.fixture
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off checks that use a device's events, which fake devices do not have."""
    monkeypatch.setattr(PackableChecks, "add", lambda *_: None)


def make_cache(name: str, fused: bool, **changes: Any) -> CompressedCache:
    config = small_config(LAYERS)
    if fused:
        config._attn_implementation = fused_name("sdpa")
    return CompressedCache(config, {**method_config(name, LAYERS), "backend": "torch", **changes})


def steps(
    cache: CompressedCache, devices: list[torch.device], sizes: list[int] = SIZES, rows: int = 2
) -> list[torch.Tensor]:
    """Attention outputs of each layer and step, on the layer's own device, with positions that differ per row."""
    generator = torch.Generator().manual_seed(cache.get_seq_length())
    outputs = []
    for size in sizes:
        start = cache.get_seq_length()
        positions = torch.arange(start, start + size) + 5 * torch.arange(rows)[:, None]
        angles = positions[..., None] * 10_000 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        factors = torch.cat([angles, angles], -1)
        for layer, device in enumerate(devices):
            if cache.layers[layer].track is not None:
                cache.layers[layer].track.inputs = (factors.cos().to(device), factors.sin().to(device))
            x = torch.randn(rows, HEADS, size, HEAD_DIM, generator=generator).to(device)
            keys, values = cache.update(x, x, layer)
            assert keys.device == values.device == device
            if isinstance(keys, View) and size <= 16:
                keys = keys.attend(AttentionCall.of(x, scaling=1.0), values)
                assert keys.device == device
            outputs.append(keys.cpu())
    return outputs


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(("name", "fused"), [*((name, True) for name in METHODS), ("kivi", False), ("commvq", False)])
@pytest.mark.usefixtures("_unchecked")
def test_layers_on_two_devices(name: str, fused: bool) -> None:
    """No step mixes devices, and results equal those on a single device, also after crop, reorder and reset."""
    cache, same = make_cache(name, fused), make_cache(name, fused)
    here = [CPU] * LAYERS
    with fake_devices() as devices:
        for operation in (
            lambda one: one.crop(-20),
            lambda one: one.reorder_cache(torch.tensor([1, 0])),
            lambda one: one.reset(),
        ):
            assert equal(steps(cache, list(devices)), steps(same, here))
            assert cache.packed_tokens == same.packed_tokens >= 64
            operation(cache)
            operation(same)
        steps(cache, list(devices))
        steps(same, here)
        twin = copy.deepcopy(cache)
        assert equal(steps(twin, list(devices)), steps(same, here))
        for layer, device in zip(twin.layers, devices, strict=True):
            tensors = [x for side in layer.sides.values() for x in (side.sinks, side.tail.buffer, *side.store.buffers)]
            assert {x.device for x in tensors} == {device}
        report, expected = cache.memory_report(), make_cache(name, fused).memory_report()
        assert expected.fields.get("rope", 0) == 0
        rows = sum(track.rows(sum(SIZES)) for track in cache.rope_tracks)
        assert report.fields.get("rope", 0) == 2 * 2 * rows * HEAD_DIM * 2


class FakeStream:
    """Stream that records which stream waits for which."""

    def __init__(self, device: torch.device, events: list[tuple[str, str]]) -> None:
        self.name, self.events = f"side of {device}", events

    def wait_stream(self, other: "FakeStream") -> None:
        self.events.append((f"{self.name} waits", other.name))

    def __enter__(self) -> None:
        self.events.append(("enter", self.name))

    def __exit__(self, *_: Any) -> None:
        self.events.append(("exit", self.name))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Recorded operations of streams and layers, as `(operation, stream or layer)`."""
    noted: list[tuple[str, str]] = []

    def current(device: torch.device) -> FakeStream:
        stream = FakeStream(device, noted)
        stream.name = f"current of {device}"
        return stream

    def moved(what: str) -> Callable[[CompressedLayer], None]:
        original = getattr(CompressedLayer, what)

        def note(layer: CompressedLayer) -> None:
            if layer.is_initialized:
                noted.append((what, str(layer.index)))
            original(layer)

        return note

    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(device, noted))
    monkeypatch.setattr(torch.accelerator, "current_stream", current)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: noted.append(("synchronize", str(device))))
    for what in ("offload", "prefetch"):
        monkeypatch.setattr(CompressedLayer, what, moved(what))
    return noted


def places(layer: CompressedLayer) -> set[torch.device]:
    return {x.device for side in layer.sides.values() for x in (side.sinks, side.tail.buffer, *side.store.buffers)}


@pytest.mark.parametrize(("name", "fused"), [("turboquant", True), ("spectral", True), ("commvq", False)])
@pytest.mark.usefixtures("_unchecked")
def test_offloading(name: str, fused: bool, events: list[tuple[str, str]], tmp_path: Path) -> None:
    """A layer is on its device for its own step and prefetched during the one before; results stay the same."""
    cache, same = make_cache(name, fused, offloading=True), make_cache(name, fused)
    with fake_devices() as (device, _):
        steps(cache, [device] * LAYERS, [44])
        assert places(cache.layers[1]) == {CPU}
        assert places(cache.layers[0]) == {device}
        events.clear()
        side, current = f"side of {device}", f"current of {device}"
        steps(cache, [device] * LAYERS, [1])
        one = [
            (f"{current} waits", side), ("prefetch", "{own}"), (f"{side} waits", current), ("enter", side),
            ("prefetch", "{other}"), ("exit", side), ("offload", "{own}"),
        ]  # fmt: skip
        assert events == [(what, who.format(own=own, other=1 - own)) for own in range(LAYERS) for what, who in one]
        steps(same, [CPU] * LAYERS, [44])
        steps(same, [CPU] * LAYERS, [1])
        assert equal(steps(cache, [device] * LAYERS), steps(same, [CPU] * LAYERS))

        def settled(change: Callable[[], Any]) -> Any:
            """Call `change`, and assert that it first waits for all copies."""
            events.clear()
            result = change()
            assert events[0] == ("synchronize", str(device))
            return result

        settled(lambda: cache.crop(-50))
        same.crop(-50)
        settled(lambda: cache.reorder_cache(torch.tensor([1, 0])))
        same.reorder_cache(torch.tensor([1, 0]))
        settled(lambda: cache.save(tmp_path / "cache"))
        twin = settled(lambda: copy.deepcopy(cache))
        expected = steps(same, [CPU] * LAYERS)
        assert equal(steps(twin, [device] * LAYERS), expected)
        assert equal(steps(cache, [device] * LAYERS), expected)
        assert torch.equal(cache.layers[1].keys.cpu(), same.layers[1].keys)
        assert cache.packed_tokens == same.packed_tokens >= 64
        assert cache.memory_report().total_bytes == same.memory_report().total_bytes


def test_offloading_of_static_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"offloading.*max_cache_len"):
        TurboQuantCache(small_config(), offloading=True, max_cache_len=100)


@pytest.mark.parametrize("way", ["dispatched", "after"])
@pytest.mark.parametrize("fused", [True, False])
def test_weights_on_disk(tmp_path: Path, way: str, fused: bool) -> None:
    """Position hooks work beside those of `accelerate`, which move weights in and out around each layer."""
    names = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    model, whole = small_model(), small_model()
    if way == "after":
        enable_fused_attention(model)
    device_map = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
    dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path)
    ids = torch.randint(1, VOCAB, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    assert {str(x.device) for x in model.model.layers[1].parameters()} == {"meta"}
    outputs, caches = [], []
    for one in (whole, model):
        (enable_fused_attention if fused else disable_fused_attention)(one)
        caches.append(CompressedCache(one.config, {**mixed_config(), "offloading": one is model}))
        how = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        outputs.append(one.generate(ids, attention_mask=mask, **with_cache(caches[-1]), **how))
        assert caches[-1].packed_tokens >= 64
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert torch.equal(torch.stack(outputs[0].logits), torch.stack(outputs[1].logits))
    tracks = [cache.rope_tracks[0] for cache in caches]
    packed = caches[0].packed_tokens
    assert torch.equal(*(torch.cat(track.read(0, packed), -1) for track in tracks))
    rows_differ = not torch.equal(*tracks[1].read(9, packed)[0])
    assert rows_differ == fused
