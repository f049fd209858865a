"""Perplexity: its arithmetic, its protocol on a tiny model, and its command; agreement, from generation."""

import dataclasses
import math
import statistics
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.saved_model import saved_model
from support.models.toy_tokenizers import Letters
from transformers import DynamicCache, LlamaForCausalLM
from typer.testing import CliRunner

from kvcache_compress import CompressedCache
from kvcache_compress.cli.evaluate.app import app
from kvcache_compress.eval.caches.caches import CacheSpec, full_cache, preset_cache
from kvcache_compress.eval.caches.peers import fp8_cache
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.runner.table import Cell, read_cells
from kvcache_compress.eval.tasks import perplexity
from kvcache_compress.eval.tasks.perplexity import Agreement, Perplexity
from kvcache_compress.eval.tasks.scoring import compare_tokens, cut_windows

TEXT = "the quick brown fox jumps over the lazy dog. " * 8
SIZES = {"prefix": 64, "scored": 16, "windows": 3}


def test_scores_in_blocks_are_those_of_all_rows_at_once() -> None:
    generator = torch.Generator().manual_seed(1)
    reference, logits = torch.randn(2, 151, 7, generator=generator).unbind()
    targets = torch.randint(7, (150,), generator=generator)
    nll, kl, same = compare_tokens(reference, logits, targets)
    assert torch.equal(same, reference[1:].argmax(-1) == logits[1:].argmax(-1))
    assert nll.mean().item() == pytest.approx(torch.nn.functional.cross_entropy(logits[:-1], targets).item(), rel=1e-5)
    log_q, log_p = logits[1:].log_softmax(-1), reference[1:].log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    assert kl.mean().item() == pytest.approx(expected.item(), rel=1e-5)


