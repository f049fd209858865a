"""Order of the GPU measurements, rows of failures, the time budget, and the result file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kit import worker
from gpu_kit.gpu_table import tables
from gpu_kit.jobs import KEYS, SHARES, SIZES, Job, needs, plan_jobs, without_check
from gpu_kit.result_file import ResultFile, hash_sources
from gpu_kit.worker import Budget, run_jobs

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


def timed_run(jobs: list[Job], seconds: float, cost: Callable[[Job], float]) -> list[Job]:
    """Run jobs on a clock that their costs advance; returns them in the order in which they ran."""
    clock = Clock()
    events: list[dict[str, Any]] = []

    def measure(job: Job) -> Figure:
        clock.now += cost(job)
        return Figure(cost(job))

    assert run_jobs(jobs, measure, Budget(seconds, clock), events.append)
    begun = [event["begin"] for event in events if "begin" in event]
    rows = [event["row"] for event in events if "row" in event]
    assert rows == [job.named | {"milliseconds": cost(job), "error": None} for job in begun]
    return begun


def test_a_part_stops_at_its_share_of_the_time() -> None:
    decode, encode = jobs_of("decode", 100), jobs_of("encode", 3)
    assert (SHARES["decode"], SHARES["encode"]) == (45, 8)
    begun = timed_run(decode + encode, 52.5, lambda job: 1.0)
    assert begun[:45] == decode[:45]
    assert begun[45:48] == encode
    assert begun[48:] == decode[45:50], "what encoding left goes to the rows that were late"


def test_parts_that_had_their_share_come_last() -> None:
    clock = Clock()
    events: list[dict[str, Any]] = []

    def measure(job: Job) -> Figure:
        clock.now += 1.0
        return Figure(1.0)

    late, encode = jobs_of("decode", 3), jobs_of("encode", 2)
    assert run_jobs(encode, measure, Budget(4, clock), events.append, late)
    assert [event["begin"] for event in events if "begin" in event] == [*encode, *late[:2]]


def test_time_that_a_part_does_not_need_is_left_to_those_after_it() -> None:
    decode, encode = jobs_of("decode", 2), jobs_of("encode", 20)
    assert timed_run(decode + encode, 20, lambda job: 1.0) == decode + encode[:18]


def test_a_long_row_takes_from_the_parts_after_it_and_not_from_the_end() -> None:
    decode, encode = jobs_of("decode", 3), jobs_of("encode", 3)
    begun = timed_run(decode + encode, 12, lambda job: 11.0 if job == decode[0] else 0.75)
    assert begun == [decode[0], encode[0], encode[1]]


def test_a_row_that_fails_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of("decode", 3)

    def measure(job: Job) -> Figure:
        if job == jobs[1]:
            raise torch.OutOfMemoryError("Tried to allocate 80 GiB\n" + "x" * 1000)
        return Figure(1.0)

    def rows() -> tuple[bool, list[str | None]]:
        events: list[dict[str, Any]] = []
        works = run_jobs(jobs, measure, Budget(60, Clock()), events.append)
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
    jobs = [Job("decode", (name, "llama-3.1-8b", 8, 32768)) for name in names]
    found = ResultFile(tmp_path / "gpu.json", WHERE, [Job("bandwidth", ("copy",)), *jobs])
    found.keep(Job("bandwidth", ("copy",)), {"cache": "copy", "gigabytes_per_second": 4000.0, "error": None})
    for job, time, bits in zip(jobs, (1.0, 0.25), (16.0, 3.2), strict=False):
        found.keep(job, job.named | {"milliseconds": time, "gigabytes_per_second": 3000.0, "bits": bits, "error": None})
    found.keep(jobs[2], jobs[2].named | {"error": "out of memory: 80 GiB"})
    found.close()
    text = tables(found.contents())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[lines.index("llama-3.1-8b, batch 8 32768") :][1:4] == [
        "full 1.000 1.00x of 1.00x 3000.0 GB/s 75%", "kivi-2bit 0.250 4.00x of 5.00x 3000.0 GB/s 75%",
        "kivi-4bit failed",
    ]  # fmt: skip
    assert any(line.startswith("decode kivi-4bit") and line.endswith("out of memory: 80 GiB") for line in lines)
    assert lines[-1] == "decode qjl-3bit llama-3.1-8b 8 32768 time"
    assert found.contents()["decode"][1]["bound"] == 5


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


def test_what_is_asked_for_comes_first() -> None:
    jobs = plan_jobs(preset_names(), [*KEYS], SIZES)
    assert [part for i, part in enumerate(job.part for job in jobs) if i == 0 or jobs[i - 1].part != part] == [*KEYS]
    decode = [job.named for job in jobs if job.part == "decode"]
    assert len(decode) == len({tuple(row.values()) for row in decode}) == 3 * 9 * (1 + len(preset_names()))
    first = decode[:20]  # full, 4 and 2 bits, KIVI with both, at four sizes
    assert {row["shape"] for row in first} == {"llama-3.1-8b"}
    assert {(row["batch"], row["tokens"]) for row in first} == {(8, 32768), (8, 131072), (32, 32768), (32, 131072)}
    assert {row["cache"] for row in first} == {"full", "turboquant-4bit", "turboquant-2bit", "kivi-4bit", "kivi-2bit"}
    assert {row["cache"] for row in decode[20 : 4 * (1 + len(preset_names()))]} == {*preset_names()} - {
        row["cache"] for row in first
    }
    checks = [job.values for job in jobs if job.part == "check"]
    assert checks[0] == ("turboquant-4bit", "llama-3.1-8b", 8192)
    assert {values[:2] for values in checks} == {(name, shape) for name in preset_names() for shape in SIZES.shapes}


def test_parts_bring_the_checks_that_they_need() -> None:
    assert plan_jobs(["kivi-2bit"], ["bandwidth"], SIZES) == [Job("bandwidth", ("copy",))]
    checks = [job.values for job in plan_jobs(["kivi-2bit"], ["models"], SIZES) if job.part == "check"]
    assert checks == [("kivi-2bit", "llama-3.1-8b", 8192), ("kivi-2bit", "llama-3.1-8b", SIZES.uneven)]


def test_only_what_is_right_is_timed() -> None:
    timed = Job("decode", ("kivi-2bit", "llama-3.1-8b", 8, 32768))
    model, full = Job("models", ("kivi-2bit", 1, 8192)), Job("models", ("full", 1, 8192))
    right, wrong = (Job("check", ("kivi-2bit", "llama-3.1-8b", tokens)) for tokens in (8192, SIZES.uneven))
    main = "llama-3.1-8b"
    assert needs(timed, main) == needs(model, main) == {("kivi-2bit", main)}
    assert without_check(full, {}, main) is None
    for job in (timed, model):
        assert without_check(job, {}, main) == "not measured: its kernels were not checked"
        late = {right: {"error": "not measured: time"}}
        assert without_check(job, late, main) == "not measured: its kernels were not checked"
        assert without_check(job, {right: {"error": None}}, main) is None
        both = {right: {"error": None}, wrong: {"error": "attention differs by 0.5"}}
        assert without_check(job, both, main) == "not timed: check failed: attention differs by 0.5"
