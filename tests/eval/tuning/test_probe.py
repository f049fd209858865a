"""The probe of layers and sides: its configs, its figures against runs by hand, its errors, its command."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from support.cache_name import with_cache
from support.models.saved_model import saved_model
from support.models.small_model import small_model
from support.models.toy_tokenizers import Letters
from transformers import DynamicCache, LlamaForCausalLM
from typer.testing import CliRunner

from kvcache_compress import CompressedCache, load_config
from kvcache_compress.cli.evaluate.app import app
from kvcache_compress.config import LayerPlan, SideConfig
from kvcache_compress.eval.reporting.tables import MAX_KL
from kvcache_compress.eval.tasks.perplexity import Perplexity
from kvcache_compress.eval.tasks.scoring import compare_tokens
from kvcache_compress.eval.tuning.probe import Probe, probe_layers
from kvcache_compress.eval.tuning.rules import DENSE, compress_only, leave_dense, plans_of, rules_yaml

CONFIG = {
    "keys": {"method": "turboquant", "bits": 2},
    "values": {"method": "turboquant", "bits": 2},
    "sink_tokens": 4,
    "recent_tokens": 8,
}
SIZES = {"prefix": 112, "scored": 16, "windows": 2, "step": 8}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "letters.txt"
    path.write_text("".join(chr(97 + (7 * number * number + number // 5) % 26) for number in range(400)))
    return path


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A model whose first layer's attention output is zero, so that compressing it is harmless."""
    model = small_model(2)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    return model


@pytest.fixture(scope="module")
def probed(model: LlamaForCausalLM, text: Path) -> Probe:
    return probe_layers(model, Letters(), load_config(CONFIG), Perplexity(texts=(text,), **SIZES), worst=1)


@torch.inference_mode()
def test_figures_by_hand(model: LlamaForCausalLM, probed: Probe, text: Path) -> None:
    """One side, window by window, by the model's own prefill into each cache."""
    assert {(row.layer, row.side) for row in probed.rows} == {(n, s) for n in range(2) for s in ("keys", "values")}
    assert [row.loss.kl for row in probed.rows] == sorted((row.loss.kl for row in probed.rows), reverse=True)
    alone = {**CONFIG, "keys": {"method": "none"}, "layers": [{"match": 0, "method": "none"}]}
    kl = []
    for sample in Perplexity(texts=(text,), **SIZES).samples(model, Letters()):
        tokens = torch.tensor(sample.data["continuation"])
        logits = []
        for cache in (DynamicCache(config=model.config), CompressedCache(model.config, alone)):
            parts = [model(input_ids=sample.prompt, **with_cache(cache)).logits[0, -1:]]
            parts += [model(input_ids=part[None], **with_cache(cache)).logits[0] for part in tokens.split(8)]
            logits.append(torch.cat(parts))
        kl.append(compare_tokens(*logits, tokens)[1].mean().item())
    row = next(row for row in probed.rows if (row.layer, row.side) == (1, "values"))
    assert (row.method, row.bits, row.loss.packed_tokens) == ("turboquant", 2.5, 96)
    assert row.loss.kl == pytest.approx(sum(kl) / 2, rel=1e-3)
    assert row.loss.kl_stderr == pytest.approx(abs(kl[0] - kl[1]) / 2, rel=1e-2)
    assert [row.loss.kl for row in probed.rows if row.layer == 0] == pytest.approx([0, 0], abs=1e-9)


def test_rules_help_where_they_say(model: LlamaForCausalLM, probed: Probe) -> None:
    plans, _ = plans_of(model, load_config({**CONFIG, **yaml.safe_load(probed.rules)}))
    for row in probed.rows:
        assert (plans[row.layer].side(row.side) == DENSE) == (row is probed.rows[0])
    assert probed.ruled.kl < probed.whole.kl
    assert probed.ruled.all_bits > probed.whole.all_bits
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
    plans, skipped = plans_of(small_model(4), config)
    assert list(skipped) == ["layer 3, keys", "layer 3, values"]
    two, four = config.keys, SideConfig(method="turboquant", bits=4)
    assert [plans[0], plans[1]] == [LayerPlan(two, two, 4, 8), LayerPlan(two, four, 0, 8)]

    types = ["full_attention"] * 4
    nothing = LayerPlan(DENSE, DENSE, 4, 8)
    alone = compress_only(config, plans[1], 1, "values").plan(types)
    assert alone == [nothing, LayerPlan(DENSE, four, 0, 8), nothing, nothing]

    milder = leave_dense(config, plans, [(0, "keys"), (1, "values"), (2, "keys"), (2, "values")])
    expected = [LayerPlan(DENSE, two, 4, 8), LayerPlan(two, DENSE, 0, 8), nothing, nothing]
    assert milder.plan(types) == expected
    assert load_config({**CONFIG, **yaml.safe_load(rules_yaml(milder))}).plan(types) == expected
    assert rules_yaml(milder).splitlines()[1] == "  - {match: [0], keys: {method: none}}"


def test_nothing_to_measure(model: LlamaForCausalLM, text: Path) -> None:
    windows = Perplexity(texts=(text,), **SIZES)
    none = {"keys": {"method": "none"}, "values": {"method": "none"}}
    for config, benchmark, worst, message in (
        (CONFIG, windows.model_copy(update={"prefix": 24}), 1, "nothing is packed after 24 tokens"),
        (CONFIG, windows, 5, "worst=5: must be between 1 and 4"),
        (none, windows, 1, "nothing to probe"),
    ):
        with pytest.raises(ValueError, match=message):
            probe_layers(model, Letters(), load_config(config), benchmark, worst=worst)


def test_command(text: Path, tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text(yaml.safe_dump({**CONFIG, "layers": [{"match": 0, "values": {"method": "none"}}]}))
    given = ["--text", str(text), "--prefix", "80", "--scored", "16", "--step", "8", "--windows", "1", "--worst", "1"]
    given += ["--output", str(tmp_path / "probe.json"), "--model", saved_model()]
    done = CliRunner().invoke(app, ["probe", "--cache", str(preset), *given])
    assert done.exit_code == 0, done.output
    assert "layer 0, values: the config leaves it dense" in done.output
    assert "\nlayers:\n  - {match: [" in done.output
    result = json.loads((tmp_path / "probe.json").read_text(encoding="utf-8"))
    assert {"command", "versions", "hardware", "config", "whole", "ruled", "skipped", "rules"} <= result.keys()
    assert [set(row) for row in result["rows"]] == [{"layer", "side", "method", "bits", "loss"}] * 3
    done = CliRunner().invoke(app, ["probe", "--cache", f"{preset}@recent=100", *given])
    assert done.exit_code == 1
    assert "nothing is packed after 80 tokens" in done.output
