"""Configs: loading, rules for single layers, errors, sizes, and options without effect or of wrong types."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.models.small_model import small_config

from kvcache_compress import (
    CompressedCache,
    CompressionConfig,
    KIVICache,
    PolarQuantCache,
    QJLCache,
    TurboQuantCache,
    load_config,
    preset_names,
)
from kvcache_compress.cache.estimate import packed_bits
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.config import BUDGETS, get_method, register_method
from kvcache_compress.eval.caches.caches import preset_cache
from kvcache_compress.validation import parse_size

FULL = ["full_attention"] * 6
MODEL = small_config(6, head_dim=64)
SIDES: dict[str, Any] = {"keys": {"method": "turboquant", "bits": 3}, "values": {"method": "turboquant", "bits": 2}}


def as_yaml(config: CompressionConfig) -> str:
    return yaml.safe_dump(config.model_dump(exclude_none=True), sort_keys=False)


def plan(*rules: dict[str, Any], layer_types: list[str] = FULL) -> list[Any]:
    return load_config({**SIDES, "layers": list(rules)}).plan(layer_types)


@pytest.mark.parametrize("name", preset_names())
def test_preset(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    path = tmp_path / "again.yaml"
    path.write_text(as_yaml(config))
    assert load_config(path) == load_config(str(path)) == config
    assert load_config(yaml.safe_load(as_yaml(config))) == config
    assert as_yaml(load_config(preset_cache(config.model_dump(), name="x").description)) == as_yaml(config)
    if name.startswith("commvq"):
        with pytest.raises(ValueError, match=r"codebooks=None for commvq: .*kvcache-compress calibrate"):
            CompressedCache(MODEL, name)
        return
    cache = CompressedCache(MODEL, name)
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
        assert CompressedCache(MODEL, name).compression == load_config(name)


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
        CompressedCache(MODEL, {**SIDES, "layers": rules})


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
        ({"layers": [{"match": 10**40}]}, r"layers.0.match=\[1000+.*the rule changes nothing"),
        ({"seed": 10**40}, "seed=1000+.*less than or equal to 2147483647"),
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


def test_an_unknown_preset_suggests_one() -> None:
    with pytest.raises(ValueError, match="unknown preset 'TurboQuant_3bits': did you mean 'turboquant-3bit'"):
        load_config("TurboQuant_3bits")
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


IDLE = [
    ({"method": "turboquant", "bits": 2, "outlier_fraction": 0.25}, "outlier_fraction", "fractional bits"),
    ({"method": "turboquant", "outlier_fraction": 0.5}, "outlier_fraction", "fractional bits"),
    ({"method": "turboquant", "sketch": "gaussian"}, "sketch", "estimator 'prod'"),
    ({"method": "turboquant", "bits": 1, "codebook": "uniform"}, "codebook", "more bits"),
    ({"method": "turboquant", "bits": 2, "estimator": "prod", "codebook": "uniform"}, "codebook", "more bits"),
    ({"method": "polarquant_recursive", "precondition": False, "shared_rotation": True}, "shared_rotation", "precond"),
    ({"method": "polarquant_rope", "radius_scale": "channel", "group_size": 64}, "group_size", "radius_scale 'group'"),
    ({"method": "qjl", "outlier_channels": 8, "equalize": "auto"}, "equalize", "no outlier_channels"),
]


@pytest.mark.parametrize(("side", "name", "need"), IDLE, ids=[f"{side['method']}-{name}" for side, name, _ in IDLE])
def test_options_without_effect_are_refused(side: dict[str, Any], name: str, need: str, tmp_path: Path) -> None:
    value = "True" if side[name] is True else repr(side[name])
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"keys": side, "values": "none"}))
    with pytest.raises(ValueError, match=f"mine.yaml: keys.{name}={value} for {side['method']}: has .*{need}"):
        load_config(path)
    with pytest.raises(ValueError, match=f"layers.0.keys.{name}={value} for {side['method']}: has an effect only"):
        load_config({"keys": "none", "values": "none", "layers": [{"match": 0, "keys": side}]})
    with pytest.raises(ValueError, match=f"layers.0.keys.{name}="):
        load_config({"keys": side["method"], "values": "none", "layers": [{"match": 0, "keys": side}]})
    assert load_config({"keys": {k: v for k, v in side.items() if k != name}, "values": "none"}).keys.idle() == {}


def test_a_rule_may_leave_an_inherited_option_without_effect() -> None:
    """A rule may drop an inherited option's effect, as whole bits do among fractional ones, or give it one."""
    keys = {"method": "turboquant", "bits": 2.5, "outlier_fraction": 0.25}
    rules = [
        {"match": 0, "keys": {"method": "turboquant", "bits": 4}},
        {"match": 1, "keys": {"method": "turboquant", "outlier_fraction": 0.5}},
    ]
    config = load_config({"keys": keys, "values": "none", "layers": rules})
    plans = config.plan(["full_attention"] * 3)
    assert [plan.keys.model_dump() for plan in plans] == [
        {"method": "turboquant", "bits": 4},
        keys | {"outlier_fraction": 0.5},
        keys,
    ]
    assert load_config(yaml.safe_load(as_yaml(config))) == config
    qjl = {"keys": {"method": "qjl", "equalize": "off"}, "values": "none"}
    rule = {"match": 0, "keys": {"method": "qjl", "outlier_channels": 8}}
    assert load_config({**qjl, "layers": [rule]}).plan(["full_attention"])[0].keys.model_dump() == rule["keys"]


