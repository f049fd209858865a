"""The probe of layers and sides: its configs, its numbers against runs by hand, its errors, its command."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.cache_name import with_cache
from support.models.saved_model import saved_model
from support.models.small_model import small_config, small_model
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from kvcache_compress import CompressedCache, load_config
from kvcache_compress.config import LayerPlan, SideConfig
from kvcache_compress.eval.cli.app import app
from kvcache_compress.eval.reporting.tables import MAX_KL
from kvcache_compress.eval.studies.layers import Probe, ProbeRow, probe_layers
from kvcache_compress.eval.studies.rules import DENSE, compress_only, leave_dense, plans_of, rules_yaml
from kvcache_compress.eval.tasks.perplexity import Perplexity
from kvcache_compress.eval.tasks.scoring import compare_logits

CONFIG = {
    "keys": {"method": "turboquant", "bits": 2},
    "values": {"method": "turboquant", "bits": 2},
    "sink_tokens": 4,
    "recent_tokens": 8,
}
PREFIX, SCORED, STEP = 176, 16, 8


class Characters:
    """A tokenizer with a token per character and no start token."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) % 64 for character in text]}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "letters.txt"
    path.write_text("".join(chr(97 + (7 * number * number + number // 5) % 26) for number in range(400)))
    return path


def windows(text: Path, **changes: Any) -> Perplexity:
    return Perplexity(texts=(text,), **{"prefix": PREFIX, "scored": SCORED, "windows": 2, "step": STEP, **changes})


def three_layers() -> PreTrainedModel:
    """A model whose first layer's attention output is zero, so that compressing it is harmless."""
    model = small_model(3)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    return model


@pytest.fixture(scope="module")
def probed(text: Path) -> Probe:
    return probe_layers(three_layers(), Characters(), load_config(CONFIG), windows(text), worst=2)


def test_every_side_of_every_layer(probed: Probe) -> None:
    assert {(row.layer, row.side) for row in probed.rows} == {(n, s) for n in range(3) for s in ("keys", "values")}
    assert [row.kl for row in probed.rows] == sorted((row.kl for row in probed.rows), reverse=True)
    assert probed.skipped == {}
    for row in probed.rows:
        assert row.method == "turboquant"
        assert row.stored_bits == 2.5
        assert row.packed_tokens == 160
        assert row.relative_mse == pytest.approx(0.083, abs=0.04)
        if row.layer == 0:
            assert row.kl == pytest.approx(0, abs=1e-9)
            assert row.attention_error is None
        else:
            assert row.kl > 1e-5
            assert row.kl_stderr is not None
            assert 0.01 < row.attention_error < 1
    assert {row.layer for row in probed.rows[-2:]} == {0}


@torch.inference_mode()
def test_figures_by_hand(probed: Probe, text: Path) -> None:
    """One side, window by window, by the model's own prefill into each cache."""
    model = three_layers()
    rule = {"match": [0, 1], "method": "none"}
    alone = {**CONFIG, "keys": {"method": "none"}, "layers": [rule]}
    kl, attention = [], []
    outputs: list[torch.Tensor] = []
    model.model.layers[2].self_attn.register_forward_hook(lambda module, given, output: outputs.append(output[0]))
    for sample in windows(text).samples(model, Characters()):
        tokens = torch.tensor(sample.data["continuation"])
        logits, seen = [], []
        for cache in (DynamicCache(config=model.config), CompressedCache(model.config, alone)):
            parts = [model(input_ids=sample.prompt, **with_cache(cache)).logits[0, -1:]]
            outputs.clear()
            parts += [model(input_ids=part[None], **with_cache(cache)).logits[0] for part in tokens.split(STEP)]
            logits.append(torch.cat(parts))
            seen.append(torch.cat(outputs, 1))
        kl.append(compare_logits(*logits, tokens)[1])
        attention.append(((seen[1] - seen[0]).norm() / seen[0].norm()).item())
    row = next(row for row in probed.rows if (row.layer, row.side) == (2, "values"))
    assert row.kl == pytest.approx(sum(kl) / 2, rel=1e-3)
    assert row.kl_stderr == pytest.approx(abs(kl[0] - kl[1]) / 2, rel=1e-2)
    assert row.attention_error == pytest.approx(sum(attention) / 2, rel=1e-3)


def test_rules_help_where_they_say(probed: Probe) -> None:
    rules = yaml.safe_load(probed.rules)
    plans, _ = plans_of(three_layers(), load_config({**CONFIG, **rules}))
    for row in probed.rows:
        assert (plans[row.layer].side(row.side) == DENSE) == (row in probed.rows[:2])
    assert probed.ruled.kl < probed.whole.kl
    assert probed.ruled.all_bits > probed.whole.all_bits


def test_rules_that_leave_much_loss_are_not_recommended(probed: Probe) -> None:
    for kl, advised in ((MAX_KL, True), (1.01 * MAX_KL, False)):
        changed = dataclasses.replace(probed, ruled=dataclasses.replace(probed.ruled, kl=kl))
        assert (changed.advice == probed.rules) == advised


def test_configs() -> None:
    """The config has rules of its own: one layer with more bits and no sinks, another left dense."""
    own = [
        {"match": 1, "values": {"method": "turboquant", "bits": 4}, "sink_tokens": 0},
        {"match": 3, "method": "none"},
    ]
    config = load_config({**CONFIG, "layers": own})
    model = small_model(4)
    plans, skipped = plans_of(model, config)
    assert list(skipped) == ["layer 3, keys", "layer 3, values"]
    two, four = config.keys, SideConfig(method="turboquant", bits=4)
    assert [plans[0], plans[1]] == [LayerPlan(two, two, 4, 8), LayerPlan(two, four, 0, 8)]

    types = ["full_attention"] * 4
    nothing = LayerPlan(DENSE, DENSE, 4, 8)
    alone = compress_only(config, plans[1], 1, "values").plan(types)
    assert alone == [nothing, LayerPlan(DENSE, four, 0, 8), nothing, nothing]
    assert compress_only(config, plans[0], 0, "keys").plan(types) == [
        LayerPlan(two, DENSE, 4, 8),
        nothing,
        nothing,
        nothing,
    ]

    milder = leave_dense(config, plans, [(0, "keys"), (1, "values"), (2, "keys"), (2, "values")])
    expected = [LayerPlan(DENSE, two, 4, 8), LayerPlan(two, DENSE, 0, 8), nothing, nothing]
    assert milder.plan(types) == expected
    written = yaml.safe_load(rules_yaml(milder))
    assert load_config({**CONFIG, **written}).plan(types) == expected
    assert rules_yaml(milder).splitlines()[1] == "  - {match: [0], keys: {method: none}}"


def test_layers_that_cannot_be_compressed(text: Path) -> None:
    sizes = small_config(2).to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    torch.manual_seed(0)
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32, "use_sliding_window": True}
    shape = {name: sizes[name] for name in (*names, "num_key_value_heads", "initializer_range", "pad_token_id")}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **kinds)).eval()
    found = probe_layers(model, Characters(), load_config(CONFIG), windows(text, windows=1), worst=1)
    assert list(found.skipped) == ["layer 0"]
    assert "cannot be compressed" in found.skipped["layer 0"]
    assert "Sliding" in found.skipped["layer 0"]
    assert {(row.layer, row.side) for row in found.rows} == {(1, "keys"), (1, "values")}
    assert all(row.kl > 0 and row.relative_mse is None and row.kl_stderr is None for row in found.rows)


def test_nothing_to_measure(text: Path) -> None:
    model = small_model()
    with pytest.raises(ValueError, match="layer 0, keys: nothing is compressed after a prefix of 24 tokens"):
        probe_layers(model, Characters(), load_config(CONFIG), windows(text, prefix=24))
    with pytest.raises(ValueError, match="worst=5: allowed 1 to 4"):
        probe_layers(model, Characters(), load_config(CONFIG), windows(text), worst=5)
    none = {"keys": {"method": "none"}, "values": {"method": "none"}}
    with pytest.raises(ValueError, match="nothing to probe"):
        probe_layers(model, Characters(), load_config(none), windows(text))


def test_command(text: Path, tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text(yaml.safe_dump({**CONFIG, "layers": [{"match": 0, "values": {"method": "none"}}]}))
    sizes = ["--prefix", "80", "--scored", "16", "--step", "8", "--windows", "1", "--worst", "1"]
    given = ["--cache", str(preset), "--text", str(text), *sizes, "--output", str(tmp_path / "out")]
    given += ["--model", saved_model()]
    done = CliRunner().invoke(app, ["probe", *given])
    assert done.exit_code == 0, done.output
    assert "layer 0, values: the config itself leaves it uncompressed" in done.output
    assert "\nlayers:\n  - {match: [" in done.output
    result = json.loads((tmp_path / "out" / "probe.json").read_text(encoding="utf-8"))
    assert {"command", "versions", "hardware", "config", "whole", "ruled", "skipped", "rules"} <= result.keys()
    assert len(result["rows"]) == 3
    assert {field.name for field in dataclasses.fields(ProbeRow)} == result["rows"][0].keys()
    assert (tmp_path / "out" / "probe.png").read_bytes().startswith(b"\x89PNG")
    done = CliRunner().invoke(app, ["probe", *given, "--recent-tokens", "100"])
    assert done.exit_code == 1
    assert "nothing is compressed after a prefix of 80 tokens" in done.output
