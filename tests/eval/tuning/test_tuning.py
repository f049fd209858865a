"""The tuner: exact allocation, budgets, additive losses, resumed measurements, its YAML and its errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.cache_name import with_cache
from support.models.saved_model import saved_model
from support.models.small_model import small_model
from support.models.toy_tokenizers import Letters
from transformers import DynamicCache, PreTrainedModel
from typer.testing import CliRunner

from kvcache_compress import CompressedCache, load_config
from kvcache_compress.cache.estimate import MODELS, ModelShape, packed_bits, total_bytes
from kvcache_compress.cli import app
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.config import CompressionConfig, SideConfig
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.runner.table import ResultTable, read_cells
from kvcache_compress.eval.tasks.perplexity import Perplexity
from kvcache_compress.eval.tasks.scoring import compare_tokens
from kvcache_compress.eval.tuning.sensitivity import Choices, Sensitivity, measure, with_bits
from kvcache_compress.eval.tuning.tune import RIVALS, Budget, tune

CONFIG = {
    "keys": {"method": "turboquant", "bits": 2},
    "values": {"method": "turboquant", "bits": 2},
    "sink_tokens": 4,
    "recent_tokens": 8,
}
LEVELS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "letters.txt"
    path.write_text("".join(chr(97 + (7 * number * number + number // 5) % 26) for number in range(3000)))
    return path


@pytest.mark.parametrize("preset", ["turboquant-3bit", "spectral-2bit"])
def test_budgets_are_those_of_the_estimate(preset: str) -> None:
    """A config's own bits, and the bytes of its whole cache, are budgets that it meets exactly."""
    config, shape = load_config(preset), MODELS["llama-3.1-8b"]
    bits = packed_bits(config, shape.head_dim, shape.layers, shape.kv_heads)
    sizes = shape.layers, shape.kv_heads, shape.head_dim
    memory = total_bytes(config, *sizes, 100_000, 3)
    assert Budget(shape, bits).spare(config) == pytest.approx(0, abs=1e-6)
    assert Budget(shape, None, memory, 100_000, 3).spare(config) == pytest.approx(0, abs=1e-6)
    one_bit_more = load_config(preset).changed(
        values={"method": "turboquant", "bits": config.values.options().bits + 1}
    )  # type: ignore[attr-defined]
    more = shape.layers * shape.head_dim / 8
    assert Budget(shape, bits).spare(one_bit_more) == pytest.approx(-more)
    assert Budget(shape, None, memory, 100_000, 3).spare(one_bit_more) == pytest.approx(-more, rel=1e-2)
    assert Budget(shape, None, 1e6, 100_000, 3).spare(config) < 0


def three_layers() -> PreTrainedModel:
    """A model whose first layer's attention output is zero, so that compressing it is harmless."""
    model = small_model(3)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    return model


CHOICES: Choices = {side: with_bits(SideConfig.of({"method": "turboquant", "bits": 2}), LEVELS) for side in SIDES}


def samples(text: Path) -> Any:
    return Perplexity(texts=(text,), prefix=112, scored=16, windows=2).samples(small_model(), Letters())


@pytest.fixture(scope="module")
def measured(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Sensitivity, Path]:
    record = tmp_path_factory.mktemp("tuning") / "measured.jsonl"
    runner = Runner(three_layers(), Letters(), record)
    return measure(runner, range(3), samples(text), load_config(CONFIG), CHOICES), record


def shape_of(model: PreTrainedModel) -> ModelShape:
    config = model.config
    return ModelShape(config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim)


@torch.inference_mode()
def test_a_side_is_measured_alone(measured: tuple[Sensitivity, Path], text: Path) -> None:
    """The KL of one side of a layer is that of the model's own prefills and steps with only this side compressed."""
    found, model = measured[0], three_layers()
    alone = {**CONFIG, "keys": {"method": "none"}, "layers": [{"match": [0, 1], "method": "none"}]}
    kl = []
    for sample in samples(text):
        tokens = torch.tensor(sample.data["continuation"])
        logits = []
        for cache in (DynamicCache(config=model.config), CompressedCache(model.config, alone)):
            parts = [model(input_ids=part, **with_cache(cache)).logits[0] for part in (sample.prompt, tokens[None])]
            logits.append(torch.cat([parts[0][-1:], parts[1]]))
        kl.append(compare_tokens(*logits, tokens)[1].mean().item())
    assert found.alone[2, "values"] == pytest.approx(sum(kl) / 2, rel=1e-3)
    assert kl[0] > 1e-6


def expected(found: Sensitivity, config: CompressionConfig, layers: int) -> float:
    """Sum of the KLs of all sides."""
    plans = config.plan(["full_attention"] * layers)
    return sum(found.loss(layer, side, CHOICES[side].index(plans[layer].side(side))) for layer, side in found.alone)


def test_harmless_layers_pay(measured: tuple[Sensitivity, Path]) -> None:
    """The layer that does nothing gets the fewest bits; the config fits the budget and is expected to lose less."""
    found, _ = measured
    shape = shape_of(three_layers())
    assert found.alone[0, "keys"] == pytest.approx(0, abs=1e-9)
    assert found.curves["values"] == sorted(found.curves["values"], reverse=True)
    assert found.curves["values"][LEVELS.index(2)] == 1
    budget = Budget(shape, 2 + 16 / shape.head_dim)
    tuned = tune(found, load_config(CONFIG), CHOICES, budget)
    plans = tuned.config.plan(["full_attention"] * 3)
    bits = [[plan.side(side).options().bits for side in SIDES] for plan in plans]  # type: ignore[attr-defined]
    assert bits[0] == [1, 1]
    assert max(bits[1] + bits[2]) >= 3
    assert 0 <= budget.spare(tuned.config) < 3 * 2
    assert len(tuned.rivals) == RIVALS
    for rival in tuned.rivals:
        assert budget.spare(rival) >= 0
        assert expected(found, tuned.config, 3) < expected(found, rival, 3)
        assert not rival.layers


