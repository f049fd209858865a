"""Rows that remain if measuring processes die, hang or do not start."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_kit import tools
from gpu_kit.jobs import Job
from gpu_kit.result_file import ResultFile
from gpu_kit.supervise import Workers, measure_all, measure_stages

STAND_IN = """
import json, os, signal, sys
task = json.load(sys.stdin)
for part, values in task["jobs"]:
    name = values[0]
    if name == "nothing" or (name, part) == ("unchecked", "check"): sys.exit(3)
    print(json.dumps({"begin": [part, values]}), flush=True)
    if name == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if name == "hangs": signal.pause()
    error = {"broken": "illegal memory access", "wrong": "wrong codes" if part == "check" else None}.get(name)
    row = {"cache": name, "process": os.getpid(), "error": error}
    if part in ("check", "encode"): row["shape"] = values[1]
    print(json.dumps({"row": row}), flush=True)
    if name == "broken": sys.exit(1)
"""


def supervised(names: list[str], seconds: float = 60.0, row_seconds: float = 30.0) -> dict[str, dict[str, Any]]:
    """Rows by name of jobs, run by a process that some of them kill."""
    rows: dict[str, dict[str, Any]] = {}

    def keep(job: Job, row: dict[str, Any]) -> None:
        rows[str(job.values[0])] = row

    jobs = [Job("longest", (name,)) for name in names]
    measure_all(jobs, seconds, workers(row_seconds), keep)
    return rows


def workers(row_seconds: float = 30.0) -> Workers:
    return Workers(True, [sys.executable, "-c", STAND_IN], row_seconds=row_seconds)


def test_another_process_goes_on_after_one_that_dies() -> None:
    rows = supervised(["a", "killed", "b", "broken", "c"])
    errors = {name: row["error"] for name, row in rows.items()}
    ended = "the measuring process ended: signal 9"
    assert errors == {"a": None, "killed": ended, "b": None, "broken": "illegal memory access", "c": None}
    assert rows["b"]["process"] == rows["broken"]["process"]
    assert len({rows[name]["process"] for name in "abc"}) == 3


def test_a_process_that_hangs_is_ended() -> None:
    rows = supervised(["a", "hangs", "b"], row_seconds=1.0)
    assert rows["hangs"] == {"cache": "hangs", "error": "no result within 1 s"}
    assert rows["b"]["error"] is None
    rows = supervised(["hangs", "b"], seconds=1.0)
    assert rows == {"hangs": {"cache": "hangs", "error": "not measured: time"}}


def test_a_process_that_does_not_start_is_an_error_and_not_tried_for_ever() -> None:
    with pytest.raises(RuntimeError, match="ended before its first row: exit status 3"):
        supervised(["nothing"])


def stages(tmp_path: Path, jobs: list[Job]) -> ResultFile:
    """Measure jobs stage by stage with the stand-in."""
    results = ResultFile(tmp_path / "gpu.json", {"command": "c", "date": "d", "minutes": 1}, jobs)
    measure_stages(results, 60, workers(), 4, results.keep, tmp_path)
    return results


def test_a_checker_that_does_not_start_leaves_its_rows_unchecked(tmp_path: Path) -> None:
    """Rows without a check, or with a failed one, are timed and marked; those whose check was killed are not begun."""
    names = ("unchecked", "wrong", "killed", "right")
    checks = [Job("check", (name, "main", 8)) for name in names]
    encode = [Job("encode", (name, "main", 1, 8)) for name in names]
    found = stages(tmp_path, [*checks, Job("bandwidth", ("copy",)), *encode]).contents()
    assert [row["error"] for row in found["check"]] == [
        "not measured: the run ended before", "wrong codes", "the measuring process ended: signal 9", None,
    ]  # fmt: skip
    assert [(row.get("invalid"), row["error"]) for row in found["encode"]] == [
        ("its kernels were not checked", None),
        ("check failed: wrong codes", None),
        (None, "not timed: check failed: the measuring process ended: signal 9"),
        (None, None),
    ]


TOOL = """
import subprocess, sys
log, *command = sys.argv[1:]
code = subprocess.call(command)
open(log, "w").write(sys.stdin.read() if code else "========= ERROR SUMMARY: 1 error\\n")
"""


def test_rows_under_a_tool_get_what_its_log_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has a process and a log of its own; all logs become one file. Without the tool the rows say so."""
    jobs = [Job("memory", (name,)) for name in ("a", "b", "killed")]
    missing = stages(tmp_path / "missing", jobs).contents()["memory"]
    assert {row["error"] for row in missing} == {"not measured: compute-sanitizer is not installed"}
    tool = replace(tools.TOOLS["memory"], command=(sys.executable, "-c", TOOL, "{log}"))
    monkeypatch.setitem(tools.TOOLS, "memory", tool)
    (tmp_path / "found").mkdir()
    found = stages(tmp_path / "found", jobs).contents()["memory"]
    assert [row["error"] for row in found] == [
        "1 errors of memory: ", "1 errors of memory: ", "the measuring process ended: exit status 0",
    ]  # fmt: skip
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"gpu.json", "memory.txt"}
    text = (tmp_path / "found" / "memory.txt").read_text()
    assert text.count("ERROR SUMMARY") == 2
    assert "memory killed" in text


def test_logs_of_the_tools() -> None:
    """Tables and summaries as NVIDIA's documentation shows them; no tool ran here."""
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert tools.read_log("memory", clean) == {}
    wrong = "========= Invalid __global__ read of size 4 bytes\n=========     at kernel\n"
    wrong += "========= ERROR SUMMARY: 2 errors\n"
    assert tools.read_log("memory", wrong) == {"error": "2 errors of memory: Invalid __global__ read of size 4 bytes"}
    assert "no summary" in tools.read_log("memory", "killed")["error"]
    names = ["ID", "Kernel Name", "gpu__time_duration.sum", "launch__registers_per_thread", "other"]
    names += ["dram__throughput.avg.pct_of_peak_sustained_elapsed"]
    table = [names, ["", "", "us", "register/thread", "", "%"], ["0", "attend_kernel", "1,234.5", "168", "7", "81.5"]]
    text = "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in table)
    assert tools.read_log("profile", text) == {"counters": {
        "gpu__time_duration.sum": 1234.5, "launch__registers_per_thread": 168.0,
        "dram__throughput.avg.pct_of_peak_sustained_elapsed": 81.5,
    }}  # fmt: skip
    assert tools.read_log("profile", "==ERROR== no permission")["error"] == "no counters: ==ERROR== no permission"
