"""The command line."""

from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from kvcache_compress import preset_names
from kvcache_compress.cli import app
from kvcache_compress.config import load_config
from kvcache_compress.estimate import cache_bytes, packed_bits

runner = CliRunner(env={"COLUMNS": "200"})


@pytest.mark.parametrize("terminal", [{"COLUMNS": "200"}, {"COLUMNS": "80"}, {"TERM": "dumb"}])
@pytest.mark.parametrize("command", ["presets", "memory"])
def test_presets_are_listed_unabridged_on_any_terminal(command: str, terminal: dict[str, str]) -> None:
    output = runner.invoke(app, [command], env=terminal).output
    assert all(name in output for name in preset_names())


def test_memory_of_the_default_shape() -> None:
    result = runner.invoke(app, ["memory", "--tokens", "131072"])
    assert result.exit_code == 0
    assert "16.00" in result.output  # GiB of Llama-3.1-8B's bfloat16 cache at 128K


def test_memory_of_an_unknown_model_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = runner.invoke(app, ["memory", "--model", "no/such-model"])
    assert result.exit_code == 1
    assert "Traceback" not in result.output


def test_demo_of_an_unknown_preset_is_a_message() -> None:
    result = runner.invoke(app, ["demo", "--preset", "turboquant-4bits"])
    assert result.exit_code == 1
    assert "did you mean 'turboquant-4bit'" in result.output


def test_doctor_names_the_backend() -> None:
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "backend" in result.output


def test_eval_passes_its_options_on() -> None:
    result = runner.invoke(app, ["eval", "--cache", "nonsense"])
    assert result.exit_code == 1
    assert "nonsense" in result.output


def test_estimates_by_hand() -> None:
    """4 bits at D = 128: 64 bytes of codes and 2 of scale per vector; 80 tokens of 1,000 dense."""
    config = load_config("turboquant-4bit")
    assert packed_bits(config, 128) == pytest.approx(8 * 66 / 128)
    per_head = 80 * 2 * 128 * 2 + (1000 - 80) * 2 * 66
    assert cache_bytes(config, layers=3, kv_heads=2, head_dim=128, tokens=1000) == 3 * 2 * per_head


@pytest.mark.slow
def test_demo_runs() -> None:
    result = runner.invoke(app, ["demo", "--new-tokens", "8"])
    assert result.exit_code == 0, result.output
    assert "tokens packed at 4.25 bits" in " ".join(result.output.split())


def test_memory_where_a_preset_does_not_fit() -> None:
    result = runner.invoke(app, ["memory", "--head-dim", "80"])
    assert result.exit_code == 0
    assert "kivi-2bit: group_size=32" in result.output
    assert "turboquant-4bit" in result.output


@pytest.mark.parametrize("kind", ["Mamba2Config", "T5Config"])
def test_memory_of_a_model_without_such_a_cache(kind: str, tmp_path: Path) -> None:
    getattr(transformers, kind)().save_pretrained(tmp_path)
    result = runner.invoke(app, ["memory", "--model", str(tmp_path)])
    assert result.exit_code == 1
    assert "error:" in result.output


def test_memory_counts_full_attention_layers(tmp_path: Path) -> None:
    transformers.Gemma3TextConfig(num_hidden_layers=12).save_pretrained(tmp_path)
    result = runner.invoke(app, ["memory", "--model", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "2 full-attention layers" in result.output
