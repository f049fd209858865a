"""The runner and its table: nothing is computed twice, nothing is lost, and a failure ends one cell only."""

import dataclasses
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.models.small_model import method_config, small_model
from transformers import Cache, LlamaForCausalLM, PreTrainedModel

from kvcache_compress import enable_fused_attention
from kvcache_compress.eval.caches.caches import CacheSpec, full_cache, preset_cache
from kvcache_compress.eval.caches.prefill import CacheRun
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.runner.table import Cell, ResultTable, read_cells
from kvcache_compress.eval.tasks.benchmark import Benchmark, Record, Sample

PACKED = preset_cache(method_config("turboquant"), name="packed")
TEXT = "a\u2028b\u0085c\x0c 中"
"""Characters that some readers take for line breaks."""


class Toy(Benchmark):
    """A benchmark that scores by the first logit and counts its calls."""

    kind = "toy"
    main_score: ClassVar[str] = "mean"
    asked: ClassVar[list[tuple[str, str]]] = []

    count: int = 3
    shift: int = 0
    tokens: int = 80
    fails: str = ""
    ids: tuple[str, ...] = ("s0", "s1", "s2")

    def samples(self, model: PreTrainedModel, tokenizer: Any) -> list[Sample]:
        prompts = [torch.arange(self.tokens)[None] * 3 + number for number in range(self.count)]
        return [
            Sample(self.ids[number], prompt % 64, {"shift": self.shift * (number == 1)}, prompt[:, :5] % 64)
            for number, prompt in enumerate(prompts[: self.limit])
        ]

    def score(self, run: CacheRun, sample: Sample, tokenizer: Any) -> Record:
        if run.spec.name == self.fails:
            raise torch.OutOfMemoryError("Tried to allocate 80 GiB")
        self.asked.append((sample.id, run.spec.name))
        return {"value": run.forced(torch.arange(4))[-1, 0].item(), "text": TEXT}

    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        return {"mean": sum(record["value"] for record in records) / len(records)}


class Nowhere(Toy):
    """A benchmark without data."""

    def samples(self, model: PreTrainedModel, tokenizer: Any) -> list[Sample]:
        raise FileNotFoundError("no file data.jsonl")


@pytest.fixture(autouse=True)
def _nothing_asked() -> None:
    Toy.asked.clear()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "out" / "results.jsonl"


def run(model: LlamaForCausalLM, table: Path | None, benchmark: Toy, *specs: CacheSpec, **options: Any) -> list[Cell]:
    return Runner(model, None, table, **options).run("toy", benchmark, [full_cache(), *(specs or (PACKED,))])


def interrupt(done: int, total: int, label: str) -> None:
    if done == 3:
        raise KeyboardInterrupt


def refuse(model: PreTrainedModel) -> Cache:
    raise ValueError("bits=9")


def test_cells_say_what_was_measured(model: LlamaForCausalLM, table: Path) -> None:
    full, packed = run(model, table, Toy(), seed=5)
    assert Toy.asked == [(f"s{number}", name) for number in range(3) for name in ("full", "packed")]
    assert packed.score == sum(record["value"] for record in packed.records) / 3
    assert packed.score != full.score
    assert [record["id"] for record in packed.records] == ["s0", "s1", "s2"]
    tokens = packed.records[0]["packed_tokens"]
    assert 0 < tokens < 80
    assert packed.packed_tokens == {"least": tokens, "mean": tokens, "most": tokens}
    assert 3 < packed.packed_bits < packed.all_bits
    assert full.packed_bits == full.all_bits == 16
    assert (packed.seed, packed.samples, packed.dtype, packed.error) == (5, 3, "float32", None)
    assert packed.cache["config"]["keys"]["method"] == "turboquant"
    assert read_cells(table) == [full, packed]
    assert len(table.read_text(encoding="utf-8").split("\n")) == 3, "a line per cell, and its end"
    assert [path.name for path in table.parent.iterdir()] == [table.name]
    assert run(model, None, Toy(), seed=5)[1].records[2]["value"] == packed.records[2]["value"]


def test_finished_samples_are_not_computed_again(model: LlamaForCausalLM, table: Path) -> None:
    assert run(model, table, Toy(limit=1))[1].samples == 1
    Toy.asked.clear()
    first = run(model, table, Toy())
    assert Toy.asked == [(f"s{number}", name) for number in (1, 2) for name in ("full", "packed")]
    assert run(model, table, Toy(limit=1))[1].samples == 1
    other = preset_cache(method_config("kivi"), name="other")
    Toy.asked.clear()
    again = run(model, table, Toy(), PACKED, other)[:2]
    assert [cell.records for cell in again] == [cell.records for cell in first], "what a lower limit leaves out is kept"
    assert Toy.asked == [(f"s{number}", "other") for number in range(3)]


def test_results_of_other_options_are_never_taken_nor_overwritten(model: LlamaForCausalLM, table: Path) -> None:
    done = run(model, table, Toy())
    fused = small_model()
    enable_fused_attention(fused)
    others = {
        "another seed": run(model, table, Toy(), seed=1),
        "other options": run(model, table, Toy(shift=1)),
        "other weights": run(small_model(seed=1), table, Toy()),
        "another attention": run(fused, table, Toy()),
        "another config": run(model, table, Toy(), preset_cache(method_config("kivi"), name="packed"))[1:],
    }
    assert len(Toy.asked) == 6, "nothing was scored again"
    for what, cells in others.items():
        assert all("holds results of toy/" in str(cell.error) for cell in cells), what
    assert run(model, table, Toy()) == done == read_cells(table)


