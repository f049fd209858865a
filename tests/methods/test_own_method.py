"""CONTRIBUTING's recipe: a method of three functions, in one file outside the package, does all that others do."""

from pathlib import Path

import own_method
import pytest
import torch
import yaml
from own_method import RoundingCodec
from support.cache_name import with_cache
from support.method_cases import bits_per_number, make_codec
from support.models.small_model import small_config, small_model

from kvcache_compress import CompressedCache, enable_fused_attention, get_method

MOST_LINES = 59
KEYS, VALUES = {"method": "rounding"}, {"method": "rounding", "bits": 3}
TURBOQUANT = {"method": "turboquant", "bits": 4}
CONTRACT = {"own-method": {"keys": KEYS, "values": VALUES}, "own-turboquant": {"keys": KEYS, "values": TURBOQUANT}}


def test_it_is_one_short_file() -> None:
    assert len(Path(own_method.__file__).read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    written = {name for name in vars(RoundingCodec) if not name.startswith("_")}
    assert written == {"name", "Options", "layout", "encode", "decode"}
    assert get_method("rounding") is RoundingCodec


@pytest.mark.parametrize("bits", [2, 5])
def test_numbers_are_rounded_to_the_nearest(bits: int) -> None:
    codec = make_codec("rounding", 64, bits=bits)
    assert bits_per_number(codec) == bits + 16 / 64
    assert codec.group == 1
    x = torch.randn(2, 1, 100, 64)
    fields = codec.encode(x)
    half_step = fields[-1].float()[..., None] / 2
    assert ((codec.decode(fields) - x).abs() <= 1.01 * half_step).all()
    assert not codec.decode(codec.encode(torch.zeros(1, 1, 8, 64))).abs().max() > 1e-6


@pytest.mark.parametrize(("pair", "backend"), zip(CONTRACT, ["triton", "cpp"], strict=True))
def test_other_backends_are_refused(pair: str, backend: str) -> None:
    config = {**CONTRACT[pair], "backend": backend}
    with pytest.raises(ValueError, match=rf'backend="{backend}" is unavailable for method \'rounding\'; use'):
        CompressedCache(small_config(), config)


@pytest.mark.parametrize(
    ("pair", "capacity", "fused"),
    [("own-method", None, False), ("own-method", 256, True), ("own-turboquant", None, True)],
)
def test_generate_save_and_load(pair: str, capacity: int | None, fused: bool, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**CONTRACT[pair], "max_cache_len": capacity}))
    model = small_model()
    if fused:
        enable_fused_attention(model)
    cache = CompressedCache(model.config, tmp_path / "own.yaml")
    ids = torch.randint(1, 64, (2, 160), generator=torch.Generator().manual_seed(1))
    generated = model.generate(ids, **with_cache(cache), max_new_tokens=4, do_sample=False)
    assert {layer.backend.name for layer in cache.layers} == {"torch"}
    report = cache.memory_report()
    assert all(layer.packed_tokens for layer in report.layers)
    assert report.layers[0].method.startswith("rounding")
    bits = 4.5 if pair == "own-turboquant" else 4.0  # of codes, and a scale of 16 bits for 32 numbers
    assert [8 * layer.packed_bytes / layer.packed_numbers for layer in report.layers] == [bits, bits]
    cache.save(tmp_path / "cache.safetensors")
    loaded = CompressedCache.load(tmp_path / "cache.safetensors", model.config)
    following = [model(generated[:, -1:], **with_cache(one)).logits for one in (cache, loaded)]
    assert torch.equal(*following)
