"""The GPU benchmarks with tiny sizes in Triton's interpreter; on a GPU the same code runs with other sizes."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from gpu import CPU, SMALL_SIZES, Job
from support.cache_name import with_cache
from support.paths import ROOT
from transformers import DynamicCache, StaticCache

from kvcache_compress.backends.triton import TritonBackend
from kvcache_compress.bench.layers import Shape
from kvcache_compress.config import preset_names
from kvcache_compress.triton_kernels.encode import launch as encoding
from kvcache_compress.triton_kernels.update import step as stepping

TINY = Shape(2, 1, 32)
BARE = """
import sys
for name in ("typer", "rich", "accelerate", "datasets", "evaluate", "matplotlib", "gguf"):
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
    assert run["run"]["versions"]["torch"] == torch.__version__
    assert not [row for row in rows if "error" in row]
    decoded = [("decode", "uniform-4bit", call) for call in ("plain", "mask", "fixed")]
    models = [("model", name, loop) for loop in ("graph", "eager") for name in ("full", "uniform-4bit")]
    assert [(row["part"], row["cache"], row["variant"]) for row in rows] == [
        ("bandwidth", "copy", ""), ("decode", "full", "plain"), ("check", "uniform-4bit", ""), decoded[0],
        ("encode", "uniform-4bit", ""), *decoded[1:], *models,
    ]  # fmt: skip
    _, full, check, ours, *_ = rows
    assert 0 < check["attention_error"] < 2.8e-3
    assert ours["speedup"] == pytest.approx(full["milliseconds"] / ours["milliseconds"])
    assert ours["bits"] == pytest.approx((64 * 4.5 + 80 * 16) / 144), "64 tokens of 4.5 bits, and 16 + 64 of 16 bits"
    assert all(row["tokens_per_second"] > 0 for row in rows[-4:])
    assert f"{len(rows)} of {len(rows)} rows" in capsys.readouterr().out

    gpu.main(arguments)
    assert f"{len(rows)} of {len(rows)} rows" in capsys.readouterr().out
    assert [json.loads(line) for line in output.read_text().splitlines()][:-1] == [run, *rows]
    assert gpu.read_rows(output, "another commit") == {}


def spoil(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, then: Callable[..., Any]) -> None:
    """Do something wrong after each call of a launcher, with its arguments."""
    right = getattr(module, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        return then(result, *args)

    monkeypatch.setattr(module, name, wrong)


def flip_encoded(fields: Any, *args: Any) -> Any:
    fields[0].bitwise_xor_(0x5555)
    return fields


def flip_written(_: Any, storage: Any, *args: Any) -> None:
    storage.pools["values"][0][:, :, max(0, storage.packed_tokens - 1) :] ^= 0x5555


WRONG: dict[str, tuple[bool, Any, str, Callable[..., Any], str]] = {
    "nothing": (False, TritonBackend, "attend", lambda out, *_: out, "None"),
    "attention": (False, TritonBackend, "attend", lambda out, *_: out * 1.01, "step 1: attention differs by"),
    "codes": (False, encoding, "encoded", flip_encoded, "growing cache, step 1: "),
    "codes of a static step": (True, stepping, "step", flip_written, "static cache, step 1: "),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kernels_are_found(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    static, *planted, message = WRONG[wrong]
    torch.manual_seed(0)
    spoil(monkeypatch, *planted)
    found = None
    try:
        with torch.inference_mode():
            gpu.check_steps("turboquant-4bit", TINY, 60, CPU, 5, static)
    except ValueError as error:
        found = error
    assert message in str(found)


def test_steps_that_pack_nothing_are_no_check() -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match="32 tokens are packed, by operators 32, before 32"):
        gpu.check_steps("uniform-4bit", TINY, 40, CPU, 1, False)


def test_scalars_may_differ_by_a_unit_in_the_last_place() -> None:
    words, scalars = torch.arange(1000, dtype=torch.int32), torch.linspace(1, 2, 1000).half()
    other = words.clone()
    other[3] ^= 16
    assert gpu.differing((other, scalars), (words, (scalars.view(torch.int16) + 1).view(torch.half))) == 1 / 2000
    assert gpu.differing((words, scalars), (words, (scalars.view(torch.int16) + 2).view(torch.half))) == 0.5


def test_what_fails_its_check_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "check_steps", lambda *_: (_ for _ in ()).throw(ValueError("step 1 is wrong")))
    path = tmp_path / "gpu.jsonl"
    jobs = [Job("check", "kivi-2bit", "small"), Job("encode", "kivi-2bit", "small", 1, 64)]
    jobs.append(Job("decode", "full", "small", 1, 64, "plain"))
    assert gpu.work(jobs, SMALL_SIZES, path, "c") == 0
    check, encode, full = gpu.read_rows(path, "c").values()
    assert check["error"] == "step 1 is wrong"
    assert encode["error"] == "not timed, since its check failed: step 1 is wrong"
    assert full["milliseconds"] > 0


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
    assert jobs[1:5] == [Job("decode", "full", "llama-3.1-8b", *size, "plain") for size in gpu.SIZES.main]
    seen = set()
    for job in jobs:  # each preset is checked before it is timed
        seen.add(job[:3])
        assert job.cache in ("copy", "full", "none") or ("check", *job[1:3]) in seen
    first = list(dict.fromkeys(job.cache for job in jobs))[: 2 + len(gpu.TARGETS)]
    assert {*first} == {"copy", "full", *gpu.TARGETS}
    assert gpu.plan_jobs(["kivi-2bit"], ("bandwidth",), gpu.SIZES) == [Job("bandwidth", "copy")]
    parts = [job.part for job in gpu.plan_jobs(["kivi-2bit"], ("model",), gpu.SIZES)]
    assert parts[0] == "check"
    assert {*parts[1:]} == {"model"}


def test_steps_advance_as_the_models_own_do() -> None:
    model = gpu.random_llama(TINY, 2, 64, 64, CPU)
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
