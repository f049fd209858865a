"""Tuning with tiny sizes and made-up times, in Triton's interpreter: which tiles are chosen."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tune as tune_script
from gpu_kit import tune
from gpu_kit.jobs import Job, blocked
from gpu_kit.tune import Case, best_tiles, plan_cases, plan_tiles, try_tile, update_table
from support.paths import ROOT

from kvcache_compress.bench.layers import SHAPES, Shape
from kvcache_compress.triton_kernels.attention import tiles
from kvcache_compress.triton_kernels.common.operands import Tile

CPU = torch.device("cpu")
TINY = Shape(4, 2, 64)
SIZE = (1, 64)
RULE, FAST, SLOW, WRONG = Tile(64, 1, 3), Tile(32, 2, 3), Tile(16, 1, 1), Tile(16, 8, 4)
WHERE = {"accelerator": "a GPU", "date": "today"}


@pytest.fixture(autouse=True)
def _views_of_one_test() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    tune._views.cache_clear()


def case_of(name: str = "turboquant-4bit", shape: str = "tiny", kernel: str = "a kernel") -> Case:
    return Case(name, shape, kernel, RULE, (FAST, SLOW, WRONG))


def timer_of(times: dict[Tile, float]) -> Callable[..., float]:
    """Timer that makes the call and returns a made-up time for its tile."""

    def timer(call: Any, device: torch.device, repeats: int) -> float:
        call()
        view, _ = call.__defaults__
        return times[view.keys.codec.kernel_side.tile]

    return timer


def tried(case: Case, tile: Tile, times: dict[Tile, float]) -> dict[str, Any]:
    """The row of a tile as a measuring process makes it, by the kernels themselves."""
    job = case.job("tile", tile, SIZE)
    try:
        call = (case.cache, case.shape, TINY, *SIZE, CPU, tile)
        return job.named | asdict(try_tile(*call, timed=True, repeats=1, timer=timer_of(times)))
    except ValueError as error:
        return job.named | {"error": str(error)}


def test_the_fastest_tile_that_is_right_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fastest right tile is chosen, not a faster wrong one, and attention then uses it."""
    attend = tune.Step.attend

    def attend_wrongly(view: Any, *arguments: Any) -> torch.Tensor:
        return attend(view, *arguments) * (1.05 if view.keys.codec.kernel_side.tile == WRONG else 1)

    monkeypatch.setattr(tune.Step, "attend", attend_wrongly)
    times = {RULE: 1.0, FAST: 0.9, SLOW: 0.95, WRONG: 0.1}
    (planned,) = plan_cases(["turboquant-4bit"], {"tiny": TINY})
    assert planned.rule == RULE
    assert {FAST, SLOW, WRONG} < {*planned.others} == {*map(Tile._make, itertools.product(*every()))} - {RULE}
    case = case_of(kernel=planned.kernel)
    rows = {case.job("tile", tile, SIZE): tried(case, tile, times) for tile in case.others}
    errors = {tile: rows[case.job("tile", tile, SIZE)]["error"] for tile in case.others}
    assert errors[FAST] is errors[SLOW] is None
    assert errors[WRONG].startswith("attention differs by")
    fast = rows[case.job("tile", FAST, SIZE)]
    assert (fast["milliseconds"], fast["rule_milliseconds"], fast["ratio"]) == (0.9, 1.0, 0.9)
    assert 0 < fast["attention_error"] < 2.8e-3

    path = tmp_path / "tiles.json"
    update_table(path, "9.0", best_tiles([case], rows, SIZE), WHERE)
    (entry,) = json.loads(path.read_text())["9.0"].values()
    assert (entry["tile"], entry["rule"]) == (FAST._asdict(), RULE._asdict())
    assert (entry["measured"][0]["rule_milliseconds"], entry["accelerator"]) == (1.0, "a GPU")
    monkeypatch.setattr(tiles, "TABLE", path)
    tiles.measured.cache_clear()
    ((view, _), *_) = tune._views(case.cache, TINY, *SIZE, CPU, tune.INPUTS)
    sides = [side.codec.kernel_side for side in (view.keys, view.values)]
    sides[0].use_tile(None)
    assert tiles.tile_shape(*sides, False, 4, "9.0") == FAST
    tiles.measured.cache_clear()


def every() -> tuple[tuple[int, ...], ...]:
    return (16, 32, 64), tiles.WARPS, tiles.STAGES


