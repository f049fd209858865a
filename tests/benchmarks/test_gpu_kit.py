"""The GPU benchmarks with tiny sizes in Triton's interpreter; on a GPU the same code runs with other sizes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gpu
import pytest
import torch
from gpu_kit import models, prompts
from support.paths import ROOT
from support.scripts import run_script

from kvcache_compress.attention.interface import ATTENTION_NAME
from kvcache_compress.bench import decode
from kvcache_compress.bench.layers import SHAPES, Shape, encoded_side
from kvcache_compress.bench.timing import copy_bandwidth, median_ms
from kvcache_compress.config import load_config, preset_names

CPU = torch.device("cpu")
TINY = {"tiny": Shape(4, 2, 64)}


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Seed the random numbers: the 16-bit error of so few numbers varies by a tenth and comes close to the bound."""
    torch.manual_seed(0)


def test_the_kit_in_small(tmp_path: Path) -> None:
    output = tmp_path / "new" / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--small", "--output", str(output), "--preset", "turboquant-4bit"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert [(row["cache"], row["tokens"], row["error"]) for row in found["check"]] == [
        ("turboquant-4bit", tokens, None) for tokens in (128, 149)
    ]
    assert all(0 < row["attention_error"] < 2.5e-3 and row["differing_codes"] == 0 for row in found["check"])
    assert [(row["cache"], row["tokens"]) for row in found["decode"]] == [("full", 128), ("turboquant-4bit", 128)]
    full, ours = found["decode"]
    assert ours["speedup"] == pytest.approx(full["milliseconds"] / ours["milliseconds"])
    # 128 tokens of 4.25 bits, and 16 + 64 of 16 bits.
    assert ours["bits"] == pytest.approx((128 * 4.25 + 80 * 16) / 208)
    assert ours["bound"] == pytest.approx(16 / ours["bits"])
    assert all(0 < row["attention_error"] < 2.8e-3 for row in (full, ours, found["models"][1]))
    assert [row["cache"] for row in found["models"]] == ["full", "turboquant-4bit"]
    assert all(row["tokens_per_second"] > 0 for row in found["models"])
    assert all(row["cache_gib"] > 0 for row in found["models"])
    assert [(row["cache"], row["tokens"]) for row in found["encode"]] == [("turboquant-4bit", 128)]
    encoded = found["encode"][0]
    size = 2 * 2 * 128 * 64 * 2  # both sides, heads, tokens, channels, bytes
    assert encoded["gigabytes_per_second"] == pytest.approx(size / encoded["milliseconds"] / 1e6)
    prompts = [(row["cache"], row["tokens"], row["chunk"]) for row in found["prefill"]]
    assert prompts == [(name, 160, chunk) for chunk in (160, 64) for name in ("full", "turboquant-4bit")]
    for dense, packed in (found["prefill"][:2], found["prefill"][2:]):
        assert packed["ratio"] == pytest.approx(packed["seconds"] / dense["seconds"])
    longest = {row["cache"]: row for row in found["longest"]}
    # Two pieces of 128 tokens, and a step after each.
    assert [row["tokens"] for row in longest.values()] == [258, 258]
    assert longest["full"]["cache_gib"] * 2**30 == 2 * 2 * 258 * 2 * 64 * 2
    assert longest["turboquant-4bit"]["cache_gib"] < longest["full"]["cache_gib"]
    assert [(row["cache"], row["error"]) for row in found["graph"]] == [("turboquant-4bit", None)]
    assert 0 < found["graph"][0]["attention_error"] < 2.8e-3
    copied = found["bandwidth"][0]["gigabytes_per_second"]
    bandwidth = ours["gigabytes_per_second"]
    cell = f"{ours['milliseconds']:.3f} {ours['speedup']:.2f}x of {ours['bound']:.2f}x {bandwidth:.1f} GB/s"
    cell += f" {bandwidth / copied:4.0%}"
    assert re.search(rf"^turboquant-4bit +{re.escape(cell)}$", done.stdout, re.MULTILINE)
    assert found["finished"]
    assert {path.name for path in output.parent.iterdir()} == {"gpu.json"}
    assert run_script(gpu.main, "--output", str(output), "--table").stdout.strip() in done.stdout


