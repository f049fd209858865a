"""Order of the GPU measurements, rows of failures, the time budget, and the result file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kit import worker
from gpu_kit.gpu_table import tables
from gpu_kit.jobs import CALLS, KEYS, SIZES, TARGETS, Checks, Job, blocked, plan_jobs
from gpu_kit.result_file import ResultFile, hash_sources
from gpu_kit.worker import run_jobs

from kvcache_compress.config import preset_names

WHERE = {"command": "c", "date": "d", "minutes": 8, "commit": "1", "sources": "s", "versions": {}, "hardware": {}}
WHERE |= {"small": False}


@dataclass
class Figure:
    milliseconds: float
    error: str | None = None


class Clock:
    """Clock that advances only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def jobs_of(part: str, count: int) -> list[Job]:
    return [Job(part, tuple(f"{part}{index}" for _ in KEYS[part])) for index in range(count)]


def test_no_row_begins_when_it_is_late() -> None:
    clock, jobs = Clock(), jobs_of("encode", 9)
    events: list[dict[str, Any]] = []

    def measure(job: Job) -> Figure:
        clock.now += 2.0
        return Figure(2.0)

    assert run_jobs(jobs, measure, lambda: clock.now >= 5, events.append)
    assert [event["begin"] for event in events if "begin" in event] == jobs[:3]
    rows = [event["row"] for event in events if "row" in event]
    assert rows == [job.named | {"milliseconds": 2.0, "error": None} for job in jobs[:3]]


def test_a_row_that_fails_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of("decode", 3)

    def measure(job: Job) -> Figure:
        if job == jobs[1]:
            raise torch.OutOfMemoryError("Tried to allocate 80 GiB\n" + "x" * 1000)
        return Figure(1.0)

    def rows() -> tuple[bool, list[str | None]]:
        events: list[dict[str, Any]] = []
        works = run_jobs(jobs, measure, lambda: False, events.append)
        return works, [event["row"]["error"] for event in events if "row" in event]

    works, errors = rows()
    assert works
    assert (errors[0], errors[2]) == (None, None)
    assert errors[1] is not None
    assert errors[1].startswith("out of memory: Tried to allocate 80 GiB")
    assert len(errors[1]) == worker.LONGEST_MESSAGE

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    works, errors = rows()
    assert not works, "another process must go on"
    assert len(errors) == 2


def test_the_cause_of_an_error_is_said_after_a_long_message() -> None:
    error = RuntimeError("def kernel(\n" + "x" * 1000)
    error.__cause__ = AttributeError("'int' object\nhas no attribute 'type'")
    text = worker.one_line(error)
    assert text.startswith("RuntimeError: def kernel( xxx")
    assert text.endswith("x ... AttributeError: 'int' object has no attribute 'type'")
    assert worker.one_line(ValueError("short")) == "short"


def test_the_file_holds_every_row_at_any_time(tmp_path: Path) -> None:
    path, jobs = tmp_path / "new" / "gpu.json", jobs_of("longest", 2)
    found = ResultFile(path, WHERE, jobs)
    pending = {"error": "not measured: the run ended before"}
    assert json.loads(path.read_text())["longest"] == [job.named | pending for job in jobs]
    row = jobs[0].named | {"tokens": 7, "cache_gib": 1.0, "end": "out of memory"}
    found.keep(jobs[0], row)
    contents = json.loads(path.read_text())
    assert contents["longest"] == [row, jobs[1].named | pending]
    assert (contents["commit"], contents["finished"]) == ("1", False)
    found.close()
    assert json.loads(path.read_text())["longest"][1]["error"] == "not measured: time"
    assert "longest longest1 time" in tables(found.contents())
    assert list(path.parent.iterdir()) == [path]


def test_a_file_of_the_same_code_is_continued(tmp_path: Path) -> None:
    path, jobs = tmp_path / "gpu.json", jobs_of("longest", 3)
    found = ResultFile(path, WHERE, jobs)
    found.keep(jobs[0], jobs[0].named | {"tokens": 7})
    found.keep(jobs[1], jobs[1].named | {"error": "out of memory"})
    found.close()
    found = ResultFile(path, WHERE | {"date": "later", "commit": "2"}, [*jobs, *jobs_of("bandwidth", 1)])
    assert found.differs is None
    assert found.jobs == [jobs[2], *jobs_of("bandwidth", 1)]
    found.keep(jobs[2], jobs[2].named | {"tokens": 9})
    contents = json.loads(path.read_text())
    assert [row.get("tokens") for row in contents["longest"]] == [7, None, 9]
    assert [row["date"] for row in contents["runs"]] == ["d", "later"]