def rows_of(case: Case, ratios: dict[Tile, float | None]) -> dict[Job, dict[str, Any]]:
    """Rows of tiles with these ratios; None for one that failed."""
    rows = {}
    for tile, ratio in ratios.items():
        job = case.job("tile", tile, SIZE)
        figures = {"milliseconds": ratio, "rule_milliseconds": 1.0, "ratio": ratio, "error": None}
        rows[job] = job.named | (figures if ratio is not None else {"error": "attention differs"})
    return rows


def test_a_gain_below_the_margin_is_none(tmp_path: Path) -> None:
    case, path = case_of(), tmp_path / "tiles.json"
    gains = {0.96: True, 0.969: True, 0.971: False, 1.2: False}
    for ratio, pays in gains.items():
        found = best_tiles([case], rows_of(case, {FAST: ratio, SLOW: 0.99, WRONG: None}), SIZE)
        assert (found["a kernel"] is not None) == pays
        update_table(path, "9.0", found, WHERE)
        assert bool(json.loads(path.read_text())) == pays, "an entry that does not pay any more goes"
    assert best_tiles([case], rows_of(case, dict.fromkeys(case.others)), SIZE) == {}, "all failed: nothing is known"


def test_a_tile_must_pay_with_all_inputs() -> None:
    case = case_of()
    times = iter([0.5, 1.0, 0.98, 1.0, 0.5, 1.0])
    call = (case.cache, case.shape, TINY, *SIZE, CPU, FAST)
    found = try_tile(*call, timed=True, timer=lambda *_: next(times))
    assert (found.milliseconds, found.rule_milliseconds, found.ratio) == (0.5, 1.0, 0.98)


def test_a_kernel_of_several_shapes_gets_the_tile_that_pays_in_all() -> None:
    cases = [case_of(shape="one"), case_of(shape="two"), case_of(kernel="another")]
    rows = rows_of(cases[0], {FAST: 0.5, SLOW: 0.9, WRONG: 0.1})
    rows |= rows_of(cases[1], {FAST: 0.98, SLOW: 0.92, WRONG: None})
    rows |= rows_of(cases[2], {FAST: 0.5, SLOW: 0.9, WRONG: None})
    found = best_tiles(cases, rows, SIZE)
    assert {name: entry and entry["tile"] for name, entry in found.items()} == {
        "a kernel": SLOW._asdict(), "another": FAST._asdict()
    }  # fmt: skip
    assert [row["ratio"] for row in found["a kernel"]["measured"]] == [0.9, 0.92]


def test_a_kernel_that_was_not_measured_through_keeps_its_entry(tmp_path: Path) -> None:
    case, path = case_of(), tmp_path / "tiles.json"
    update_table(path, "9.0", best_tiles([case], rows_of(case, {FAST: 0.5, SLOW: 1, WRONG: 1}), SIZE), WHERE)
    update_table(path, "10.0", best_tiles([case], rows_of(case, {FAST: 1, SLOW: 0.5, WRONG: 1}), SIZE), WHERE)
    before = path.read_text()
    rows = rows_of(case, {FAST: 1, SLOW: 0.9, WRONG: 1})
    rows[case.job("tile", WRONG, SIZE)]["error"] = "not measured: time"
    assert best_tiles([case], rows, SIZE)["a kernel"]["tile"] == SLOW._asdict(), "what was measured and pays is taken"
    rows[case.job("tile", SLOW, SIZE)]["ratio"] = 1
    found = best_tiles([case], rows, SIZE)
    assert found == {}
    update_table(path, "9.0", found, WHERE)
    assert path.read_text() == before
    rows[case.job("tile", SLOW, SIZE)]["ratio"] = 0.9
    for error in ("no result within 150 s", "not timed: check failed: the measuring process ended: signal 9"):
        rows[case.job("tile", WRONG, SIZE)]["error"] = error
        assert best_tiles([case], rows, SIZE)["a kernel"]["tile"] == SLOW._asdict(), "what ends a process has failed"
    update_table(path, "9.0", {"a kernel": None}, WHERE)
    assert {name: [*kernels] for name, kernels in json.loads(path.read_text()).items()} == {"10.0": ["a kernel"]}
    with pytest.raises(ValueError, match="tokens=24: allowed 16, 32, 64, 128"):
        update_table(path, "9.0", {"a kernel": {"tile": {"tokens": 24, "warps": 1, "stages": 2}}}, WHERE)
    assert [*json.loads(path.read_text())] == ["10.0"]


