"""Configs: loading, rules for single layers, errors, and sizes with a unit."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Gemma3TextConfig, LlamaConfig

from kvcache_compress import CompressedCache, load_config, preset_names
from kvcache_compress.cache.estimate import packed_bits
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.config import BUDGETS, get_method, register_method
from kvcache_compress.validation import parse_size, size_text

FULL = ["full_attention"] * 6
SIDES: dict[str, Any] = {"keys": {"method": "turboquant", "bits": 3}, "values": {"method": "turboquant", "bits": 2}}


def llama(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**{**sizes, **changes})


def plan(*rules: dict[str, Any], layer_types: list[str] = FULL) -> list[Any]:
    return load_config({**SIDES, "layers": list(rules)}).plan(layer_types)


@pytest.mark.parametrize("name", preset_names())
def test_preset(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    path = tmp_path / "again.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == load_config(str(path)) == config
    assert load_config(yaml.safe_load(config.to_yaml())) == config
    if name.startswith("commvq"):
        with pytest.raises(ValueError, match=r"codebooks=None for commvq: .*kvcache-compress calibrate"):
            CompressedCache(llama(), name)
        return
    cache = CompressedCache(llama(), name)
    assert any(isinstance(layer, CompressedLayer) for layer in cache.layers)
    assert len(cache.layers) == 6


def test_budgets_stand_for_presets_that_need_no_file() -> None:
    """A name by budget is the preset that it stands for, with fewer code bits each, and can be asked for."""
    configs = [load_config(name) for name in BUDGETS]
    assert configs == [load_config(name) for name in BUDGETS.values()]
    bits = [packed_bits(config, 128) for config in configs]
    assert bits == sorted(bits, reverse=True)
    for name, found in zip(BUDGETS, bits, strict=True):
        assert 0 < found - float(name.removeprefix("best-").removesuffix("bit")) < 0.3
        assert CompressedCache(llama(), name).compression == load_config(name)


def test_yaml_on_and_off_are_no_booleans(tmp_path: Path) -> None:
    """YAML 1.1 reads a bare `off` as false."""
    path = tmp_path / "c.yaml"
    path.write_text("keys: {method: turboquant, center: off}\nvalues: none\n")
    assert load_config(path).keys.options().center == "off"
    path.write_text("keys: {method: turboquant, center: on}\nvalues: none\n")
    assert load_config(path).keys.options().center == "on"


def test_rules_by_number_range_and_type() -> None:
    plans = plan({"match": [0, -1], "method": "none"}, {"match": "2-3", "keys": {"method": "turboquant", "bits": 5}})
    assert [p.compresses for p in plans] == [False, True, True, True, True, False]
    assert [p.keys.options().bits for p in plans[1:5]] == [3, 5, 5, 3]
    assert [p.values.options().bits for p in plans[1:5]] == [2, 2, 2, 2]
    mixed = ["sliding_attention", "full_attention"] * 3
    plans = plan({"match": "full_attention", "recent_tokens": 7}, layer_types=mixed)
    assert [p.recent_tokens for p in plans] == [64, 7] * 3
    plans = plan({"match": -6, "sink_tokens": 1}, {"match": ["1", 2][1:], "sink_tokens": 2})
    assert [p.sink_tokens for p in plans] == [1, 16, 2, 16, 16, 16]


def test_a_rule_of_the_same_method_keeps_the_other_options() -> None:
    config = {"keys": {"method": "turboquant", "bits": 3, "scalar": "norm"}, "values": "none"}
    rules = [
        {"match": 1, "keys": {"method": "turboquant", "bits": 6}},
        {"match": 2, "keys": {"method": "kivi"}},
        {"match": 3, "method": "turboquant"},
    ]
    plans = load_config({**config, "layers": rules}).plan(FULL)
    assert (plans[1].keys.options().bits, plans[1].keys.options().scalar) == (6, "norm")
    assert plans[2].keys.options().model_dump() == {"bits": 4, "group_size": 32}
    assert (plans[3].keys.options().bits, plans[3].values.method) == (3, "turboquant")


def test_only_full_attention_is_compressed() -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=6, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, sliding_window=8
    )
    cache = CompressedCache(config, {**SIDES, "layers": [{"match": "sliding_attention", "method": "none"}]})
    compressed = [isinstance(layer, CompressedLayer) for layer in cache.layers]
    assert compressed == [kind == "full_attention" for kind in config.layer_types]
    assert any(compressed)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"match": 6, "method": "none"}], "match=6: this model has layers 0 to 5"),
        ([{"match": "4-6", "method": "none"}], "match='4-6': this model has layers 0 to 5"),
        ([{"match": "3-2", "method": "none"}], "match='3-2'"),
        ([{"match": "sliding_attention", "method": "none"}], "match='sliding_attention'.*it has full_attention"),
        ([{"match": [0, 1], "method": "none"}, {"match": "1-2", "sink_tokens": 1}], "rules 0 and 1 both match layer 1"),
    ],
)
def test_rules_that_do_not_fit(rules: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressedCache(llama(), {**SIDES, "layers": rules})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": {"method": "turboquant", "bits": 3.25}}, "bits=3.25 for turboquant"),
        ({"keys": {"method": "turboquant", "estimator": "none"}}, "estimator='none'.*'mse' or 'prod'"),
        ({"keys": {"method": "turboquant", "estimator": "prod", "scalar": "match"}}, "scalar='match'.*'norm'"),
        ({"keys": {"method": "turboqant"}}, "unknown method 'turboqant': .*kivi, none, .*turboquant"),
        ({"keys": {"bits": 4}}, "keys.method.*required"),
        ({"keys": {"method": "turboquant", "bit": 4}}, "unknown key 'bit' for turboquant: .*bits, "),
        ({"values": {"method": "turboquant", "bits": 9}}, "values.bits=9 for turboquant: "),
        (
            {"layers": [{"match": 1, "keys": {"method": "kivi", "bits": True}}, {"match": 0, "method": "kivy"}]},
            "layers.0.keys.bits=True for kivi: .*layers.1: unknown method 'kivy': ",
        ),
        ({"layers": [{"match": 10**40}]}, r"layers.0.match=\[<integer of 133 bits>\]"),
        ({"seed": 10**40}, "seed=<integer of 133 bits>"),
        ({"recent_tokens": "many"}, "recent_tokens='many'"),
        ({"backend": "cuda"}, "backend='cuda'.*'auto', 'triton', 'cpp' or 'torch'"),
        ({"recent": 5}, "unknown key 'recent' in the config: .*keys, values"),
        ({"layers": [{"match": 0, "bits": 4}]}, "unknown key 'layers.0.bits'.*match, method"),
        ({"layers": [{"match": 0, "method": "none", "keys": "kivi"}]}, "'method' for both sides, or 'keys'"),
    ],
)
def test_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Error messages name the key, the value, the allowed values and, if there is one, the file."""
    data = {**SIDES, **change}
    with pytest.raises(ValueError, match=message) as caught:
        load_config(data)
    assert "pydantic" not in str(caught.value)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError, match=message) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("turboquant-4bits", "turboquant-4bit"),
        ("TurboQuant-3bit", "turboquant-3bit"),
        ("trboquant_2bit", "turboquant-2bit"),
    ],
)
def test_an_unknown_preset_suggests_one(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"unknown preset '{name}': did you mean '{near}'"):
        load_config(name)
    with pytest.raises(ValueError, match=r"unknown preset 'xyz': the presets are .*kivi-2bit"):
        load_config("xyz")


