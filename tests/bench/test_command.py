"""`kvcache-compress bench` with few tokens."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, T5Config
from typer.testing import CliRunner

from kvcache_compress.bench import decode, run
from kvcache_compress.bench.decode import DecodeTime
from kvcache_compress.bench.timing import copy_bandwidth
from kvcache_compress.cli import app

runner = CliRunner(env={"COLUMNS": "80"})
FEW = ["bench", "--model", "smollm2-135m", "--tokens", "64", "--repeats", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time the kernels of CPUs, as a user does, not those in Triton's interpreter; and a copy of few bytes."""
    monkeypatch.setattr(decode, "interpreting", lambda: False)
    monkeypatch.setattr(run, "copy_bandwidth", lambda device: copy_bandwidth(device, 1 << 20))


def test_table_and_file(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    chosen = ["--preset", "turboquant-4bit", "--preset", "kivi-2bit", "--batch", "1", "--batch", "2"]
    result = runner.invoke(app, [*FEW, *chosen, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "9 query heads, 3 key/value heads of 64. A copy" in result.output
    assert "…" not in result.output, "figures are cut off"
    assert all(f"{row['milliseconds']:.3f}" in result.output for row in json.loads(output.read_text())["decode"])
    found = json.loads(output.read_text())
    rows = found["decode"]
    assert [(row["cache"], row["batch"]) for row in rows] == [
        (name, batch) for batch in (1, 2) for name in ("full", "turboquant-4bit", "kivi-2bit")
    ]
    assert (found["dtype"], found["heads"]["kv_heads"], rows[0]["bits"]) == ("float32", 3, 32)
    assert all(row["milliseconds"] > 0 for row in rows)
    # 64 tokens of 4.25 bits at D = 64, and 16 + 64 of 32 bits.
    assert rows[1]["bits"] == pytest.approx((64 * 4.25 + 80 * 32) / 144)
    assert rows[1]["bound"] == pytest.approx(32 / rows[1]["bits"])
    assert rows[1]["speedup"] == pytest.approx(rows[0]["milliseconds"] / rows[1]["milliseconds"])
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_tokens_that_are_no_whole_groups_are_said() -> None:
    result = runner.invoke(app, [*FEW, "--preset", "kivi-2bit", "--tokens", "100"])
    assert result.exit_code == 1
    assert "must be a multiple of 32 for kivi (got 100)" in " ".join(result.output.split())


def test_names_of_files_are_shown_without_folders(tmp_path: Path) -> None:
    preset, output = tmp_path / "[red]own.yaml", tmp_path / "bench.json"
    preset.write_text("keys: {method: turboquant, bits: 4}\nvalues: {method: turboquant, bits: 2}\n")
    result = runner.invoke(app, [*FEW, "--preset", str(preset), "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "[red]own.yaml" in result.output
    assert str(tmp_path) not in output.read_text().replace(json.dumps(str(output)), "")


def test_models_in_16_bits() -> None:
    result = runner.invoke(app, [*FEW, "--preset", "turboquant-4bit", "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    assert "on cpu, bfloat16" in result.output
    assert "16.00" in result.output


def test_shape_of_a_folder_and_of_what_cannot_be_compressed(tmp_path: Path) -> None:
    LlamaConfig(num_attention_heads=8, num_key_value_heads=2, head_dim=32, hidden_size=64).save_pretrained(tmp_path)
    result = runner.invoke(app, [*FEW, "--preset", "turboquant-4bit", "--model", str(tmp_path)])
    assert "8 query heads, 2 key/value heads of 32. A copy" in result.output
    T5Config().save_pretrained(tmp_path)
    result = runner.invoke(app, [*FEW, "--model", str(tmp_path)])
    assert result.exit_code == 1
    assert "encoder-decoder" in result.output


def test_a_failed_measurement_is_a_row_and_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [DecodeTime("full", "smollm2-135m", 1, 64, 1.0, 2.0, 32.0, 1.0, 1.0)]
    rows += [DecodeTime("turboquant-4bit", "smollm2-135m", 1, 64, error="out of memory: 80 GiB")]
    rows += [DecodeTime("kivi-2bit", "smollm2-135m", 1, 64, 1.0, 2.0, 3.0, invalid="attention differs by 0.5")]
    monkeypatch.setattr(run, "measure_decode", lambda *_: iter(rows))
    result = runner.invoke(app, FEW)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "turboquant-4bit, batch 1 x 64 tokens: out of memory: 80 GiB" in said
    assert "kivi-2bit, batch 1 x 64 tokens: the time does not count: attention differs by 0.5" in said