def test_a_changed_sample_alone_is_computed_anew(model: LlamaForCausalLM, table: Path) -> None:
    cells = run(model, table, Toy())
    for cell in cells:
        cell.records[1]["digest"] = "of another text"
    ResultTable(table).write(cells)
    Toy.asked.clear()
    run(model, table, Toy())
    assert Toy.asked == [("s1", "full"), ("s1", "packed")]


def test_an_interruption_loses_nothing(model: LlamaForCausalLM, table: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(model, table, Toy(), on_progress=interrupt)
    assert Toy.asked == [("s0", "full"), ("s0", "packed"), ("s1", "full")]
    with pytest.raises(ValueError, match="no finished cell"):
        read_cells(table)
    with table.open("a") as stream:
        stream.write('\n{"unfinished": ["Llama')
    Toy.asked.clear()
    cells = run(model, table, Toy())
    assert Toy.asked == [("s1", "packed"), ("s2", "full"), ("s2", "packed")]
    assert [cell.samples for cell in cells] == [3, 3]
    assert {cell.records[0]["text"] for cell in read_cells(table)} == {TEXT}
    assert '"unfinished"' not in table.read_text(encoding="utf-8")


def test_a_failure_ends_its_cell_alone_and_is_tried_again(model: LlamaForCausalLM, table: Path) -> None:
    misfit = dataclasses.replace(PACKED, name="misfit", make=refuse)
    sound = dataclasses.replace(PACKED, name="sound")
    full, packed, refused, whole = run(model, table, Toy(fails="packed"), PACKED, misfit, sound)
    assert (full.error, full.samples, whole.error, whole.samples) == (None, 3, None, 3)
    assert packed.error == "out of memory: Tried to allocate 80 GiB"
    assert (refused.error, refused.scores, refused.score) == ("bits=9", {}, None)
    assert len(Toy.asked) == 6, "a failed cell is not tried with the next sample"
    Toy.asked.clear()
    _, again = run(model, table, Toy(fails="packed"), dataclasses.replace(misfit, make=PACKED.make))
    assert again.error is None
    assert Toy.asked == [(f"s{number}", "misfit") for number in range(3)]


def test_missing_data(model: LlamaForCausalLM, table: Path) -> None:
    done = run(model, table, Toy())
    assert run(model, table, Nowhere()) == done, "what is finished stays"
    assert {cell.error for cell in run(model, None, Nowhere())} == {"no file data.jsonl"}
    assert {cell.error for cell in run(model, None, Toy(count=0))} == {"benchmark toy: no samples"}
    (error,) = {cell.error for cell in run(model, None, Toy(tokens=5000))}
    assert "5005 tokens" in str(error)
    full, packed = run(model, None, Toy(tokens=12))
    assert full.error is None
    assert "nothing was packed" in str(packed.error)


def test_two_runs_on_one_table(model: LlamaForCausalLM, table: Path, caplog: pytest.LogCaptureFixture) -> None:
    second: list[Future[list[Cell]]] = []

    def start_another(done: int, total: int, label: str) -> None:
        if done == 3:
            second.append(pool.submit(run, model, table, Toy()))
            while not second[0].done() and "another run is using this folder" not in caplog.text:
                time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        first = run(model, table, Toy(), on_progress=start_another)
        assert second[0].result() == first == read_cells(table)
    assert [(cell.error, cell.samples) for cell in first] == [(None, 3)] * 2
    assert len(Toy.asked) == 6


def test_scores_that_are_not_finite_end_their_cells(model: LlamaForCausalLM, table: Path) -> None:
    class Broken(Toy):
        def summarize(self, records: Sequence[Record]) -> dict[str, float]:
            return {"mean": float("nan")}

    for cell in run(model, table, Broken()):
        assert "not finite" in cell.error
        assert len(cell.records) == 3
    assert [cell.error for cell in run(model, table, Toy())] == [None, None], "the records were kept"
    assert len(Toy.asked) == 6


def test_equal_names_are_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="caches: full more than once"):
        run(model, None, Toy(), full_cache())
    for cell in run(model, None, Toy(count=2, ids=("x", "x"))):
        assert "ids of samples: x more than once" in str(cell.error)


@pytest.mark.parametrize("content", ["{{", json.dumps({"model": "m"}), '{"unfinished": ["a"]}x\n{"a": 1}'])
def test_files_that_are_no_tables_are_left_alone(content: str, model: LlamaForCausalLM, table: Path) -> None:
    table.parent.mkdir()
    table.write_text(content)
    for read in (read_cells, lambda path: run(model, path, Toy())):
        with pytest.raises(ValueError, match=r"results\.jsonl, line \d: not a cell"):
            read(table)
    assert table.read_text() == content
    with pytest.raises(ValueError, match=r"output='.*results\.json'"):
        ResultTable(table.with_suffix(".json"))
