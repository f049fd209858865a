"""The runner: nothing is computed twice, nothing is lost, and a failure ends one cell only."""

import copy
import dataclasses
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.small_model import method_config, small_model
from transformers import Cache, LlamaForCausalLM, PreTrainedModel

from kvcache_compress import enable_fused_attention
from kvcache_compress.eval.caches.caches import CacheSpec, full_cache, preset_cache
from kvcache_compress.eval.caches.prefill import CacheRun
from kvcache_compress.eval.runner.cells import Cell, cell_path, read_cells
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.tasks.benchmark import Benchmark, Record, Sample, make_benchmark, register_benchmark

PACKED = preset_cache(method_config("turboquant"), name="packed")


class Toy(Benchmark):
    """A benchmark that scores by the first logit and counts its calls."""

    kind = "toy"
    main_score: ClassVar[str] = "mean"
    asked: ClassVar[list[tuple[str, str]]] = []

    count: int = 3
    shift: int = 0
    tokens: int = 80
    fails: str = ""
    same_prompt: bool = False
    ids: tuple[str, ...] = ("s0", "s1", "s2")

    def samples(self, model: PreTrainedModel, tokenizer: Any) -> list[Sample]:
        prompts = [torch.arange(self.tokens)[None] * 3 + number for number in range(self.count)]
        return [
            Sample(
                self.ids[number],
                prompts[0] % 64 if self.same_prompt else prompt % 64,
                {"shift": self.shift * (number == 1)},
                prompt[:, :5] % 64,
            )
            for number, prompt in enumerate(prompts)
        ]

    def score(self, run: CacheRun, sample: Sample, tokenizer: Any) -> Record:
        if run.spec.name == self.fails:
            raise torch.OutOfMemoryError("Tried to allocate 80 GiB")
        self.asked.append((sample.id, run.spec.name))
        return {"value": run.forced(torch.arange(4))[-1, 0].item()}

    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        return {"mean": sum(record["value"] for record in records) / len(records)}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_model()


@pytest.fixture(autouse=True)
def _nothing_asked() -> None:
    Toy.asked.clear()


def run(model: LlamaForCausalLM, output: Path | None, benchmark: Toy, *specs: CacheSpec, **options: Any) -> list[Cell]:
    return Runner(model, None, output, **options).run("toy", benchmark, [full_cache(), *(specs or (PACKED,))])


def test_cells_say_what_was_measured(model: LlamaForCausalLM, tmp_path: Path) -> None:
    full, packed = run(model, tmp_path, Toy(), seed=5)
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
    assert {cell.cache["name"]: cell for cell in read_cells(tmp_path)} == {"full": full, "packed": packed}
    assert not list(tmp_path.rglob("*.jsonl"))
    assert run(model, None, Toy(), seed=5)[1].records[2]["value"] == packed.records[2]["value"]


def test_finished_cells_are_not_computed_again(model: LlamaForCausalLM, tmp_path: Path) -> None:
    first = run(model, tmp_path, Toy())
    Toy.asked.clear()
    assert run(model, tmp_path, Toy()) == first
    assert Toy.asked == []
    other = preset_cache(method_config("kivi"), name="other")
    assert run(model, tmp_path, Toy(), PACKED, other)[:2] == first
    assert Toy.asked == [(f"s{number}", "other") for number in range(3)]


def test_a_higher_limit_adds_samples(model: LlamaForCausalLM, tmp_path: Path) -> None:
    assert run(model, tmp_path, Toy(limit=1))[1].samples == 1
    Toy.asked.clear()
    assert run(model, tmp_path, Toy(limit=2))[1].samples == 2
    assert Toy.asked == [("s1", "full"), ("s1", "packed")]
    Toy.asked.clear()
    assert run(model, tmp_path, Toy(limit=1))[1].samples == 1
    assert run(model, tmp_path, Toy(limit=2))[1].samples == 2
    assert Toy.asked == [], "what a lower limit leaves out is kept"


