"""Attention is compared before it is timed, wrong attention marked; rows of failures; `kvcache-compress bench`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers import LlamaConfig, T5Config
from typer.testing import CliRunner

from kvcache_compress.bench import compare, decode, peers, run
from kvcache_compress.bench.decode import DecodeTime
from kvcache_compress.bench.layers import Shape
from kvcache_compress.bench.timing import copy_bandwidth, median_ms
from kvcache_compress.cli import app
from kvcache_compress.codecs.mask import Mask
from kvcache_compress.config import preset_names
from kvcache_compress.storage.shared.rope_track import _warn_once
from kvcache_compress.storage.view import View

CPU = torch.device("cpu")
TINY = Shape(4, 2, 64)
NAN = float("nan")


@pytest.fixture(autouse=True)
def _same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU kernels, and a seed: the 16-bit error of so few numbers varies by a tenth and comes close to the bound."""
    torch.manual_seed(0)
    monkeypatch.setattr(decode, "interpreting", lambda: False)


def test_plain_attention_is_attention() -> None:
    query, keys, values = torch.randn(2, 4, 64), torch.randn(2, 2, 37, 64), torch.randn(2, 2, 37, 32)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None], keys, values, enable_gqa=True, scale=0.2
    )
    torch.testing.assert_close(compare.plain_attention(query, keys, values, 0.2), expected[:, :, 0])


@pytest.mark.parametrize("grouped_queries", [False, True])
def test_pytorchs_attention_with_queries_apart_or_grouped(grouped_queries: bool) -> None:
    query, keys, values = torch.randn(3, 4, 64), torch.randn(3, 2, 48, 64), torch.randn(3, 2, 48, 64)
    found = peers.sdpa(query, keys, values, [SDPBackend.MATH], grouped_queries)()
    torch.testing.assert_close(found, compare.plain_attention(query, keys, values, 64**-0.5))


def test_the_last_row_is_compared_and_another_one() -> None:
    query, keys, values = torch.randn(3, 4, 64), torch.randn(3, 2, 40, 64), torch.randn(3, 2, 40, 64)
    right = compare.plain_attention(query, keys, values, 0.2)
    seen = []

    def read(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(rows))
        return keys[rows], values[rows]

    for _ in range(40):
        assert compare.compare(lambda: right, query, read, 0.2) == (0, None)
    assert {*seen} == {(0, 2), (1, 2), (2,)}


@pytest.mark.parametrize("wrong", [1, 2])
def test_both_calls_are_compared(wrong: int) -> None:
    query, keys = torch.randn(1, 4, 64), torch.randn(1, 2, 40, 64)
    right, calls = compare.plain_attention(query, keys, keys, 0.2), iter((1, 2))
    spoiled = lambda: right * (1.01 if next(calls) == wrong else 1)  # noqa: E731
    found = compare.compare(spoiled, query, lambda _: (keys, keys), 0.2)
    assert found.problem == "attention differs by 1.0e-02 of its size, more than 2.0e-03"
    assert found.error == pytest.approx(0.01, rel=1e-3)


def spoil(monkeypatch: pytest.MonkeyPatch, row: int, factor: float) -> None:
    """Make a row of attention's results wrong."""
    attend = View.attend

    def attend_wrongly(*arguments: Any) -> torch.Tensor:
        out = attend(*arguments)
        out[row] *= factor
        return out

    monkeypatch.setattr(View, "attend", attend_wrongly)


@pytest.mark.parametrize(("row", "factor"), [(2, 1.01), (0, NAN)])
def test_wrong_attention_is_marked(monkeypatch: pytest.MonkeyPatch, row: int, factor: float) -> None:
    """Wrong or infinite results are detected, the latter in any row, even if it is not compared."""
    spoil(monkeypatch, row, factor)
    full, ours = decode.measure_decode(["kivi-2bit"], "tiny", TINY, [3], [64], CPU, 1, torch.float32)
    assert full.error is None
    assert full.milliseconds
    assert 0 < (full.attention_error or 0) < 1e-5
    assert "attention differs by" in str(ours.invalid)
    assert (ours.attention_error is None) == (factor != factor)
    assert ours.milliseconds


@pytest.mark.parametrize("name", ["polarquant-rope-4bit", "commvq-2bit"])
def test_right_attention_is_timed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    found = decode.compressed_time(name, "tiny", TINY, 3, 64, CPU, torch.float32, 1)
    assert 0 < (found.attention_error or 0) < 1e-5
    assert found.milliseconds
    assert "left-padded" not in caplog.text


@pytest.mark.parametrize(("name", "call"), [("none", "fixed"), ("kivi-2bit", "mask"), ("kivi-2bit", "fixed")])
def test_masked_and_fixed_calls_are_compared(name: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = (name, "tiny", TINY, 2, 64, CPU, torch.bfloat16, 1, call)
    found = decode.compressed_time(*timed)
    assert (found.call, found.invalid) == (call, None)
    assert 0 < (found.attention_error or 0) < 3e-3
    if call == "mask":
        attend = View.attend
        monkeypatch.setattr(View, "attend", lambda view, call, values: attend(view, replace(call, mask=Mask()), values))
        assert decode.compressed_time(*timed).invalid, "a mask that attention does not see"


def test_other_libraries_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest library that is right counts; what is wrong or fails is named."""
    wrong = {"zeros": lambda query, *_: lambda: torch.zeros_like(query)}
    monkeypatch.setattr(decode, "ON_CPU", wrong | peers.ON_CPU)
    found = decode.full_time("tiny", TINY, 2, 64, CPU, torch.bfloat16, 1)
    assert found.libraries == {
        "zeros": "attention differs by 1.0e+00 of its size, more than 1.0e-02", "sdpa": found.milliseconds
    }  # fmt: skip
    monkeypatch.setattr(decode, "ON_CPU", wrong)
    with pytest.raises(ValueError, match=r"zeros: attention differs by 1\.0e\+00 of its size"):
        decode.full_time("tiny", TINY, 2, 64, CPU, torch.bfloat16, 1)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_can_be_filled_at_random(preset: str) -> None:
    for view in decode.random_view(preset, TINY, 2, 256, CPU, torch.bfloat16)[:2]:
        assert view.packed == 256
        assert view.dense().isfinite().all()


def test_a_failure_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 80 GiB")

    monkeypatch.setattr(decode, "full_time", too_large)
    full, ours, unknown = decode.measure_decode(["kivi-4bit", "kivi-9bit"], "tiny", TINY, [1], [64], CPU, 1)
    assert (full.milliseconds, full.error) == (None, "out of memory: Tried to allocate 80 GiB")
    assert (ours.cache, ours.speedup, ours.bound, ours.error) == ("kivi-4bit", None, None, None)
    assert "kivi-9bit" in str(unknown.error)


def test_median_of_the_repeats_alone() -> None:
    called: list[int] = []
    assert median_ms(lambda: called.append(0), CPU, repeats=4, warmup=2) >= 0
    assert len(called) == 6
    assert copy_bandwidth(CPU, 1 << 20) > 0


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