def test_codebooks_go_to_the_sides_that_take_them() -> None:
    config = load_config(
        {
            "keys": "commvq",
            "values": {"method": "turboquant"},
            "layers": [{"match": 0, "values": {"method": "commvq", "codebooks": "own.safetensors"}}],
        }
    ).with_files(codebooks="file.safetensors")
    assert config.keys.options().codebooks == "file.safetensors"
    assert config.values.options() == load_config("turboquant-4bit").values.options()
    assert config.layers[0].values.options().codebooks == "own.safetensors"


def test_center_for_values() -> None:
    """Centring of values is refused when the cache is made, not at the first token."""
    config = {**SIDES, "values": {"method": "turboquant", "center": "on"}}
    with pytest.raises(ValueError, match="center='on' for values of turboquant "):
        CompressedCache(llama(), config)


def test_register_method_refuses() -> None:
    codec = get_method("kivi")
    for name in ("", "Kivi", "ki vi"):
        with pytest.raises(ValueError, match=f"name='{name}' of Codec2"):
            register_method(type("Codec2", (codec,), {"name": name}))
    with pytest.raises(ValueError, match="'kivi' is already registered by KIVICodec"):
        register_method(type("Codec2", (codec,), {"name": "kivi"}))
    assert register_method(codec) is codec


@pytest.mark.parametrize(
    ("given", "size"), [("2GB", 2 * 10**9), ("1.5GiB", 3 << 29), ("128K", 1 << 17), (" 4096 ", 4096), ("8kb", 8000)]
)
def test_sizes(given: str, size: int) -> None:
    assert parse_size(given, "memory") == size


@pytest.mark.parametrize("given", ["", "GB", "-2GB", "2XB", "0", "1.5B"])
def test_sizes_that_are_none(given: str) -> None:
    with pytest.raises(ValueError, match=r"memory=.*: .*2GB"):
        parse_size(given, "memory")


@pytest.mark.parametrize(
    ("size", "text"),
    [(2**29, "512.0 MiB"), (1.5 * 2**30, "1.50 GiB"), (2**20, "1.00 MiB"), (2**37, "128.0 GiB"), (3072, "3.00 KiB")],
)
def test_sizes_in_words(size: float, text: str) -> None:
    assert size_text(size) == text
