"""Scripts of `benchmarks/`: timing on the CPU, models that are hard to code, public data, counts of the kernels."""

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import fetch_data
import kernel_counts
import outlier_model
import pytest
import texts
import torch
import typer
from cpu import measure_steps
from support.models.fake_hub import FakeHub
from support.models.saved_model import saved_model
from support.models.small_model import VOCAB, small_model
from support.paths import ROOT
from support.recorded_paths import record_paths
from transformers import Cache, DynamicCache, PreTrainedModel
from typer.testing import CliRunner

from kvcache_compress.eval.caches.caches import CacheSpec, full_cache
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.files.text import read_yaml
from kvcache_compress.modeling.loading import load_model

IDS = torch.arange(40)[None]


def test_outlier_channels_change_keys_and_nothing_else(tmp_path: Path) -> None:
    outlier_model.main(tmp_path, model=saved_model(), factor=64.0, pair=[0, 3])
    (plain, _), (hard, tokenizer) = load_model(saved_model()), load_model(str(tmp_path))
    assert len(tokenizer) > 1
    with torch.inference_mode():
        before, after = plain(IDS, use_cache=True), hard(IDS, use_cache=True)
    torch.testing.assert_close(after.logits, before.logits, atol=1e-4, rtol=1e-4)
    keys, others = after.past_key_values.layers[0].keys, before.past_key_values.layers[0].keys
    dim = keys.shape[-1]
    factors = torch.ones(dim)
    factors[[0, 3, dim // 2, 3 + dim // 2]] = 64.0
    torch.testing.assert_close(keys, others * factors, atol=1e-3, rtol=1e-4)


def test_large_means_change_scores_little(tmp_path: Path) -> None:
    """The mean of the keys at the slowest pairs is the bias; attention hardly changes, as all scores do alike."""
    outlier_model.main(tmp_path, model=saved_model(), factor=1.0, bias=50.0)
    (plain, _), (hard, _) = load_model(saved_model()), load_model(str(tmp_path))
    with torch.inference_mode():
        before, after = plain(IDS, use_cache=True), hard(IDS, use_cache=True)
    assert after.logits.isfinite().all()
    assert not torch.equal(after.logits, before.logits)
    moved = after.past_key_values.layers[0].keys - before.past_key_values.layers[0].keys
    dim = moved.shape[-1]
    slow = torch.zeros(dim, dtype=torch.bool)
    slow[dim // 2 - 2 : dim // 2] = slow[dim - 2 :] = True
    assert moved[..., ~slow].abs().max() < 1e-4
    lengths = moved[..., slow].square().sum(-1).sqrt()
    torch.testing.assert_close(lengths, torch.full_like(lengths, 50.0 * 2**0.5), rtol=1e-3, atol=0)


NAMES = [line.split()[1] for line in fetch_data.DIGESTS.read_text().splitlines()]
script = typer.Typer()
script.command()(fetch_data.main)


def test_data_that_are_there_stay(tmp_path: Path) -> None:
    for name in NAMES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    done = CliRunner().invoke(script, ["--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.count("not the version of the committed results") == len(NAMES)
    assert {(tmp_path / name).read_text() for name in NAMES} == {"mine"}


def test_rows_of_the_hub_become_the_files_byte_for_byte(hub: FakeHub, tmp_path: Path) -> None:
    text = "Title \n \n a line \n"
    hub.dataset = [{"text": line if line.strip() else ""} for line in text.splitlines(keepends=True)]
    assert fetch_data.wikitext("") == text
    hub.dataset = [{"answer": "ü", "question": f"{number}", "more": 1} for number in range(500)]
    lines = fetch_data.gsm8k("").splitlines()
    assert (len(lines), lines[0]) == (400, '{"question": "0", "answer": "\\u00fc"}')
    hub.folder = tmp_path
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for name in ("multi_news", "multifieldqa_zh"):
            rows = (f'{{"context": "\\u00fc", "_id": {number}}}\n' for number in range(200))
            archive.writestr(f"data/{name}.jsonl", "".join(rows))
    for name, count in (("multi_news", 60), ("multifieldqa_zh", 20)):
        lines = fetch_data.longbench(f"data/longbench/{name}.jsonl").splitlines()
        assert (len(lines), lines[0]) == (count, '{"context": "ü", "_id": 0}')


def test_comparisons_name_only_files_that_can_be_brought() -> None:
    made = {f"texts/compare/{kind}.txt" for kind in ("essays", "news", "code", "mathematics", "help")}
    held_out = ("code", "help", "reference", "numpy", "chinese", "licences")
    made |= {f"texts/held-out/{kind}.txt" for kind in held_out} | {"texts/gsm8k.jsonl", "texts/multi_news.jsonl"}
    for path in sorted((ROOT / "benchmarks" / "comparisons").glob("*.yaml")):
        for options in read_yaml(path)["benchmarks"].values():
            named = {*options.get("texts", ()), *([options["data"]] if "data" in options else [])}
            assert named <= {*NAMES, *made}, path


def test_problems_follow_eight_others(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    rows = "".join(f'{{"question": "q{i}?", "answer": "a{i}."}}\n' for i in range(400))
    (tmp_path / texts.SOURCES["mathematics"]).write_text(rows)
    problems = list(texts.problems(tmp_path))
    assert len(problems) == 100
    for row in problems:
        assert row["input"].count("Answer: ") == 8
        assert row["outputs"][0] not in row["input"]


@pytest.fixture(scope="module")
def table() -> kernel_counts.Table:
    return kernel_counts.load()


def test_every_preset_is_counted(table: kernel_counts.Table) -> None:
    assert tuple(table) == kernel_counts.PRESETS
    assert len(kernel_counts.markdown(table).splitlines()) > len(table)


@pytest.mark.parametrize("name", ["turboquant-4bit", "uniform-4bit"])
def test_codes_are_read_once(table: kernel_counts.Table, name: str) -> None:
    """Accesses to global memory touch no more sectors than hold the stored bytes."""
    counts = table[name]["attend_kernel"]
    stored = kernel_counts.stored_bytes(name)
    assert counts["touched"] == counts["needed"] == stored / kernel_counts.SECTOR


class Broken(DynamicCache):
    """Cache that accepts a prompt but fails in steps."""

    def update(self, keys: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        if keys.shape[2] == 1:
            raise RuntimeError("no step")
        return super().update(keys, *args, **kwargs)


def test_every_cache_gets_the_prompt_and_all_steps() -> None:
    model = small_model()
    made: list[Cache] = []

    def watched(name: str) -> CacheSpec:
        spec = resolve_cache(name)

        def make(model: PreTrainedModel) -> Cache:
            made.append(spec.make(model))
            return made[-1]

        return replace(spec, make=make)

    ids = torch.randint(1, VOCAB, (1, 120))
    specs = [watched("full"), watched("turboquant-4bit@sinks=4,recent=8")]
    rows = measure_steps(model, specs, ids, steps=3, prefills=2)
    assert [(row["cache"], row["tokens"], row["error"]) for row in rows] == [(spec.name, 120, None) for spec in specs]
    assert rows[0]["ratio"] == rows[0]["prefill_ratio"] == 1
    assert all(0 < row["step_ms"] < 1e3 * row["decode_seconds"] and row["prefill_seconds"] > 0 for row in rows)
    # Each is warmed up, then each takes the prompt twice, and the steps.
    assert [cache.get_seq_length() for cache in made] == [120] * 4 + [123] * 2
    assert made[-1].packed_tokens > 0


def test_a_cache_that_fails_says_why() -> None:
    broken = replace(full_cache(), name="broken", make=lambda model: Broken())
    full, failed = measure_steps(small_model(), [full_cache(), broken], torch.randint(1, VOCAB, (1, 20)), steps=2)
    assert failed == {"cache": "broken", "tokens": 20, "error": "RuntimeError: no step"}
    assert full["step_ms"] > 0


def test_fused_attention_is_used() -> None:
    spec = resolve_cache("turboquant-4bit@sinks=4,recent=8")
    with record_paths() as taken:
        measure_steps(small_model(), [full_cache(), spec], torch.randint(1, VOCAB, (1, 64)), steps=2)
    assert len(taken) == 2 * 2
    assert {call.path for call in taken} <= {"cpp", "torch"}
