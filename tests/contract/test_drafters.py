"""Transformers' newest ways to draft, and their calls of a user's cache: extra layers (MTP), DFlash, `crop(0)`."""

from typing import Any

import pytest
import torch
import transformers
from support.cache_name import with_cache
from support.models import family_cases
from transformers import cache_utils

from kvcache_compress import CompressedCache, disable_fused_attention, enable_fused_attention
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.cache.offloading import Offloading
from kvcache_compress.storage.shared.rope_track import RopeTrack
from kvcache_compress.storage.view import record_paths

SIDE = {"method": "turboquant", "bits": 6}
CONFIG = {"keys": SIDE, "values": SIDE, "sink_tokens": 4, "recent_tokens": 16}
pytestmark = pytest.mark.skipif(
    not hasattr(cache_utils, "DFlashCache"), reason="this version of Transformers has no MTP and DFlash"
)


@pytest.fixture
def mtp(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """A GLM with two layers that draft, random as they come with no file."""
    from transformers.modeling_layers import MtpModel

    def made(main: Any, device_map: Any = None) -> Any:
        torch.manual_seed(0)
        model = MtpModel(main, 2).eval()
        model.tie_with_main_model(main)
        return model

    monkeypatch.setattr(MtpModel, "from_pretrained", made)
    return family_cases.build("glm4_moe", num_mtp_layers=2), {"use_mtp": True}


@pytest.fixture
def dflash() -> tuple[Any, dict[str, Any]]:
    """A Llama and a model that drafts 24 tokens at once from its hidden states."""
    main = family_cases.build("llama")
    torch.manual_seed(0)
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=main.config.hidden_size, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, block_size=24, mask_token_id=1, target_layer_ids=[0], sliding_window=64,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    drafting = transformers.MuseGlimmerAssistantModel(config).eval()
    return main, {"assistant_model": drafting, "speculation_type": "dflash"}


@pytest.mark.parametrize("capacity", [None, 200])
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_generate(kind: str, capacity: int | None, request: pytest.FixtureRequest) -> None:
    """The drafting layers have Transformers' own cache; fused attention serves the model and lets theirs through."""
    model, how = request.getfixturevalue(kind)
    ids = torch.randint(1, 60, (1, 90), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    found = []
    for fused, drafts in ((False, {}), (False, how), (True, how)):
        (enable_fused_attention if fused else disable_fused_attention)(model)
        cache = CompressedCache(model.config, {**CONFIG, "max_cache_len": capacity})
        with record_paths() as taken:
            found.append(model.generate(ids, **with_cache(cache), **options, **drafts, disable_compile=True))
        assert cache.packed_tokens == 96
    assert {path for path, queries in taken} - {"decode"} == {cache.layers[0].backend.name}
    assert all(torch.equal(found[0], one) for one in found)


@pytest.mark.parametrize("changes", [{}, {"max_cache_len": 100}, {"offloading": True}])
def test_crop_of_nothing_does_nothing(
    tiny_model: Any, ids: torch.Tensor, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` crops nothing in every step where it stops late, which must not wait for a device."""
    cache = CompressedCache(tiny_model.config, {**CONFIG, **changes})
    cache.activate_past_recording()
    with torch.no_grad():
        for part in (ids[:, :90], ids[:, 90:91]):
            tiny_model(part, **with_cache(cache))
    assert cache.packed_tokens > 0
    for owner, name in (
        (Offloading, "synchronize"),
        (RopeTrack, "truncate"),
        (CompressedLayer, "get_seq_length"),
        (CompressedLayer, "_length"),
        (CompressedLayer, "edited"),
    ):
        monkeypatch.setattr(owner, name, lambda *args, name=name: pytest.fail(name))
    cache.crop(0)
    cache.crop(tokens_to_remove=-0)
    monkeypatch.undo()


def test_crop_of_nothing_reaches_sliding_layers() -> None:
    """Layers of Transformers' own, which record their past, are cut to their window by it."""
    model = family_cases.build("gemma2")
    cache = CompressedCache(model.config, CONFIG)
    cache.activate_past_recording()
    ids = torch.randint(1, 60, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(ids, **with_cache(cache))
    sliding = next(layer for layer in cache.layers if not isinstance(layer, CompressedLayer))
    assert cache.packed_tokens > 0
    assert sliding.keys.shape[2] == 200
    cache.crop(0)
    assert sliding.keys.shape[2] == sliding.sliding_window - 1


def test_masks_begin_at_the_length(tiny_model: Any, ids: torch.Tensor) -> None:
    """`get_query_offset` and early initialization, by which masks and exports are made, work as in a full cache."""
    cache = CompressedCache(tiny_model.config, CONFIG)
    assert all(layer.supports_early_init for layer in cache.layers)
    cache.early_initialization(2, 2, 32, torch.float32, "cpu")
    assert cache.is_initialized
    with torch.no_grad():
        got = tiny_model(ids[:, :90], **with_cache(cache)).logits
        torch.testing.assert_close(got, tiny_model(ids[:, :90]).logits)
    assert cache.packed_tokens > 0
    assert [cache.get_query_offset(index) for index in range(3)] == [90, 90, 90]


def test_shared_keys_stay_packed_on_their_device(tiny_model: Any, ids: torch.Tensor) -> None:
    """`KVSharingDict.to`, by which accelerate moves shared keys and values, decodes none that is there already."""
    enable_fused_attention(tiny_model)
    layer = CompressedCache(tiny_model.config, CONFIG).layers[0]
    states = torch.randn(1, 2, 91, 32, generator=torch.Generator().manual_seed(0))
    layer.update(states[:, :, :90], states[:, :, :90])
    both = layer.update(states[:, :, 90:], states[:, :, 90:])
    disable_fused_attention(tiny_model)
    assert layer.packed_tokens > 0
    shared = cache_utils.KVSharingDict({"full_attention": both})
    shared.to(torch.device("cpu"))
    assert shared["full_attention"][0] is both[0]
    moved = both[1].to(torch.device("meta"), non_blocking=True)
    assert isinstance(moved, torch.Tensor)
    assert moved.shape == both[1].shape
    assert moved.is_meta
    assert both[0].to(torch.float64).dtype == torch.float64
