"""The script that times caches on the CPU, with few tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cpu
import pytest
import torch
from cpu import measure_steps
from support.models.small_model import VOCAB, small_model
from support.recorded_paths import record_paths
from transformers import Cache, DynamicCache, PreTrainedModel
from typer.testing import CliRunner

from kvcache_compress.bench.layers import Shape
from kvcache_compress.eval.caches.caches import CacheSpec, full_cache
from kvcache_compress.eval.caches.resolve import resolve_cache


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SHAPE", Shape(4, 2, 64))
    monkeypatch.setattr(cpu, "MLP", 64)


def run(*words: str) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cpu.app, [*words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_caches_share_of_a_prompt(tmp_path: Path) -> None:
    """The cache's share is less than the complete prompt, and larger for a compressed cache than for the full one."""
    output = tmp_path / "share.json"
    run("prompt", "--tokens", "1024", "--turns", "2", "--preset", "turboquant-4bit", "--output", str(output))
    full, ours = json.loads(output.read_text())["rows"]
    assert (full["cache"], full["ratio"], ours["cache"]) == ("full", 1, "turboquant-4bit")
    for row in (full, ours):
        assert 0 < row["update_seconds"] < row["seconds"]
        assert row["share"] >= full["share"]


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