def test_results_of_other_options_are_never_taken_nor_overwritten(model: LlamaForCausalLM, tmp_path: Path) -> None:
    done = run(model, tmp_path, Toy())
    fused = small_model()
    enable_fused_attention(fused)
    others = {
        "another seed": run(model, tmp_path, Toy(), seed=1),
        "other options": run(model, tmp_path, Toy(shift=1)),
        "other weights": run(small_model(seed=1), tmp_path, Toy()),
        "another attention": run(fused, tmp_path, Toy()),
    }
    assert len(Toy.asked) == 6, "nothing was scored again"
    for what, cells in others.items():
        assert all("holds results of other weights, options" in str(cell.error) for cell in cells), what
    full, packed = run(model, tmp_path, Toy(), preset_cache(method_config("kivi"), name="packed"))
    assert full == done[0]
    assert "holds results of" in packed.error
    assert run(model, tmp_path, Toy()) == done


def test_interrupted_records_of_other_options_stay(model: LlamaForCausalLM, tmp_path: Path) -> None:
    def interrupt(count: int, total: int, label: str) -> None:
        if count == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, Toy(), on_progress=interrupt)
    Toy.asked.clear()
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, Toy(), seed=1, on_progress=interrupt)
    Toy.asked.clear()
    assert run(model, tmp_path, Toy())[1].samples == 3
    assert len(Toy.asked) == 3


def test_a_changed_sample_alone_is_computed_anew(model: LlamaForCausalLM, tmp_path: Path) -> None:
    run(model, tmp_path, Toy())
    for path in tmp_path.glob("*/*/*.json"):
        cell = Cell.read(path)
        cell.records[1]["digest"] = "of another text"
        path.write_text(cell.to_json())
    Toy.asked.clear()
    run(model, tmp_path, Toy())
    assert Toy.asked == [("s1", "full"), ("s1", "packed")]


def test_an_interruption_loses_nothing(model: LlamaForCausalLM, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, label: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, Toy(), on_progress=interrupt)
    assert Toy.asked == [("s0", "full"), ("s0", "packed"), ("s1", "full")]
    (part,) = cell_path(tmp_path, "LlamaForCausalLM", "toy", "full").parent.glob("full.part-*-0.jsonl")
    with part.open("a") as stream:
        stream.write('\n{"cell": "half a li')
    Toy.asked.clear()
    full, packed = run(model, tmp_path, Toy())
    assert Toy.asked == [("s1", "packed"), ("s2", "full"), ("s2", "packed")]
    assert (full.samples, packed.samples) == (3, 3)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_failure_ends_its_cell_alone(model: LlamaForCausalLM, tmp_path: Path) -> None:
    def refuse(model: PreTrainedModel) -> Cache:
        raise ValueError("bits=9 for turboquant: allowed 1–6")

    misfit = dataclasses.replace(PACKED, name="misfit", make=refuse)
    sound = dataclasses.replace(PACKED, name="sound")
    full, packed, refused, whole = run(model, tmp_path, Toy(fails="packed"), PACKED, misfit, sound)
    assert (full.error, full.samples) == (None, 3)
    assert (whole.error, whole.samples) == (None, 3), "it went through the model with those that fail"
    assert packed.error == "out of memory: Tried to allocate 80 GiB"
    assert refused.error == "bits=9 for turboquant: allowed 1–6"
    assert (refused.scores, refused.score) == ({}, None)
    assert len(Toy.asked) == 6, "a failed cell is not tried with the next sample"
    assert {cell.error is None for cell in read_cells(tmp_path)} == {True, False}


def test_a_failed_cell_is_tried_again(model: LlamaForCausalLM, tmp_path: Path) -> None:
    broken = dataclasses.replace(PACKED, make=lambda model: {}["no"])
    _, failed = run(model, tmp_path, Toy(), broken)
    assert failed.error == "KeyError: 'no'"
    Toy.asked.clear()
    assert run(model, tmp_path, Toy())[1].error is None
    assert Toy.asked == [(f"s{number}", "packed") for number in range(3)]


