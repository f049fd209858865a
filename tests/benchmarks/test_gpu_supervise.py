"""Rows that remain if measuring processes die, hang or do not start."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_kit import supervise
from gpu_kit.jobs import KEYS, Job
from gpu_kit.result_file import ResultFile
from gpu_kit.supervise import measure_all
from support.paths import ROOT

STAND_IN = """
import json, os, signal, sys
task = json.load(sys.stdin)
for part, values in task["jobs"] + task["late"]:
    name = values[0]
    if name == "nothing": sys.exit(3)
    if name == "postponed" and not task["late"]: continue
    print(json.dumps({"begin": [part, values]}), flush=True)
    if name == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if name == "hangs": signal.pause()
    error = "illegal memory access" if name == "broken" else None
    print(json.dumps({"row": {"cache": name, "process": os.getpid(), "error": error}}), flush=True)
    if name == "broken": sys.exit(1)
"""


def supervised(names: list[str], seconds: float = 60.0, row_seconds: float = 30.0) -> dict[str, dict[str, Any]]:
    """Rows by name of jobs, run by a process that some of them kill."""
    rows: dict[str, dict[str, Any]] = {}

    def keep(job: Job, row: dict[str, Any]) -> None:
        rows[str(job.values[0])] = row

    jobs = [Job("longest", (name,)) for name in names]
    measure_all(jobs, seconds, True, keep, [sys.executable, "-c", STAND_IN], row_seconds)
    return rows


def test_another_process_goes_on_after_one_that_dies() -> None:
    rows = supervised(["a", "killed", "b", "broken", "c"])
    errors = {name: row["error"] for name, row in rows.items()}
    ended = "the measuring process ended: signal 9"
    assert errors == {"a": None, "killed": ended, "b": None, "broken": "illegal memory access", "c": None}
    assert rows["b"]["process"] == rows["broken"]["process"]
    assert len({rows[name]["process"] for name in "abc"}) == 3


def test_another_process_gives_earlier_parts_no_second_share() -> None:
    order: list[str] = []
    named = [("decode", "a"), ("decode", "postponed"), ("encode", "killed"), ("longest", "b")]
    jobs = [Job(part, (name,) * len(KEYS[part])) for part, name in named]
    command = [sys.executable, "-c", STAND_IN]
    measure_all(jobs, 60, True, lambda job, row: order.append(str(job.values[0])), command)
    assert order == ["a", "killed", "b", "postponed"]


def test_a_process_that_hangs_is_ended() -> None:
    rows = supervised(["a", "hangs", "b"], row_seconds=1.0)
    assert rows["hangs"] == {"cache": "hangs", "error": "no result within 1 s"}
    assert rows["b"]["error"] is None
    rows = supervised(["hangs", "b"], seconds=1.0)
    assert rows == {"hangs": {"cache": "hangs", "error": "not measured: time"}}


def test_a_process_that_does_not_start_is_an_error_and_not_tried_for_ever() -> None:
    with pytest.raises(RuntimeError, match="ended before its first row: exit status 3"):
        supervised(["nothing"])


def test_a_checker_that_does_not_start_leaves_its_rows_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ROOT / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("gpu_script", script)
    assert spec is not None
    assert spec.loader is not None
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    monkeypatch.setattr(supervise.os, "cpu_count", lambda: 2)

    def measure(jobs: list[Job], seconds: float, small: bool, keep: Any) -> None:
        for job in jobs:
            if job.values[0] == "kivi-2bit":
                raise RuntimeError("no memory")
            keep(job, job.named | {"error": "found wrong" if job.part == "check" else None} | FIGURES)

    for module in (gpu, supervise):
        monkeypatch.setattr(module, "measure_all", measure)
    checks = [Job("check", (name, "main", 8)) for name in ("kivi-2bit", "kivi-4bit")]
    encode = [Job("encode", (name, "main", 1, 8)) for name in ("kivi-2bit", "kivi-4bit")]
    where = {"command": "c", "date": "d", "minutes": 1}
    results = ResultFile(tmp_path / "gpu.json", where, [*checks, Job("bandwidth", ("copy",)), *encode])
    gpu.run(results, 1.0, False, "main")
    assert results.rows[encode[0]]["error"] == "not measured: its kernels were not checked"
    assert results.rows[encode[1]]["error"] == "not timed: check failed: found wrong"
    assert results.rows[Job("bandwidth", ("copy",))]["error"] is None


FIGURES = {"gigabytes_per_second": 1.0}
