"""The quality measurement: its arithmetic by hand, its protocol on a tiny model, its command on both."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from kvcache_compress.eval import perplexity
from kvcache_compress.eval.caches import CacheSpec, full_cache, preset_cache
from kvcache_compress.eval.peers import fp8_cache
from kvcache_compress.eval.perplexity import DEFAULT_TEXT, evaluate_caches, resolve_cache
from kvcache_compress.eval.results import PerplexityResult, markdown_table, write_atomically
from kvcache_compress.eval.scoring import compare_logits, cut_windows
from kvcache_compress.models import load_model

WIKITEXT = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "wikitext-2" / "valid.txt"
TEXT = "the quick brown fox jumps over the lazy dog. " * 8
SIZES = {"prefix": 64, "scored": 16, "windows": 3}


class Characters:
    """A tokenizer with a token per character, and one that starts a text if wanted."""

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


@pytest.mark.parametrize("step", [None, 1, 5])
def test_full_cache_against_itself(model: LlamaForCausalLM, step: int | None) -> None:
    full, again = evaluate_caches(model, Characters(), TEXT, [full_again()], step=step, **SIZES).rows
    assert (full.kl, full.top1, full.packed_tokens) == (0.0, 1.0, 0)
    assert (again.kl, again.top1, again.kl_stderr, again.window_kl) == (0.0, 1.0, 0.0, [0.0] * 3)
    assert again.perplexity == full.perplexity


@pytest.mark.parametrize("step", [None, 1, 5])
@torch.inference_mode()
def test_perplexity_is_that_of_one_uncached_pass(model: LlamaForCausalLM, step: int | None) -> None:
    tokenizer = Characters(bos=[3])
    result = evaluate_caches(model, tokenizer, TEXT, [], step=step, **SIZES)
    nll = []
    for window in cut_windows(tokenizer(TEXT, add_special_tokens=False)["input_ids"], bos=[3], **SIZES):
        logits = model(input_ids=window, use_cache=False).logits[0]
        nll.append(torch.nn.functional.cross_entropy(logits[63:-1], window[0, 64:]).item())
    assert (result.prefix, result.windows, result.step) == (64, 3, step or 16)
    assert result.rows[0].perplexity == pytest.approx(math.exp(sum(nll) / 3), rel=1e-5)


def test_continuation_sees_what_the_cache_kept(model: LlamaForCausalLM) -> None:
    class Forgetful(DynamicCache):
        """Keeps nothing of the keys that it is given."""

        def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            return super().update(keys * 0, values, layer_idx, *args, **kwargs)

    spec = dataclasses.replace(full_again(), make=lambda model: Forgetful(config=model.config))
    full, forgetful = evaluate_caches(model, Characters(), TEXT, [spec], **SIZES).rows
    assert forgetful.kl > 0.01
    assert forgetful.top1 < 1
    assert forgetful.kl_stderr is not None
    assert forgetful.kl_stderr > 0
    assert forgetful.kl == pytest.approx(sum(forgetful.window_kl) / 3)
    assert forgetful.perplexity != full.perplexity


def test_fp8_loses_a_little(model: LlamaForCausalLM) -> None:
    _, fp8 = evaluate_caches(model, Characters(), TEXT, [fp8_cache()], **SIZES).rows
    assert fp8.packed_tokens == 64
    assert fp8.packed_bits == pytest.approx(8, abs=0.01)
    assert 0 < fp8.kl < 0.05


def test_preset_packs_all_but_its_windows(model: LlamaForCausalLM) -> None:
    specs = [
        preset_cache("turboquant-4bit", sink_tokens=0, recent_tokens=0, name="bare"),
        preset_cache("turboquant-4bit", sink_tokens=8, recent_tokens=16, name="windows"),
    ]
    _, bare, windows = evaluate_caches(model, Characters(), TEXT, specs, **SIZES).rows
    assert 0 < windows.packed_tokens <= 64 - 8 - 16 < bare.packed_tokens <= 64
    assert 4 <= bare.packed_bits < 8
    assert windows.all_bits > windows.packed_bits
    assert bare.kl > 0
    assert windows.kl > 0


def test_nothing_compressed_is_refused(model: LlamaForCausalLM) -> None:
    spec = dataclasses.replace(full_again(), lossless=False)
    with pytest.raises(ValueError, match="cache='again': nothing is compressed after a prefix of 64 tokens"):
        evaluate_caches(model, Characters(), TEXT, [spec], **SIZES)
    spec = preset_cache("turboquant-4bit", sink_tokens=16, recent_tokens=64)
    with pytest.raises(ValueError, match="cache='turboquant-4bit': nothing is compressed"):
        evaluate_caches(model, Characters(), TEXT, [spec], **SIZES)


def test_logits_that_are_not_finite_are_refused(model: LlamaForCausalLM) -> None:
    class Broken(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            return super().update(keys, values * torch.nan, layer_idx, *args, **kwargs)

    spec = dataclasses.replace(full_again(), make=lambda model: Broken(config=model.config))
    with pytest.raises(ValueError, match="'again': the model's logits are not finite"):
        evaluate_caches(model, Characters(), TEXT, [spec], **SIZES)


@pytest.mark.parametrize(
    ("specs", "step", "message"),
    [([full_cache()], None, "allowed are distinct names"), ([], 17, "step=17: allowed 1 to scored=16")],
)
def test_bad_arguments(model: LlamaForCausalLM, specs: list[CacheSpec], step: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate_caches(model, Characters(), TEXT, specs, step=step, **SIZES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("turboquant-5000bit", r"allowed full, hqq-4.*or a preset: .*turboquant-5000bit"),
        ("turboquant-4bit@sinks", "allowed after @ is sinks=N and recent=N"),
        ("turboquant-4bit@sinks=-1", "allowed after @ is sinks=N and recent=N"),
        ("turboquant-4bit@bits=2", "allowed after @ is sinks=N and recent=N"),
        ("fp8@recent=0", "allowed after @ is nothing"),
        ("full@residual=0", "allowed after @ is nothing"),
    ],
)
def test_bad_cache_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_cache(name)


def test_windows_in_a_name_come_before_the_options(model: LlamaForCausalLM) -> None:
    cache = resolve_cache("turboquant-4bit@recent=0", sink_tokens=8, recent_tokens=32)
    assert cache.name == "turboquant-4bit@recent=0"
    layer = cache.make(model).layers[0]
    assert (layer.plan.sink_tokens, layer.plan.recent_tokens) == (8, 0)


def test_result_as_json_and_markdown(model: LlamaForCausalLM, tmp_path: Path) -> None:
    result = evaluate_caches(model, Characters(), TEXT, [full_again()], text_name="fox", **SIZES)
    path = tmp_path / "result.json"
    path.write_text("older")
    write_atomically(path, result.to_json())
    assert PerplexityResult.from_json(path.read_text()) == result
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    lines = markdown_table(result).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| full | 16.00 | 16.00 | ")
    assert lines[2].endswith(" | 0.0000 ± 0.0000 | 1.000 |")
    assert {line.count("|") for line in lines} == {7}


def test_command(model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "load_model", lambda name, **_: (model, Characters()))
    text = tmp_path / "fox.txt"
    text.write_text(TEXT)
    output = tmp_path / "results" / "fox.json"
    options = ["--prefix", "64", "--scored", "16", "--windows", "2", "--text", str(text), "--output", str(output)]
    ran = CliRunner().invoke(perplexity.app, ["--cache", "full", "--cache", "fp8", *options])
    assert ran.exit_code == 0, ran.output
    assert "[1/4] fp8, window 1 of 2" in ran.stderr
    assert "fp8" in ran.stdout
    written = json.loads(output.read_text())
    assert [row["name"] for row in written["rows"]] == ["full", "fp8"]
    assert written["text"] == f"{tmp_path.name}/fox.txt"
    assert written["versions"]["torch"] == torch.__version__
    assert written["hardware"]["cores"] > 0
    assert written["command"]


def test_command_reports_errors_in_one_line(tmp_path: Path) -> None:
    ran = CliRunner().invoke(perplexity.app, ["--cache", "fp8@sinks=1"])
    assert ran.exit_code == 1
    assert ran.stderr == "error: cache='fp8@sinks=1': allowed after @ is nothing\n"


def test_module_runs_as_a_script() -> None:
    command = [sys.executable, "-m", "kvcache_compress.eval.perplexity", "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--cache" in ran.stdout


def test_default_text_is_long_enough_for_several_windows() -> None:
    assert len(DEFAULT_TEXT.read_text(encoding="utf-8").split()) > 3600


@pytest.mark.slow
@pytest.mark.parametrize("text", [DEFAULT_TEXT, WIKITEXT], ids=["default", "wikitext"])
def test_real_model(text: Path) -> None:
    if not text.exists():
        pytest.skip(f"{text.name} is not here")
    model, tokenizer = load_model()
    content = text.read_text(encoding="utf-8")[:20_000]
    result = evaluate_caches(model, tokenizer, content, [fp8_cache()], prefix=256, scored=64, windows=1)
    full, fp8 = result.rows
    assert 3 < full.perplexity < 60
    assert 0 < fp8.kl < 0.05
    assert fp8.top1 > 0.85
    assert fp8.packed_tokens == 256
