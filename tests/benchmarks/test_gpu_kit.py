"""The GPU benchmarks with tiny sizes in Triton's interpreter; on a GPU the same code runs with other sizes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gpu
import pytest
import torch
from gpu_kit import models, predicted, tools
from gpu_kit.jobs import KEYS
from support.paths import ROOT

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


BARE = """
import sys
for name in ("pydantic", "pydantic_core", "typer", "rich", "accelerate", "datasets", "evaluate", "matplotlib", "gguf"):
    sys.modules[name] = None
sys.path.append({tests!r})
from support.interpreter import patch_language_once
patch_language_once()
"""
"""Start of a Python in which only torch, Triton, Transformers and what these need can be imported."""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Environment of a bare Python."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BARE.format(tests=str(ROOT / "tests")))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def test_the_kit_in_small_on_a_bare_python(tmp_path: Path, bare: dict[str, str]) -> None:
    output = tmp_path / "new" / "folder"
    command = [sys.executable, "benchmarks/gpu.py", "--small", "--output", str(output), "--tiles", "1"]
    command += ["--preset", "turboquant-4bit"]
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((output / "gpu.json").read_text())
    assert [(row["cache"], row["tokens"], row["error"]) for row in found["check"]] == [
        ("turboquant-4bit", tokens, None) for tokens in (64, 85)
    ]
    assert all(0 < row["attention_error"] < 2.8e-3 and row["differing_codes"] == 0 for row in found["check"])
    assert [(row["cache"], row["call"]) for row in found["decode"]] == [
        (name, "plain") for name in ("full", "none", "turboquant-4bit")
    ] + [("turboquant-4bit", call) for call in ("mask", "fixed")]
    full, none, ours, *_ = found["decode"]
    assert full["libraries"] == {"sdpa": full["milliseconds"]}
    for row in found["decode"][1:]:
        assert row["speedup"] == pytest.approx(full["milliseconds"] / row["milliseconds"])
        assert row["bound"] == pytest.approx(16 / row["bits"])
    # 64 tokens of 4.5 bits, and 16 + 64 of 16 bits.
    assert (none["bits"], ours["bits"]) == (16, pytest.approx((64 * 4.5 + 80 * 16) / 144))
    rows = found["decode"] + [row for row in found["models"] if row["cache"] != "full"]
    assert all(0 < row["attention_error"] < 3e-3 and not row.get("invalid") for row in rows)
    assert [(row["cache"], row["loop"]) for row in found["models"]] == [
        (name, loop) for loop in ("graph", "eager") for name in ("full", "turboquant-4bit")
    ]
    assert all(row["tokens_per_second"] > 0 and row["cache_gib"] > 0 for row in found["models"])
    assert [(row["cache"], row["tokens"]) for row in found["encode"]] == [("turboquant-4bit", 64)]
    encoded = found["encode"][0]
    size = 2 * 2 * 64 * 32 * 2  # both sides, heads, tokens, channels, bytes
    assert encoded["gigabytes_per_second"] == pytest.approx(size / encoded["milliseconds"] / 1e6)
    prompts = [(row["cache"], row["tokens"], row["chunk"]) for row in found["prefill"]]
    assert prompts == [(name, 128, chunk) for chunk in (128, 64) for name in ("full", "turboquant-4bit")]
    for dense, packed in (found["prefill"][:2], found["prefill"][2:]):
        assert packed["ratio"] == pytest.approx(packed["seconds"] / dense["seconds"])
    longest = {row["cache"]: row for row in found["longest"]}
    # Two pieces of 128 tokens, and a step after each.
    assert [row["tokens"] for row in longest.values()] == [258, 258]
    assert longest["full"]["cache_gib"] * 2**30 == 2 * 2 * 258 * 2 * 32 * 2
    assert longest["turboquant-4bit"]["cache_gib"] < longest["full"]["cache_gib"]
    assert [(row["cache"], row["error"]) for row in found["graph"]] == [("turboquant-4bit", None)]
    assert [(row["block"], row["error"]) for row in found["tile"]] == [(64, None)]
    for part, tool in (("memory", "compute-sanitizer"), ("profile", "ncu")):
        if shutil.which(tool) is None:
            assert [row["error"] for row in found[part]] == [f"not measured: {tool} is not installed"]
    files = {path.name for path in output.iterdir()}
    assert {"gpu.json", "log.txt", "tables.txt"} <= files <= {"gpu.json", "log.txt", "tables.txt", "memory.txt"}
    assert "speed-up" in done.stdout
    assert (output / "tables.txt").read_text() in done.stdout
    assert "decode    turboquant-4bit" in (output / "log.txt").read_text()


def test_a_run_that_is_killed_leaves_its_rows_and_another_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--small", "--output", str(tmp_path), "--preset", "kivi-4bit"]
    command += ["--part", "bandwidth", "--part", "encode"]
    killed = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert killed.stdout is not None
    next(line for line in killed.stdout if line.startswith("bandwidth"))
    killed.kill()
    killed.wait()
    before = json.loads((tmp_path / "gpu.json").read_text())
    assert before["bandwidth"][0]["gigabytes_per_second"] > 0
    assert {row["error"] for row in before["check"] + before["encode"]} == {"not measured: the run ended before"}
    assert not before["finished"]

    gpu.main(command[2:])
    after = json.loads((tmp_path / "gpu.json").read_text())
    assert after["bandwidth"] == before["bandwidth"]
    assert [row["error"] for row in after["check"] + after["encode"]] == [None, None]
    assert after["finished"]
    assert len(after["runs"]) == 2
    capsys.readouterr()
    gpu.main(["--output", str(tmp_path), "--table"])
    assert capsys.readouterr().out == (tmp_path / "tables.txt").read_text()


def test_without_time_every_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--small", "--output", str(tmp_path), "--minutes", "0"])
    found = json.loads((tmp_path / "gpu.json").read_text())
    timed = [row for part in KEYS for row in found[part] if part not in tools.TOOLS]
    assert {row["error"] for row in timed} == {"not measured: time"}
    assert not found["finished"]
    named = capsys.readouterr().out.partition("not measured, and why")[2]
    assert "decode full small 1 64 plain time" in named
    assert "encode kivi-2bit small 1 64 time" in named


def test_the_plan_needs_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The time plan names every stage in order, and the predictions are those of the rows."""
    gpu.main(["--output", str(tmp_path / "none"), "--plan", "--preset", "turboquant-4bit", "--processes", "14"])
    text = capsys.readouterr().out
    assert not (tmp_path / "none").exists()
    stages = [line.split()[0] for line in text.splitlines() if " rows " in line]
    assert stages[:6] == ["bandwidth", "memory", "check", "decode", "profile", "tile"]
    assert {*stages} == {*KEYS}
    found = predicted.predicted_ms({"cache": "turboquant-4bit", "shape": "llama-3.1-8b", "batch": 8, "tokens": 32768,
                                    "call": "plain"})  # fmt: skip
    if found is not None:
        line = rf"^decode turboquant-4bit llama-3.1-8b 8 32768 plain +{found[0]:.4f}  {found[1]}$"
        assert re.search(line, text, re.MULTILINE)