def test_a_run_that_is_killed_leaves_its_rows_and_another_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--small", "--output", str(output), "--preset", "turboquant-4bit"]
    command += ["--part", "decode"]
    killed = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert killed.stdout is not None
    next(line for line in killed.stdout if line.startswith("check"))
    killed.kill()
    killed.wait()
    before = json.loads(output.read_text())
    assert [row["error"] for row in before["check"]] == [None]  # of the one that decoding needs
    assert {row["error"] for row in before["decode"]} == {"not measured: the run ended before"}
    assert not before["finished"]

    done = run_script(gpu.main, *command[2:], "--part", "bandwidth")
    assert done.exit_code == 0, done.output
    after = json.loads(output.read_text())
    assert after["check"] == before["check"]
    assert [row["error"] for row in after["decode"]] == [None, None]
    assert after["bandwidth"][0]["gigabytes_per_second"] > 0
    assert after["finished"]
    assert len(after["runs"]) == 2


def test_without_time_every_row_is_named(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    done = run_script(gpu.main, "--small", "--output", str(output), "--minutes", "0")
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    assert {row["error"] for row in found["check"] + found["bandwidth"]} == {"not measured: time"}
    assert {row["error"] for row in found["decode"] if row["cache"] == "full"} == {"not measured: time"}
    assert {row["error"] for row in found["encode"]} == {"not measured: its kernels were not checked"}
    assert not found["finished"]
    named = done.stdout.partition("not measured, and why")[2]
    assert "decode full small 1 128 time" in named
    assert "decode kivi-2bit small 1 128 its kernels were not checked" in named


def test_without_a_gpu_only_small(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run_script(gpu.main, "--output", str(tmp_path / "gpu.json"))
    assert done.exit_code == 2
    assert "no GPU here" in done.stderr
    assert not list(tmp_path.iterdir())
    assert "--output is needed" in run_script(gpu.main, "--small").stderr


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_can_be_filled_at_random(preset: str) -> None:
    plan = decode.middle_layer(load_config(preset))
    for side in ("keys", "values"):
        config = plan.side(side)
        common = {"packed": 256, "codes": "random", "batch": 2, "heads": 3}
        made = encoded_side(config.method, config.options(), side, 64, torch.bfloat16, **common)
        assert made.shape == (2, 3, 16 + 256 + 17, 64)
        assert made.dense().isfinite().all()


def too_large(*_: object) -> None:
    raise torch.OutOfMemoryError("Tried to allocate 80 GiB")


def test_a_failure_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "full_time", too_large)
    full, ours, unknown = decode.measure_decode(["kivi-4bit", "kivi-9bit"], TINY, [1], [64], CPU, 1)
    assert (full.milliseconds, full.error) == (None, "out of memory: Tried to allocate 80 GiB")
    assert (ours.cache, ours.speedup, ours.bound, ours.error) == ("kivi-4bit", None, None, None)
    assert "kivi-9bit" in unknown.error


def test_a_model_has_its_attention_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "fill", too_large)
    monkeypatch.setattr(prompts, "_prefill", too_large)
    model = models.random_llama(TINY["tiny"], 1, 64, 64, CPU)
    for call in (models.model_time, prompts.prefill_time):
        with pytest.raises(torch.OutOfMemoryError):
            call(model, "kivi-4bit", 1, 64)
        assert model.config._attn_implementation != ATTENTION_NAME


def test_the_longest_context_ends_where_memory_or_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    fill, filled = prompts.fill, []

    def fill_twice(model: Any, cache: Any, batch: int, tokens: int) -> float:
        filled.append(cache)
        if filled.count(cache) > 2:
            raise torch.OutOfMemoryError("Tried to allocate 80 GiB")
        return fill(model, cache, batch, tokens)

    monkeypatch.setattr(prompts, "fill", fill_twice)
    model = models.random_llama(TINY["tiny"], 1, 64, 64, CPU)
    for name in ("full", "kivi-4bit"):
        found = prompts.longest_context(model, name, 64, 64_000)
        assert (found.tokens, found.end) == (130, "out of memory: Tried to allocate 80 GiB")
        assert found.cache_gib > 0
    late = iter([False, True])
    found = prompts.longest_context(model, "full", 64, 64_000, lambda: next(late))
    assert (found.tokens, found.error) == (65, "not measured: time, 65 tokens fit")
    for failure, message in ((ValueError("wrong"), "wrong"), (torch.OutOfMemoryError("80 GiB"), "80 GiB")):
        monkeypatch.setattr(prompts, "fill", Mock(side_effect=failure))  # out of memory with no tokens fails as well
        with pytest.raises(type(failure), match=message):
            prompts.longest_context(model, "full", 64, 64_000)


def test_median_of_the_repeats_alone() -> None:
    called: list[int] = []
    assert median_ms(lambda: called.append(0), CPU, repeats=4, warmup=2) >= 0
    assert len(called) == 6
    assert copy_bandwidth(CPU, 1 << 20) > 0


def test_bytes_of_a_shape() -> None:
    assert SHAPES["llama-3.1-8b"].dense_bytes == 2 * 2 * 8 * 128