def test_what_a_dead_process_left_is_planned_again(tmp_path: Path) -> None:
    path, jobs = tmp_path / "gpu.json", jobs_of("longest", 5)
    found = ResultFile(path, WHERE, jobs)
    dead = ["the measuring process ended: signal 9", "no result within 150 s"]
    dead.append(f"not timed: check failed: {dead[0]}")
    for job, error in zip(jobs, [*dead, "out of memory", "not timed: check failed: attention differs"], strict=True):
        found.keep(job, job.named | {"error": error})
    found.close()
    assert ResultFile(path, WHERE, jobs).jobs == jobs[:3]


def test_tables_show_failures_and_say_why(tmp_path: Path) -> None:
    names = ("full", "kivi-2bit", "kivi-4bit", "qjl-3bit")
    jobs = [Job("decode", (name, "llama-3.1-8b", 8, 32768, "plain")) for name in names]
    found = ResultFile(tmp_path / "gpu.json", WHERE, [Job("bandwidth", ("copy",)), *jobs])
    found.keep(Job("bandwidth", ("copy",)), {"cache": "copy", "gigabytes_per_second": 4000.0, "error": None})
    for job, time, bits in zip(jobs, (1.0, 0.25), (16.0, 3.2), strict=False):
        row = job.named | {"milliseconds": time, "gigabytes_per_second": 3000.0, "bits": bits, "error": None}
        row |= {"kernels": {"attend_kernel": 0.2}} if bits < 16 else {}
        found.keep(job, row)
    found.keep(jobs[2], jobs[2].named | {"error": "out of memory: 80 GiB"})
    found.close()
    contents = found.contents()
    text = tables(contents)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    table = lines.index("llama-3.1-8b, 8 x 32768 ms speed-up bound GB/s of copy kernel ms predicted bound by")
    assert lines[table + 1] == "full 1.000 1.00x 1.00x 3000.0 75% - - -"
    assert lines[table + 2].startswith("kivi-2bit 0.250 4.00x 5.00x 3000.0 75% 0.200")
    assert lines[table + 3] == "kivi-4bit out of memory: 80 GiB"
    assert lines[-1] == "decode qjl-3bit llama-3.1-8b 8 32768 plain time"
    assert contents["decode"][1]["bound"] == 5


def test_the_share_that_encoding_adds_to_a_prompt(tmp_path: Path) -> None:
    """Prompts are compared with the full cache in chunks of the same size; if that failed, only seconds are given."""
    times = {("full", 32768): 2.0, ("kivi-2bit", 32768): 2.09, ("full", 4096): None, ("kivi-2bit", 4096): 2.5}
    jobs = {key: Job("prefill", (key[0], 32768, key[1])) for key in times}
    found = ResultFile(tmp_path / "gpu.json", WHERE, [*jobs.values()])
    for key, seconds in times.items():
        row = {"seconds": seconds, "error": None} if seconds else {"error": "out of memory"}
        found.keep(jobs[key], jobs[key].named | row)
    lines = [" ".join(line.split()) for line in tables(found.contents()).splitlines()]
    assert lines[-4:] == [
        "prefill full x 32768: 2.000 s in chunks of 32768",
        "prefill kivi-2bit x 32768: 2.090 s in chunks of 32768, +4.5% beside full",
        "prefill full x 32768: out of memory",
        "prefill kivi-2bit x 32768: 2.500 s in chunks of 4096",
    ]


@pytest.mark.parametrize("changed", [{"sources": "t"}, {"hardware": {"accelerator": "B200"}}, {"versions": {"a": 1}}])
def test_a_file_of_other_code_or_another_device_is_kept_aside(tmp_path: Path, changed: dict[str, Any]) -> None:
    path, jobs = tmp_path / "gpu.json", jobs_of("longest", 1)
    ResultFile(path, WHERE, jobs).keep(jobs[0], jobs[0].named | {"tokens": 7})
    old = path.read_text()
    found = ResultFile(path, WHERE | changed, jobs)
    assert (found.differs, found.jobs) == (next(iter(changed)), jobs)
    assert (tmp_path / "gpu.previous.json").read_text() == old
    second = path.read_text()
    ResultFile(path, WHERE, jobs)
    assert (tmp_path / "gpu.previous.json").read_text() == old
    assert (tmp_path / "gpu.previous-2.json").read_text() == second


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": []}'])
def test_a_file_that_is_none_of_ours_is_kept_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    assert ResultFile(path, WHERE, jobs_of("longest", 1)).differs is not None
    assert (tmp_path / "gpu.previous.json").read_text() == text


def test_sources_are_those_that_run(tmp_path: Path) -> None:
    (tmp_path / "triton_kernels").mkdir()
    file = tmp_path / "triton_kernels" / "a.py"
    file.write_text("a")
    first = hash_sources(tmp_path)
    file.write_text("b")
    second = hash_sources(tmp_path)
    file.with_name("a.md").write_text("c")
    assert first != second == hash_sources(tmp_path)


