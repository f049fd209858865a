"""Perplexity: its arithmetic by hand, its protocol on a tiny model, and its command."""

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.saved_model import saved_model
from support.paths import DATA
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from kvcache_compress.eval.caches.caches import CacheSpec, full_cache, preset_cache
from kvcache_compress.eval.caches.peers import fp8_cache
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.cli.app import app
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.runner.table import Cell, read_cells
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT, Perplexity
from kvcache_compress.eval.tasks.scoring import compare_logits, cut_windows
from kvcache_compress.modeling.loading import load_model

WIKITEXT = DATA / "wikitext-2" / "valid.txt"
TEXT = "the quick brown fox jumps over the lazy dog. " * 8
SIZES = {"prefix": 64, "scored": 16, "windows": 3}


class Characters:
    """A tokenizer with a token per character, and an optional start token."""

    def __init__(self, bos: list[int] | None = None) -> None:
        self.bos = bos or []

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [*(self.bos if add_special_tokens else []), *(ord(character) % 64 for character in text)]}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def full_again() -> CacheSpec:
    return dataclasses.replace(full_cache(), name="again")


def test_scores_by_hand() -> None:
    even, uneven = [math.log(0.5)] * 2, [math.log(0.25), math.log(0.75)]
    reference = torch.tensor([even, even, uneven])
    logits = torch.tensor([uneven, uneven, uneven]) + 3.0
    nll, kl, top1 = compare_logits(reference, logits, torch.tensor([1, 0]))
    assert nll == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2)
    # Of the two positions after a fed token, only the first differs.
    assert kl == pytest.approx((0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)) / 2)
    assert top1 == 0.5


def test_scores_in_blocks_are_those_of_all_rows_at_once() -> None:
    generator = torch.Generator().manual_seed(1)
    reference, logits = torch.randn(2, 151, 7, generator=generator).unbind()
    targets = torch.randint(7, (150,), generator=generator)
    nll, kl, _ = compare_logits(reference, logits, targets)
    assert nll == pytest.approx(torch.nn.functional.cross_entropy(logits[:-1], targets).item(), rel=1e-5)
    log_q, log_p = logits[1:].log_softmax(-1), reference[1:].log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    assert kl == pytest.approx(expected.item(), rel=1e-5)


def test_windows_are_spread_from_first_to_last_token() -> None:
    cut = cut_windows(range(100), prefix=6, scored=4, windows=3)
    assert [window.shape for window in cut] == [(1, 10)] * 3
    assert [window[0, 0].item() for window in cut] == [0, 45, 90]
    assert [window[0, 0].item() for window in cut_windows(range(30), prefix=6, scored=4, windows=3)] == [0, 10, 20]