def invented(losses: dict[tuple[int, Side], float]) -> Sensitivity:
    """A sensitivity with these losses at 2 bits; errors fall by four per bit."""
    return Sensitivity(losses, {side: [4.0 ** (2 - bits) for bits in LEVELS] for side in SIDES})


def test_layers_of_other_kinds_keep_their_places() -> None:
    """Rules name the model's own layers, while a budget counts the full-attention ones alone."""
    losses = {(layer, side): 1e-2 if layer == 3 else 1e-5 for layer in (1, 3) for side in SIDES}
    shape = ModelShape(2, 4, 2, 32)
    tuned = tune(invented(losses), load_config(CONFIG), CHOICES, Budget(shape, 3.0))
    plans = tuned.config.plan(["sliding_attention", "full_attention"] * 2)
    bits = {layer: plans[layer].keys.options().bits for layer in (1, 3)}  # type: ignore[attr-defined]
    assert bits[3] > bits[1] >= 1
    assert expected(invented(losses), tuned.config, 4) < expected(invented(losses), tuned.rivals[0], 4)


def test_large_and_small_budgets() -> None:
    losses = {(layer, side): 1e-3 for layer in (0, 1) for side in SIDES}
    shape, base = ModelShape(2, 4, 2, 32), load_config(CONFIG)
    large = tune(invented(losses), base, CHOICES, Budget(shape, None, 10**12, 4096))
    assert expected(invented(losses), large.config, 2) < 2.6e-4
    cheapest = base.changed(keys=CHOICES["keys"][0], values=CHOICES["values"][0])
    least = total_bytes(cheapest, shape.layers, shape.kv_heads, shape.head_dim, 400)
    tuned = tune(invented(losses), base, CHOICES, Budget(shape, None, least, 400))
    assert total_bytes(tuned.config, shape.layers, shape.kv_heads, shape.head_dim, 400) <= least
    with pytest.raises(ValueError, match=r"exceed it by .* \(12 tokens of each sequence stay dense\)"):
        tune(invented(losses), base, CHOICES, Budget(shape, None, 0.5 * least, 400))
    with pytest.raises(ValueError, match="12 tokens stay dense, so nothing would be packed"):
        tune(invented(losses), base, CHOICES, Budget(shape, None, least, 12))


def test_an_interrupted_measurement_goes_on(measured: tuple[Sensitivity, Path], text: Path, tmp_path: Path) -> None:
    found, record = measured
    cells = read_cells(record)
    kept = tmp_path / "measured.jsonl"
    ResultTable(kept).write(cells[:5])
    reports: list[tuple[int, int, str]] = []

    def again(config: CompressionConfig) -> Sensitivity:
        runner = Runner(three_layers(), Letters(), kept, on_progress=lambda *report: reports.append(report))
        return measure(runner, range(3), samples(text), config, CHOICES)

    repeated = again(load_config(CONFIG))
    assert reports[-1][:2] == (2 * (len(cells) - 5),) * 2, "two windows with each of the other configs"
    assert repeated.alone == pytest.approx(found.alone)
    assert repeated.curves == {side: pytest.approx(curve) for side, curve in found.curves.items()}
    again(load_config(CONFIG).changed(recent_tokens=16))
    assert reports[-1][:2] == (2 * len(cells),) * 2, "what was measured with another window does not count"
    with pytest.raises(ValueError, match="nothing is packed after 112 tokens"):
        again(load_config(CONFIG).changed(recent_tokens=120))


def run_command(*options: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["tune", *options])


def test_command(text: Path, tmp_path: Path) -> None:
    """The file is a config with its measured loss in the header."""
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(CONFIG))
    output = tmp_path / "my.yaml"
    given = ("--model", saved_model(), "--text", str(text), "--windows", "1", "--prefix", "112", "--device", "cpu")
    choices = ("--base", str(tmp_path / "base.yaml"), "--level", "1", "--level", "3", "--scored", "16")
    result = run_command(*given, *choices, "--bits", "2.6", "--output", str(output))
    assert result.exit_code == 0, result.output
    content = output.read_text()
    assert content.startswith("# Tuned by `kvcache-compress tune`")
    assert "bits per packed number, KL" in content
    config = load_config(output)
    model = small_model()
    CompressedCache(model.config, config)
    assert packed_bits(config, model.config.head_dim, model.config.num_hidden_layers, 2) <= 2.6


def test_command_refuses_in_a_sentence(text: Path, tmp_path: Path) -> None:
    output = ("--output", str(tmp_path / "x.yaml"))
    small = (*output, "--model", saved_model(), "--text", str(text), "--prefix", "112")
    for options, message in (
        (output, "give either --bits, or --memory"),
        ((*output, "--memory", "2GB"), "needs --context"),
        ((*output, "--bits", "3", "--batch", "2"), "have no effect with --bits"),
        ((*small, "--bits", "3", "--check-text", str(text.parent)), "is measured on too"),
        ((*output, "--memory", "2 apples", "--context", "4K"), "memory="),
        ((*small, "--bits", "3", "--windows", "40"), "is too short"),
        ((*small, "--bits", "1"), "even the fewest bits exceed"),
        ((*small, "--memory", "1KB", "--context", "4K"), "stay dense"),
        ((*small, "--bits", "3", "--base", "qjl-3bit"), "no option 'bits'"),
    ):
        result = run_command(*options)
        assert result.exit_code == 1, options
        assert message in " ".join(result.output.split()), result.output