def test_wrong_arguments_are_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "--preset kivi-9bit --small": "--preset kivi-9bit: allowed uniform-4bit",
        "--part x": "invalid choice: 'x'",
    }
    if not torch.cuda.is_available():
        wrong[""] = "no GPU here"
    for words, message in wrong.items():
        with pytest.raises(SystemExit, match="2"):
            gpu.main(["--output", str(tmp_path), *words.split()])
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


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
    monkeypatch.setattr(models, "_prefill", too_large)
    model = models.random_llama(TINY["tiny"], 1, 64, 64, CPU)
    for call in (lambda *at: models.model_time(*at, "eager"), models.prefill_time):
        with pytest.raises(torch.OutOfMemoryError):
            call(model, "kivi-4bit", 1, 64)
        assert model.config._attn_implementation != ATTENTION_NAME


def test_the_longest_context_ends_where_memory_or_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    fill, filled = models.fill, []

    def fill_twice(model: Any, cache: Any, batch: int, tokens: int) -> float:
        filled.append(cache)
        if filled.count(cache) > 2:
            raise torch.OutOfMemoryError("Tried to allocate 80 GiB")
        return fill(model, cache, batch, tokens)

    monkeypatch.setattr(models, "fill", fill_twice)
    model = models.random_llama(TINY["tiny"], 1, 64, 64, CPU)
    for name in ("full", "kivi-4bit"):
        found = models.longest_context(model, name, 64, 64_000)
        assert (found.tokens, found.end) == (130, "out of memory: Tried to allocate 80 GiB")
        assert found.cache_gib > 0
    late = iter([False, True])
    found = models.longest_context(model, "full", 64, 64_000, lambda: next(late))
    assert (found.tokens, found.error) == (65, "not measured: time, 65 tokens fit")
    for failure, message in ((ValueError("wrong"), "wrong"), (torch.OutOfMemoryError("80 GiB"), "80 GiB")):
        monkeypatch.setattr(models, "fill", Mock(side_effect=failure))  # out of memory with no tokens fails as well
        with pytest.raises(type(failure), match=message):
            models.longest_context(model, "full", 64, 64_000)


def test_median_of_the_repeats_alone() -> None:
    called: list[int] = []
    assert median_ms(lambda: called.append(0), CPU, repeats=4, warmup=2) >= 0
    assert len(called) == 6
    assert copy_bandwidth(CPU, 1 << 20) > 0


def test_bytes_of_a_shape() -> None:
    assert SHAPES["llama-3.1-8b"].dense_bytes == 2 * 2 * 8 * 128
