"""The GPU benchmarks with tiny sizes in Triton's interpreter; on a GPU the same code runs with other sizes."""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from gpu import CPU, Job
from support.cache_name import with_cache
from support.paths import ROOT
from transformers import DynamicCache, StaticCache

from kvcache_compress.bench.layers import Shape
from kvcache_compress.config import preset_names

TINY = Shape(2, 1, 32)
BARE = """
import sys
for name in ("typer", "rich", "accelerate", "datasets", "matplotlib", "gguf"):
    sys.modules[name] = None
sys.path.append({tests!r})
from support.kernels.interpreter import patch
patch()
"""
"""Start of a Python in which only torch, Triton, Transformers, pydantic and what these need can be imported."""


def test_a_run_and_another_that_goes_on(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of the worker is bare, which imports all that the script does."""
    (tmp_path / "sitecustomize.py").write_text(BARE.format(tests=str(ROOT / "tests")))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    output = tmp_path / "new" / "gpu.jsonl"
    arguments = ["--small", "--output", str(output), "--preset", "uniform-4bit"]
    gpu.main([*arguments, "--minutes", "60", "--row-seconds", "900"])
    run, *rows = map(json.loads, output.read_text().splitlines())
    assert run["run"]["versions"]["torch"] == version("torch")
    assert not [row for row in rows if "error" in row]
    models = [("model", name, loop) for loop in ("graph", "eager") for name in ("full", "uniform-4bit")]
    assert [(row["part"], row["cache"], row["variant"]) for row in rows] == [
        ("bandwidth", "copy", ""), ("decode", "full", ""), ("decode", "uniform-4bit", ""),
        ("encode", "uniform-4bit", ""), *models,
    ]  # fmt: skip
    _, full, ours, *_ = rows
    assert 0 < ours["attention_error"] < 2.8e-3
    assert ours["speedup"] == pytest.approx(full["milliseconds"] / ours["milliseconds"])
    assert ours["bits"] == pytest.approx((64 * 4.5 + 80 * 16) / 144), "64 tokens of 4.5 bits, and 16 + 64 of 16 bits"
    assert all(row["tokens_per_second"] > 0 for row in rows[-4:])
    assert f"{len(rows)} of {len(rows)} rows" in capsys.readouterr().out

    gpu.main(arguments)
    assert f"{len(rows)} of {len(rows)} rows" in capsys.readouterr().out
    assert [json.loads(line) for line in output.read_text().splitlines()][:-1] == [run, *rows]
    assert gpu.read_rows(output, "another commit") == {}


WORKER = """
import json, os, signal, sys, time
from pathlib import Path
path = Path({path!r})
done = [json.loads(line)["cache"] for line in path.read_text().splitlines()] if path.exists() else []
for name in "abcdef":
    if name in done:
        continue
    if name == "b":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "d":
        time.sleep(90)
    row = dict(part="encode", cache=name, shape="", batch=1, tokens=0, variant="", commit="c")
    with path.open("a") as file:
        file.write(json.dumps(row) + chr(10))
    if name == "e":
        sys.exit(75)
"""


def test_crashes_and_hangs_cost_one_row_each(tmp_path: Path) -> None:
    path, jobs = tmp_path / "gpu.jsonl", [Job("encode", name) for name in "abcdef"]
    command = [sys.executable, "-c", WORKER.format(path=str(path))]
    gpu.supervise(command, jobs, path, "c", time.monotonic() + 300, silence=20)
    errors = {job.cache: row.get("error") for job, row in gpu.read_rows(path, "c").items()}
    assert errors == dict.fromkeys("acef") | {"b": "the worker ended with -11", "d": "no result within 20 s"}
    command[2] = "import nowhere"
    with pytest.raises(RuntimeError, match="could not be started"):
        gpu.supervise(command, [Job("encode", "g")], path, "c", time.monotonic() + 100, 50)


def test_at_the_end_of_the_time_no_row_is_blamed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    gpu.supervise(sleep, [Job("encode", "a")], path, "c", time.monotonic() + 1, 50)
    assert not path.exists()


def test_the_most_important_rows_come_first() -> None:
    presets = ["none", "uniform-4bit", *preset_names()]
    jobs = gpu.plan_jobs(presets, gpu.PARTS, gpu.SIZES)
    assert len(jobs) == len({*jobs})
    assert jobs[0] == Job("bandwidth", "copy")
    assert jobs[1:5] == [Job("decode", "full", "llama-3.1-8b", *size) for size in gpu.SIZES.main]
    first = list(dict.fromkeys(job.cache for job in jobs))[: 2 + len(gpu.TARGETS)]
    assert {*first} == {"copy", "full", *gpu.TARGETS}
    assert gpu.plan_jobs(["kivi-2bit"], ("bandwidth",), gpu.SIZES) == [Job("bandwidth", "copy")]
    assert {job.part for job in gpu.plan_jobs(["kivi-2bit"], ("model",), gpu.SIZES)} == {"model"}


def test_steps_advance_as_the_models_own_do() -> None:
    model = gpu.random_llama(TINY, 2, 64, 64, 1024, torch.bfloat16, CPU)
    prompt, found = torch.randint(1000, (2, 40)), []
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
        with torch.inference_mode():
            ids = model(prompt, **with_cache(cache)).logits[:, -1:].argmax(-1)
            step = gpu.decode_step(model, cache, ids, 40)
            found.append([step().tolist() for _ in range(4)])
    assert found[0] == found[1]


def test_wrong_arguments_are_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"--preset kivi-9bit --small": "--preset kivi-9bit is unknown", "--part x": "invalid choice: 'x'"}
    if not torch.cuda.is_available():
        wrong[""] = "there is no GPU here"
    for words, message in wrong.items():
        with pytest.raises(SystemExit, match="2"):
            gpu.main(["--output", str(tmp_path / "f"), *words.split()])
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