def test_tiles_that_are_wrong_or_were_not_tried_are_not_timed() -> None:
    case = case_of()
    job, row = case.job("tile", FAST, SIZE), case.job("try", FAST, SIZE)
    assert blocked(job, {row: {"error": None}}) is None
    assert blocked(job, {row: {"error": "attention differs"}}) == "not timed: check failed: attention differs"
    assert blocked(job, {row: {"error": "not measured: time"}}) == "not measured: it was not tried"
    ended = "the measuring process ended: signal 11"
    assert blocked(job, {row: {"error": ended}}) == f"not timed: check failed: {ended}"


def test_spilled_registers_are_refused() -> None:
    compiled = SimpleNamespace(n_regs=255, n_spills=0)
    kernels = {"map_query_kernel": None, "turn_kernel": None, "attend_kernel": compiled, "merge_kernel": None}
    launches = [SimpleNamespace(kernel=SimpleNamespace(__name__=name), compiled=one) for name, one in kernels.items()]
    plan = SimpleNamespace(launches=launches)
    side = SimpleNamespace(plans={"key": plan})
    assert tune._registers(side) == 255
    compiled.n_spills = 12
    with pytest.raises(ValueError, match="48 bytes of a thread's registers spill"):
        tune._registers(side)


def test_presets_with_the_same_kernel_are_tuned_once() -> None:
    shapes = {name: SHAPES[name] for name in ("llama-3.1-8b", "qwen2.5-7b")}
    cases = plan_cases(["turboquant-2.5bit", "turboquant-2.5bit", "turboquant-3.5bit"], shapes)
    assert [(case.cache, case.shape) for case in cases] == [
        (name, shape) for name in ("turboquant-2.5bit", "turboquant-3.5bit") for shape in shapes
    ]
    assert len({case.kernel for case in cases}) == 2


def test_few_tiles_of_every_case_come_before_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that are most like the rule's come first, after the one that the table has."""
    (case,) = plan_cases(["turboquant-4bit"], {"tiny": TINY}, most=4)
    assert not case.complete
    assert [*case.others] == [Tile(64, 1, 2), Tile(64, 1, 4), Tile(32, 1, 3), Tile(64, 1, 1)]
    monkeypatch.setattr(tiles, "measured", lambda: {"9.0": {case.kernel: SLOW}})
    (case,) = plan_cases(["turboquant-4bit"], {"tiny": TINY}, most=2, capability="9.0")
    assert [*case.others] == [SLOW, Tile(64, 1, 2)]
    monkeypatch.setattr(tune, "AT_A_TIME", 2)
    cases = [case_of("kivi-2bit"), case_of("kivi-4bit", kernel="another")]
    jobs = plan_tiles(cases, SIZE)
    assert [job.part for job in jobs] == ["try"] * 6 + ["tile"] * 6
    named = [(job.values[0], job.values[4:]) for job in jobs[:6]]
    assert named == [
        ("kivi-2bit", FAST), ("kivi-2bit", SLOW), ("kivi-4bit", FAST), ("kivi-4bit", SLOW), ("kivi-2bit", WRONG),
        ("kivi-4bit", WRONG),
    ]  # fmt: skip


def test_the_script_in_small_stopped_and_taken_up_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "benchmarks/tune.py", "--small", "--output", str(tmp_path), "--tiles", "1"]
    command += ["--preset", "uniform-4bit"]
    tune_script.main([*command[2:], "--minutes", "0"])
    said = "uniform-4bit, small: none that was measured pays, and not all were, or none was right\n2 rows not measured"
    assert said in capsys.readouterr().out
    assert json.loads((tmp_path / "table.json").read_text()) == {}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "tiles.json").read_text())
    assert found["finished"]
    assert len(found["runs"]) == 2
    for part in ("try", "tile"):
        assert [(row["warps"], row["stages"], row["error"]) for row in found[part]] == [(1, 2, None)]
    assert all(row["milliseconds"] is None and row["attention_error"] > 0 for row in found["try"])
    assert all(row["milliseconds"] > 0 and row["ratio"] > 0 for row in found["tile"])
    assert "0 rows not measured" in done.stdout
    assert {*json.loads((tmp_path / "table.json").read_text())} <= {"none"}, "the interpreter's times are no device's"


def test_without_a_gpu_only_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="2"):
        tune_script.main(["--output", str(tmp_path)])
    assert "no GPU here" in capsys.readouterr().err