def test_windows_start_with_the_start_token() -> None:
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
    with pytest.raises(ValueError, match="windows=0: allowed at least 1"):
        cut_windows(range(100), prefix=6, scored=4, windows=0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "fox.txt"
    path.write_text(TEXT)
    return path


def run(
    model: LlamaForCausalLM, text: Path, *specs: CacheSpec, bos: list[int] | None = None, **options: Any
) -> list[Cell]:
    benchmark = Perplexity(texts=(text,), **{**SIZES, **options})
    return Runner(model, Characters(bos)).run("perplexity", benchmark, [full_cache(), *specs])


@pytest.mark.parametrize("step", [16, 1, 5])
def test_full_cache_against_itself(model: LlamaForCausalLM, text: Path, step: int) -> None:
    full, again = run(model, text, full_again(), step=step)
    assert (full.scores["kl"], full.scores["top1"], full.packed_tokens["most"]) == (0.0, 1.0, 0)
    assert (again.scores["kl"], again.scores["top1"], again.scores["kl_stderr"]) == (0.0, 1.0, 0.0)
    assert [record["kl"] for record in again.records] == [0.0] * 3
    assert again.scores["perplexity"] == full.scores["perplexity"]


@pytest.mark.parametrize("step", [16, 1, 5])
@torch.inference_mode()
def test_perplexity_is_that_of_one_uncached_pass(model: LlamaForCausalLM, text: Path, step: int) -> None:
    (full,) = run(model, text, bos=[3], step=step)
    nll = []
    ids = Characters([3])(TEXT, add_special_tokens=False)["input_ids"]
    for window in cut_windows(ids, bos=[3], **SIZES):
        logits = model(input_ids=window, use_cache=False).logits[0]
        nll.append(torch.nn.functional.cross_entropy(logits[63:-1], window[0, 64:]).item())
    assert (full.samples, full.benchmark["options"]["step"], full.records[0]["tokens"]) == (3, step, 64)
    assert full.scores["perplexity"] == pytest.approx(math.exp(sum(nll) / 3), rel=1e-5)


def test_continuation_sees_what_the_cache_kept(model: LlamaForCausalLM, text: Path) -> None:
    class Forgetful(DynamicCache):
        """A cache that forgets its keys."""

        def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            return super().update(keys * 0, values, layer_idx, *args, **kwargs)

    spec = dataclasses.replace(full_again(), make=lambda model: Forgetful(config=model.config))
    full, forgetful = run(model, text, spec)
    assert forgetful.scores["kl"] > 0.01
    assert forgetful.scores["top1"] < 1
    kl = [record["kl"] for record in forgetful.records]
    assert forgetful.scores["kl"] == pytest.approx(sum(kl) / 3)
    assert forgetful.scores["kl_stderr"] == pytest.approx(statistics.stdev(kl) / math.sqrt(3))
    assert forgetful.scores["perplexity"] != full.scores["perplexity"]


def test_several_texts_are_scored_apart_and_together(model: LlamaForCausalLM, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "b.txt").write_text(TEXT.upper())
    (folder / "a.txt").write_text("0123456789" * 30)
    benchmark = Perplexity(texts=(text, folder), prefix=64, scored=16, windows=2)
    _, fp8 = Runner(model, Characters()).run("perplexity", benchmark, [full_cache(), fp8_cache()])
    domains = [f"{text.parent.name}/fox.txt", f"{tmp_path.name}/other"]
    assert [record["domain"] for record in fp8.records] == [domains[0]] * 2 + [domains[1]] * 2
    kl = [record["kl"] for record in fp8.records]
    assert fp8.scores[f"kl.{domains[1]}"] == pytest.approx(sum(kl[2:]) / 2)
    assert fp8.scores["kl"] == pytest.approx(sum(kl) / 4)
    assert fp8.scores[f"perplexity.{domains[0]}"] != fp8.scores[f"perplexity.{domains[1]}"]


def test_preset_packs_all_but_its_windows(model: LlamaForCausalLM, text: Path) -> None:
    bare = preset_cache("turboquant-4bit", sink_tokens=0, recent_tokens=0, name="bare")
    windows = preset_cache("turboquant-4bit", sink_tokens=8, recent_tokens=16, name="windows")
    _, of_bare, of_windows = run(model, text, bare, windows)
    assert 0 < of_windows.packed_tokens["least"] <= 64 - 8 - 16 < of_bare.packed_tokens["least"] <= 64
    assert 4 <= of_bare.packed_bits < 8
    assert of_windows.all_bits > of_windows.packed_bits
    assert of_bare.scores["kl"] > 0
    assert of_windows.scores["kl"] > 0


def test_logits_that_are_not_finite_are_refused(model: LlamaForCausalLM, text: Path) -> None:
    class Broken(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            return super().update(keys, values * torch.nan, layer_idx, *args, **kwargs)

    spec = dataclasses.replace(full_again(), make=lambda model: Broken(config=model.config))
    full, broken = run(model, text, spec)
    assert full.error is None
    assert broken.error == "cache='again': the model's logits are not finite"


def test_bad_texts(model: LlamaForCausalLM, text: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    folder = tmp_path / "empty"
    folder.mkdir()
    for path, message in (
        (tmp_path / "nowhere.txt", "no such file"),
        (tmp_path / "bytes.txt", "not text in UTF-8"),
        (folder, "no .txt file in the folder"),
    ):
        (full,) = run(model, path)
        assert message in full.error


@pytest.mark.parametrize(
    "name",
    ["turboquant-5000bit", "turboquant-4bit@sinks", "turboquant-4bit@bits=2", "fp8@recent=0", "full@residual=0"],
)
def test_bad_cache_names(name: str) -> None:
    with pytest.raises(ValueError, match=f"cache='{name}'"):
        resolve_cache(name)


def test_windows_in_a_name_come_before_the_options(model: LlamaForCausalLM) -> None:
    cache = resolve_cache("turboquant-4bit@recent=0", sink_tokens=8, recent_tokens=32)
    assert cache.name == "turboquant-4bit@recent=0"
    layer = cache.make(model).layers[0]
    assert (layer.plan.sink_tokens, layer.plan.recent_tokens) == (8, 0)


def test_command(text: Path, tmp_path: Path) -> None:
    sizes = ["--prefix", "64", "--scored", "16", "--windows", "2", "--text", str(text)]
    arguments = ["--cache", "full", "--cache", "fp8", *sizes, "--output", str(tmp_path / "r.jsonl"), "--device", "cpu"]
    arguments += ["--model", saved_model()]
    ran = CliRunner().invoke(app, ["perplexity", *arguments])
    assert ran.exit_code == 0, ran.output
    assert "[4/4] perplexity" in ran.stderr
    assert "fp8" in ran.stdout
    cells = read_cells(tmp_path / "r.jsonl")
    assert [cell.cache["name"] for cell in cells] == ["full", "fp8"]
    assert cells[0].benchmark["options"]["texts"] == [f"{text.parent.name}/fox.txt"]
    assert cells[0].versions["torch"] == torch.__version__
    assert cells[0].hardware["cores"] > 0
    assert cells[0].command


@pytest.mark.slow
@pytest.mark.parametrize("source", [DEFAULT_TEXT, WIKITEXT], ids=["default", "wikitext"])
def test_real_model(source: Path, tmp_path: Path) -> None:
    if not source.exists():
        pytest.skip(f"{source.name} is not here")
    short = tmp_path / "short.txt"
    short.write_text(source.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    benchmark = Perplexity(texts=(short,), prefix=256, scored=64, windows=1)
    full, fp8 = Runner(*load_model()).run("perplexity", benchmark, [full_cache(), fp8_cache()])
    assert 3 < full.scores["perplexity"] < 60
    assert 0 < fp8.scores["kl"] < 0.05
    assert fp8.scores["top1"] > 0.85
    assert fp8.packed_tokens["least"] == 256