def test_what_is_worth_most_comes_first() -> None:
    tiles = {"turboquant-4bit": [(16, 1, 2)]}
    jobs = plan_jobs(["uniform-4bit", *preset_names()], KEYS, SIZES, tiles)
    assert len(jobs) == len({*jobs})
    parts = [job.part for job in jobs]
    stages = [part for number, part in enumerate(parts) if number == 0 or parts[number - 1] != part]
    assert stages[:7] == ["bandwidth", "memory", "check", "decode", "profile", "tile", "models"]
    assert {*stages} == {*KEYS}
    first = [job.values for job in jobs if job.part == "check"][:4]
    assert first == [(name, "llama-3.1-8b", 8192) for name in TARGETS]
    main = [(8, 32768), (32, 32768), (1, 131072), (1, 8192)]
    decode = [job.values for job in jobs if job.part == "decode"]
    plain = [(name, "llama-3.1-8b", *size, "plain") for size in main for name in ("full", "none", *TARGETS)]
    assert decode[: len(plain)] == plain
    calls = decode[len(plain) : len(plain) + 2 * 4 * 4]
    assert {values[2:] for values in calls} == {(*size, call) for size in main for call in CALLS}
    assert len(decode) == 3 * 9 * (3 + len(preset_names())) + len(calls)
    loops = [job.values[1:] for job in jobs if job.part == "models" and job.values[0] == "full"]
    assert loops[:4] == [(1, 32768, "graph"), (1, 32768, "eager"), (8, 32768, "graph"), (8, 32768, "eager")]


def test_parts_bring_the_checks_that_they_need() -> None:
    assert plan_jobs(["kivi-2bit"], ["bandwidth"], SIZES, {}) == [Job("bandwidth", ("copy",))]
    checks = [job.values for job in plan_jobs(["kivi-2bit"], ["models"], SIZES, {}) if job.part == "check"]
    assert checks == [("kivi-2bit", "llama-3.1-8b", 8192), ("kivi-2bit", "llama-3.1-8b", SIZES.uneven)]
    checks = [job.values for job in plan_jobs(["kivi-2bit"], ["encode"], SIZES, {}) if job.part == "check"]
    assert [values[1:] for values in checks] == [(shape, 8192) for shape in SIZES.shapes]


def test_what_is_wrong_is_marked_and_what_kills_is_not_begun() -> None:
    timed = Job("decode", ("kivi-2bit", "llama-3.1-8b", 8, 32768, "plain"))
    model, full = Job("models", ("kivi-2bit", 1, 8192, "eager")), Job("models", ("full", 1, 8192, "eager"))
    other = Job("decode", ("kivi-2bit", "qwen2.5-7b", 8, 32768, "plain"))
    right, wrong = (Job("check", ("kivi-2bit", "llama-3.1-8b", tokens)) for tokens in (8192, SIZES.uneven))
    late, good = right.named | {"error": "not measured: time"}, right.named | {"error": None}
    bad = wrong.named | {"error": "attention differs by 0.5"}
    dead = wrong.named | {"error": "the measuring process ended: signal 11"}
    for job in (timed, model):
        assert Checks({right: late}).failure(job) == "its kernels were not checked"
        assert Checks({right: good}).failure(job) is None
        assert Checks({right: good, wrong: bad}).failure(job) == "check failed: attention differs by 0.5"
        assert blocked(job, {right: good, wrong: bad}) is None
        assert blocked(job, {right: good, wrong: dead}) == f"not timed: check failed: {dead['error']}"
        memory = {Job("memory", ("kivi-2bit",)): {"cache": "kivi-2bit", "error": "1 errors of memory"}}
        assert Checks({right: good} | memory).failure(job) == "check failed: 1 errors of memory"
    for job in (full, other):
        assert Checks({right: good, wrong: bad}).failure(job) is None


def test_a_mark_goes_when_the_check_is_made_again(tmp_path: Path) -> None:
    check, timed = Job("check", ("kivi-2bit", "small", 64)), Job("encode", ("kivi-2bit", "small", 1, 64))
    found = ResultFile(tmp_path / "gpu.json", WHERE, [check, timed])
    found.keep(timed, timed.named | {"milliseconds": 1.0, "gigabytes_per_second": 1.0, "error": None})
    found.close()
    assert found.contents()["encode"][0]["invalid"] == "its kernels were not checked"
    assert "INVALID: its kernels were not checked" in tables(found.contents())
    found = ResultFile(tmp_path / "gpu.json", WHERE, [check, timed])
    assert found.jobs == [check]
    found.keep(check, check.named | {"attention_error": 1e-3, "differing_codes": 0.0, "error": None})
    assert found.contents()["encode"][0]["invalid"] is None