def test_missing_data(model: LlamaForCausalLM, tmp_path: Path) -> None:
    class Nowhere(Toy):
        def samples(self, model: PreTrainedModel, tokenizer: Any) -> list[Sample]:
            raise FileNotFoundError("no file data.jsonl")

    done = run(model, tmp_path, Toy())
    assert run(model, tmp_path, Nowhere()) == done, "what is finished stays"
    for cell in run(model, tmp_path / "new", Nowhere()):
        assert cell.error == "no file data.jsonl"
    assert [cell.error for cell in run(model, None, Toy(count=0))] == ["benchmark toy: no samples"] * 2
    long = run(model, None, Toy(tokens=5000))
    assert [cell.error for cell in long] == [
        "prompt and continuation of 5005 tokens: allowed 4096, the model's max_position_embeddings"
    ] * 2


def test_nothing_compressed_is_a_failure(model: LlamaForCausalLM) -> None:
    full, packed = run(model, None, Toy(tokens=12))
    assert full.error is None
    assert "nothing was compressed" in packed.error


class Thread:
    """One of two processes, as a thread."""

    count = 2
    device = torch.device("cpu")

    def __init__(self, index: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.index, self.barrier, self.board = index, barrier, board

    def gather(self, item: Any) -> list[Any]:
        self.board[self.index] = item
        self.barrier.wait(60)
        items = list(self.board)
        self.barrier.wait(60)
        return items


def in_two(model: LlamaForCausalLM, output: Path, benchmarks: Sequence[Toy]) -> list[list[Cell]]:
    """Run a benchmark in each of two processes, each with a model of its own, and return the cells of both."""
    barrier, board = threading.Barrier(2), [None, None]
    models = [model, copy.deepcopy(model)]

    def work(index: int) -> list[Cell]:
        return run(models[index], output, benchmarks[index], processes=Thread(index, barrier, board))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


def test_two_processes_share_the_samples(model: LlamaForCausalLM, tmp_path: Path) -> None:
    alone = run(model, tmp_path / "one", Toy())
    Toy.asked.clear()
    results = in_two(model, tmp_path / "two", [Toy(), Toy()])
    assert sorted(Toy.asked) == sorted((f"s{number}", name) for number in range(3) for name in ("full", "packed"))
    for cells in (*results, [Cell.read(path) for path in sorted((tmp_path / "two").glob("*/*/*.json"))]):
        assert [cell.scores for cell in cells] == [cell.scores for cell in alone]
        assert [[record["id"] for record in cell.records] for cell in cells] == [["s0", "s1", "s2"]] * 2


def test_data_that_one_process_cannot_read_fails_for_all(model: LlamaForCausalLM, tmp_path: Path) -> None:
    class Nowhere(Toy):
        def samples(self, model: PreTrainedModel, tokenizer: Any) -> list[Sample]:
            raise FileNotFoundError("no file data.jsonl")

    for cells in in_two(model, tmp_path, [Toy(), Nowhere()]):
        assert [cell.error for cell in cells] == ["no file data.jsonl"] * 2
    assert Toy.asked == []


def test_two_runs_on_one_folder(model: LlamaForCausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second run waits for the first, and reuses its cells."""
    second: list[Future[list[Cell]]] = []

    def start_another(done: int, total: int, label: str) -> None:
        if done == 3:
            second.append(pool.submit(run, model, tmp_path, Toy()))
            while not second[0].done() and "another run is using this folder" not in caplog.text:
                time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        first = run(model, tmp_path, Toy(), on_progress=start_another)
        assert second[0].result() == first
    assert [(cell.error, cell.samples) for cell in first] == [(None, 3)] * 2
    assert {cell.cache["name"]: cell for cell in read_cells(tmp_path)} == {cell.cache["name"]: cell for cell in first}
    assert len(Toy.asked) == 6
    assert str(tmp_path / "LlamaForCausalLM" / "toy") in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".json"]


def test_any_text_survives_an_interruption(model: LlamaForCausalLM, tmp_path: Path) -> None:
    class Odd(Toy):
        def score(self, run: CacheRun, sample: Sample, tokenizer: Any) -> Record:
            return super().score(run, sample, tokenizer) | {"text": "a\u2028b\u0085c\x0c 中"}

    def interrupt(done: int, total: int, label: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, Odd(), on_progress=interrupt)
    for part in tmp_path.rglob("*.jsonl"):
        part.write_bytes(part.read_bytes() + b'\n{"record": {"id": "\xe4\xb8')
    Toy.asked.clear()
    cells = run(model, tmp_path, Odd())
    assert [cell.samples for cell in cells] == [3, 3]
    assert len(Toy.asked) == 3
    assert {cell.records[0]["text"] for cell in read_cells(tmp_path)} == {"a\u2028b\u0085c\x0c 中"}


def test_scores_that_fail_end_their_cells(model: LlamaForCausalLM, tmp_path: Path) -> None:
    class Broken(Toy):
        def summarize(self, records: Sequence[Record]) -> dict[str, float]:
            return {"mean": float("nan")}

    for cell in run(model, tmp_path, Broken()):
        assert "scores that are not finite" in cell.error
        assert len(cell.records) == 3
    assert [cell.error for cell in run(model, tmp_path, Toy())] == [None, None], "the records were kept"
    assert len(Toy.asked) == 6


def test_a_file_that_is_no_cell_is_left_alone(model: LlamaForCausalLM, tmp_path: Path) -> None:
    run(model, tmp_path, Toy())
    path = cell_path(tmp_path, "LlamaForCausalLM", "toy", "packed")
    path.write_text("{")
    full, packed = run(model, tmp_path, Toy())
    assert full.error is None
    assert "not a cell of a comparison" in packed.error
    assert path.read_text() == "{"


def test_a_failure_of_all_cells_ends_the_prefills(model: LlamaForCausalLM) -> None:
    def refuse(model: PreTrainedModel) -> Cache:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    labels: list[str] = []
    broken = dataclasses.replace(PACKED, name="full", make=refuse)
    runner = Runner(model, None, on_progress=lambda done, total, label: labels.append(label))
    (cell,) = runner.run("toy", Toy(), [broken])
    assert cell.error.startswith("out of memory: DefaultCPUAllocator")
    assert labels == ["toy s0", "toy s0, full", "toy"]


def test_samples_of_one_prompt_share_its_prefill(model: LlamaForCausalLM) -> None:
    made: list[str] = []

    def make(model: PreTrainedModel) -> Cache:
        made.append("cache")
        return PACKED.make(model)

    _, packed = run(model, None, Toy(same_prompt=True), dataclasses.replace(PACKED, make=make))
    assert made == ["cache"]
    assert [record["prefill_seconds"] > 0 for record in packed.records] == [True, False, False]
    assert len({record["value"] for record in packed.records}) == 3, "the questions differ"
    run(model, None, Toy(), dataclasses.replace(PACKED, make=make))
    assert made == ["cache"] * 4


def test_equal_names_are_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="caches: full more than once; allowed are distinct names"):
        run(model, None, Toy(), full_cache())
    with pytest.raises(ValueError, match="caches: a b, a/b more than once"):
        run(model, None, Toy(), dataclasses.replace(PACKED, name="a/b"), dataclasses.replace(PACKED, name="a b"))
    same = run(model, None, Toy(count=2, ids=("x", "x")))
    assert [cell.error for cell in same] == [
        "benchmark toy: ids of samples: x more than once; allowed are distinct names"
    ] * 2


def test_kinds_are_registered_once() -> None:
    make_benchmark("perplexity", {})
    with pytest.raises(ValueError, match="benchmark='perplexity': already registered"):
        register_benchmark("perplexity")(Toy)


def test_files_that_are_no_cells(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished cell in it"):
        read_cells(tmp_path)
    path = tmp_path / "model" / "toy" / "full.json"
    path.parent.mkdir(parents=True)
    for content in ("{", json.dumps({"model": "m"}), json.dumps([1])):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"full\.json: not a cell of a comparison"):
            read_cells(tmp_path)


def test_names_become_files() -> None:
    path = cell_path(Path("out"), "org/Model-1.5B", "needle", "mine@sinks=0,recent=0")
    assert path == Path("out/org-Model-1.5B/needle/mine@sinks=0,recent=0.json")
    assert cell_path(Path("out"), "../../etc", "a/b", "../x").parts[:1] == ("out",)
    assert ".." not in cell_path(Path("out"), "../../etc", "a/b", "../x").parts