def test_records_keep_parts_and_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of 250 tokens, and the 99.9 % quantile over all windows, as from the KL of every token."""
    generator = torch.Generator().manual_seed(0)
    kls = torch.randn(3, 1100, generator=generator, dtype=torch.float64).exp().unbind()
    every = iter(kls)
    monkeypatch.setattr(
        perplexity, "compare_tokens", lambda *_: (torch.ones(1100), next(every), torch.ones(1100, dtype=torch.bool))
    )
    run: Any = SimpleNamespace(prefill=SimpleNamespace(full_logits=lambda *_: None), forced=lambda *_: None)
    records = [perplexity.score_window(run, torch.zeros(1100)) for _ in kls]
    assert records[1]["kl_parts"] == pytest.approx([part.mean().item() for part in kls[1].split(250)], rel=1e-3)
    scores = perplexity.window_scores(records)
    assert scores["kl_999"] == pytest.approx(torch.cat(kls).quantile(0.999).item(), rel=1e-3)
    assert scores["kl"] == pytest.approx(torch.cat(kls).mean().item())


def test_windows_are_spread_from_first_to_last_token() -> None:
    cut = cut_windows(range(100), prefix=6, scored=4, windows=3)
    assert [window.shape for window in cut] == [(1, 10)] * 3
    assert [window[0, 0].item() for window in cut] == [0, 45, 90]
    cut = cut_windows(range(100), prefix=6, scored=4, windows=2, bos=[-1])
    assert [window[0].tolist() for window in cut] == [[-1, *range(9)], [-1, *range(91, 100)]]


def test_short_text_warns_or_is_refused() -> None:
    with pytest.warns(UserWarning, match=r"2 windows of 6 \+ 4 tokens instead of 3"):
        assert len(cut_windows(range(29), prefix=6, scored=4, windows=3)) == 2
    with pytest.warns(UserWarning, match="prefix 5 instead of 6"):
        (window,) = cut_windows(range(9), prefix=6, scored=4, windows=1)
    assert window.shape == (1, 9)
    with pytest.raises(ValueError, match="text of 7 tokens: too short"):
        cut_windows(range(7), prefix=6, scored=4, windows=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "fox.txt"
    path.write_text(TEXT)
    return path


def run(
    model: LlamaForCausalLM, text: Path, *specs: CacheSpec, bos: list[int] | None = None, **options: Any
) -> list[Cell]:
    benchmark = Perplexity(texts=(text,), **{**SIZES, **options})
    return Runner(model, Letters(bos)).run("perplexity", benchmark, [full_cache(), *specs])


@pytest.mark.parametrize("step", [16, 5])
@torch.inference_mode()
def test_perplexity_is_that_of_one_uncached_pass(model: LlamaForCausalLM, text: Path, step: int) -> None:
    full, again = run(model, text, dataclasses.replace(full_cache(), name="again"), bos=[3], step=step)
    nll = []
    ids = Letters([3])(TEXT, add_special_tokens=False)["input_ids"]
    for window in cut_windows(ids, bos=[3], **SIZES):
        logits = model(input_ids=window, use_cache=False).logits[0]
        nll.append(torch.nn.functional.cross_entropy(logits[63:-1], window[0, 64:]).item())
    assert (full.samples, full.records[0]["tokens"]) == (3, 64)
    assert full.scores["perplexity"] == pytest.approx(math.exp(sum(nll) / 3), rel=1e-5)
    assert (again.scores["kl"], again.scores["top1"], again.scores["kl_stderr"]) == (0.0, 1.0, 0.0)


def test_continuation_sees_what_the_cache_kept(model: LlamaForCausalLM, text: Path) -> None:
    class Forgetful(DynamicCache):
        """A cache that forgets its keys."""

        def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            return super().update(keys * 0, values, layer_idx, *args, **kwargs)

    spec = dataclasses.replace(full_cache(), name="forgetful", make=lambda model: Forgetful(config=model.config))
    full, forgetful = run(model, text, spec)
    kl = [record["kl"] for record in forgetful.records]
    assert forgetful.scores["kl"] == pytest.approx(sum(kl) / 3)
    assert forgetful.scores["kl"] > 0.01
    assert forgetful.scores["kl_stderr"] == pytest.approx(statistics.stdev(kl) / math.sqrt(3))
    assert forgetful.scores["perplexity"] != full.scores["perplexity"]


def test_several_texts_are_scored_apart_and_together(model: LlamaForCausalLM, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "b.txt").write_text(TEXT.upper())
    (folder / "a.txt").write_text("0123456789" * 30)
    benchmark = Perplexity(texts=(text, folder), prefix=64, scored=16, windows=2)
    _, fp8 = Runner(model, Letters()).run("perplexity", benchmark, [full_cache(), fp8_cache()])
    domains = [f"{text.parent.name}/fox.txt", f"{tmp_path.name}/other"]
    assert [record["domain"] for record in fp8.records] == [domains[0]] * 2 + [domains[1]] * 2
    kl = [record["kl"] for record in fp8.records]
    assert fp8.scores[f"kl.{domains[1]}"] == pytest.approx(sum(kl[2:]) / 2)
    assert fp8.scores["kl"] == pytest.approx(sum(kl) / 4)
    assert fp8.scores[f"perplexity.{domains[0]}"] != fp8.scores[f"perplexity.{domains[1]}"]


def test_windows_in_a_name(model: LlamaForCausalLM, text: Path) -> None:
    bare, windows = (resolve_cache(f"turboquant-4bit@{sizes}") for sizes in ("sinks=0,recent=0", "sinks=8,recent=16"))
    _, of_bare, of_windows = run(model, text, bare, windows)
    assert 0 < of_windows.packed_tokens["least"] <= 64 - 8 - 16 < of_bare.packed_tokens["least"] <= 64
    assert of_windows.all_bits > of_windows.packed_bits


@pytest.mark.parametrize(
    "name", ["turboquant-5000bit", "turboquant-4bit@sinks", "turboquant-4bit@bits=2", "fp8@recent=0", "full@sinks=0"]
)
def test_bad_cache_names(name: str) -> None:
    with pytest.raises(ValueError, match=f"cache='{name}'"):
        resolve_cache(name)


def test_command(text: Path, tmp_path: Path) -> None:
    sizes = ["--prefix", "64", "--scored", "16", "--windows", "2", "--text", str(text)]
    arguments = ["--cache", "full", "--cache", "fp8", *sizes, "--output", str(tmp_path / "r.jsonl"), "--device", "cpu"]
    ran = CliRunner().invoke(app, ["perplexity", *arguments, "--model", saved_model()])
    assert ran.exit_code == 0, ran.output
    assert "[4/4] perplexity" in ran.stderr
    assert "fp8" in ran.stdout
    cells = read_cells(tmp_path / "r.jsonl")
    assert [cell.cache["name"] for cell in cells] == ["full", "fp8"]
    assert cells[0].benchmark["options"]["texts"] == [f"{text.parent.name}/fox.txt"]
    assert cells[0].versions["torch"] == version("torch")
    assert cells[0].hardware["cores"] > 0
    assert cells[0].command


CONFIG = {side: {"method": "turboquant", "bits": 1} for side in ("keys", "values")} | {
    "sink_tokens": 2,
    "recent_tokens": 4,
}
TOKENS = 24


@torch.no_grad()
def written(model: LlamaForCausalLM, prompt: torch.Tensor, cache: object) -> list[int]:
    ids, step = [], prompt
    for _ in range(TOKENS):
        logits = model(step, **with_cache(cache)).logits[0, -1]
        ids.append(int(logits.argmax()))
        step = torch.tensor([ids[-1:]])
    return ids


@torch.no_grad()
def test_agreement_by_hand(model: LlamaForCausalLM, tmp_path: Path) -> None:
    text = tmp_path / "letters.txt"
    text.write_text("".join(chr(97 + (7 * number * number + number // 5) % 26) for number in range(600)))
    benchmark = Agreement(texts=(text,), prefix=100, scored=TOKENS, windows=3, step=8)
    full, lossy = Runner(model, Letters()).run("agreement", benchmark, [full_cache(), preset_cache(CONFIG, name="low")])
    assert full.scores["same"] == full.scores["same_25"] == TOKENS
    assert full.scores["all"] == 1
    same, logprobs = [], []
    for sample in benchmark.samples(model, Letters()):
        first, second = (
            written(model, sample.prompt, cache)
            for cache in (DynamicCache(config=model.config), CompressedCache(model.config, CONFIG))
        )
        same.append(next((at for at, pair in enumerate(zip(first, second, strict=True)) if len({*pair}) > 1), TOKENS))
        ids = torch.cat([sample.prompt, torch.tensor([second])], 1)
        log_p = model(ids).logits[0, -TOKENS - 1 : -1].log_softmax(-1)
        logprobs.append(log_p.gather(-1, torch.tensor(second)[:, None]).mean().item())
    assert [record["same"] for record in lossy.records] == same
    assert min(same) < TOKENS
    assert lossy.scores["same"] == sorted(same)[1]
    assert lossy.scores["logprob"] == pytest.approx(sum(logprobs) / 3, abs=1e-4)
    assert lossy.packed_tokens["least"] > 0