def test_an_option_of_both_sides_needs_one_that_can_use_it() -> None:
    config = TurboQuantCache(small_config(), key_bits=2.5, value_bits=4, outlier_fraction=0.25).compression
    assert config.keys.options().outlier_fraction == 0.25
    assert config.values.model_dump() == {"method": "turboquant", "bits": 4}
    with pytest.raises(ValueError, match=r"outlier_fraction=0.25 for turboquant: has .* fractional bits"):
        TurboQuantCache(small_config(), bits=4, outlier_fraction=0.25)
    for kind in (TurboQuantCache, KIVICache):
        with pytest.raises(ValueError, match=r"bits=3 .*key_bits and value_bits"):
            kind(small_config(), bits=3, key_bits=4, value_bits=2)
        assert kind(small_config(head_dim=32), bits=3, key_bits=4).compression.values.options().bits == 3


def test_rules_without_effect() -> None:
    sides = {"keys": "turboquant", "values": "turboquant"}
    with pytest.raises(ValueError, match=r"match=\[0\]: the rule changes nothing"):
        load_config({**sides, "layers": [{"match": 0}]})
    for name in ("sink_tokens", "recent_tokens"):
        with pytest.raises(ValueError, match=f"layers.0.{name}=3: has an effect only"):
            load_config({**sides, "layers": [{"match": 0, "method": "none", name: 3}]})
        load_config({**sides, "layers": [{"match": 0, "keys": "none", name: 3}]})


def test_numbers_of_numpy_are_numbers() -> None:
    cache = KIVICache(small_config(head_dim=32), bits=np.int64(3), recent_tokens=np.int32(32))
    assert cache.compression == KIVICache(small_config(head_dim=32), bits=3, recent_tokens=32).compression
    assert TurboQuantCache(small_config(), bits=np.float32(2.5)).compression.keys.options().bits == 2.5
    assert load_config(yaml.safe_load(as_yaml(cache.compression))) == cache.compression


@pytest.mark.parametrize("head_dim", [16, 24, 40, 64, 80, 96])
def test_defaults_fit_every_head_dimension_or_say_what_does(head_dim: int) -> None:
    config = small_config(head_dim=head_dim)
    for kind in (QJLCache, TurboQuantCache):
        kind(config)
    assert QJLCache(config, values={"bits": 3}).compression.values.options().bits == 3
    group = next((size for size in (32, 16) if head_dim % size == 0), None)
    expected = {"method": "kivi", "bits": 3, "group_size": group} if group else {"method": "turboquant", "bits": 3}
    assert QJLCache(config, values={"bits": 3}).compression.values.model_dump() == expected
    fits = "use turboquant" if group is None else f"head dimension {head_dim}; use 16"
    if head_dim % 32:
        with pytest.raises(ValueError, match=f"group_size=32 for kivi values .*{fits}"):
            KIVICache(config)
    else:
        KIVICache(config)
    for variant, least in (("recursive", 32), ("rope", 16)):
        if head_dim % 16 == 0 and head_dim >= least:
            PolarQuantCache(config, variant=variant)
            continue
        with pytest.raises(ValueError, match=f"head_dim={head_dim} for polarquant_{variant} .*use turboquant"):
            PolarQuantCache(config, variant=variant)


def test_options_of_values_change_the_default() -> None:
    config = small_config(head_dim=32)
    assert QJLCache(config, values={"group_size": 16}).compression.values.options().bits == 2
    assert QJLCache(config, values="kivi").compression.values.options().bits == 4
    assert PolarQuantCache(config, values={"bits": 3}).compression.values.model_dump() == {
        "method": "polarquant_recursive",
        "bits": 3,
    }
    assert (
        PolarQuantCache(config, variant="rope", values={"bits": 3}).compression.values
        == CompressionConfig(keys="none", values={"method": "turboquant", "bits": 3}).values
    )
