"""Turns: what its windows hold, the passes that fill a cache, and figures that are those of a user's own run."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import method_config
from support.models.toy_tokenizers import Letters
from transformers import DynamicCache, LlamaForCausalLM

from kvcache_compress import disable_fused_attention, enable_fused_attention
from kvcache_compress.eval.caches.caches import CacheSpec, full_cache, preset_cache
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.runner.table import Cell
from kvcache_compress.eval.tasks.benchmark import Sample
from kvcache_compress.eval.tasks.scoring import compare_tokens
from kvcache_compress.eval.tasks.turns import Turns

NAMES = ("a.txt", "b.txt", "c.txt")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three texts of 400 tokens. Tokens of each are its own: 0 to 19, 20 to 39, 40 to 59."""
    folder = tmp_path_factory.mktemp("texts")
    for index, name in enumerate(NAMES):
        tokens = (20 * index + (number + number // 20) % 20 for number in range(400))
        (folder / name).write_text("".join(chr(64 + token) for token in tokens))
    return [folder / name for name in NAMES]


def samples(texts: Sequence[Path], bos: list[int] | None = None, **options: Any) -> dict[str, Sample]:
    made = Turns(texts=texts, **{"scored": 8, "step": 4, **options}).samples(None, Letters(bos))
    return {sample.id: sample for sample in made}


def read(sample: Sample) -> list[int]:
    """The whole history."""
    return [*sample.prompt[0].tolist(), *sample.question[0].tolist()]


def test_parts_come_from_different_texts_or_from_one(texts: list[Path]) -> None:
    made = samples(texts, cases=(32, "12+20", "12+20 like"), windows=3)
    assert list(made) == [f"{case}:{window}" for window in range(3) for case in ("32", "12+20", "12+20 like")]
    tokens = [Letters()(text.read_text())["input_ids"] for text in texts]
    for window in range(3):
        whole, unlike, like = (made[f"{case}:{window}"] for case in ("32", "12+20", "12+20 like"))
        assert whole.data["continuation"] == unlike.data["continuation"] == like.data["continuation"]
        assert read(whole) == read(like), "a single part is the parts of one text"
        found = [*read(whole), *whole.data["continuation"]]
        start = window * (400 - 40) // 2
        assert found == tokens[window][start : start + 40]
        assert read(unlike)[12:] == read(whole)[12:]
        assert {token // 20 for token in read(unlike)[:12]} == {(window - 1) % 3}
        assert [Path(name).name for name in unlike.data["texts"]] == [NAMES[window - 1], NAMES[window]]
        assert [Path(name).name for name in like.data["texts"]] == [NAMES[window]] * 2


def test_every_text_is_first_and_last_equally_often(texts: list[Path]) -> None:
    made = samples(texts, cases=("12+20",), windows=6)
    pairs = [tuple(sample.data["texts"]) for sample in made.values()]
    assert len(set(pairs)) == 6, "all pairs"
    for names in zip(*pairs, strict=True):
        assert sorted(names) == sorted(list(dict.fromkeys(names)) * 2)
    spread = samples([*texts, *texts], cases=("12+20",), windows=3)
    assert [Path(sample.data["texts"][1]).name for sample in spread.values()] == ["a.txt", "c.txt", "b.txt"]


def test_windows_do_not_overlap_and_limit_counts_those_of_a_case(texts: list[Path]) -> None:
    options = {"cases": ("40+52 like", "12+20+9"), "windows": 4}
    made = samples(texts, **options)
    taken = [read(made[f"40+52 like:{window}"]) for window in (0, 3)]  # both from the first text
    tokens = Letters()(texts[0].read_text())["input_ids"]
    assert taken == [tokens[:92], tokens[300:392]]
    limited = samples(texts, limit=1, **options)
    assert list(limited) == ["40+52 like:0", "12+20+9:0"]
    assert all(sample.digest == made[name].digest for name, sample in limited.items())


def test_start_tokens_count_as_tokens_of_the_first_part(texts: list[Path]) -> None:
    plain, started = (samples(texts, bos, cases=("12+20",), windows=1)["12+20:0"] for bos in ([], [63]))
    assert read(started) == [63, *read(plain)[1:]]


class Recording(DynamicCache):
    """A cache that records the tokens of each pass, and scales the keys of passes after the first."""

    def __init__(self, factor: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.passes: list[int] = []
        self.factor = factor

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx == 0:
            self.passes.append(keys.shape[2])
        factor = self.factor if len(self.passes) > 1 else 1
        return super().update(keys * factor, values, layer_idx, *args, **kwargs)


def run(model: LlamaForCausalLM, texts: Sequence[Path], *specs: CacheSpec, **options: Any) -> list[Cell]:
    benchmark = Turns(texts=texts, **{"scored": 8, "step": 4, **options})
    return Runner(model, Letters()).run("turns", benchmark, [full_cache(), *specs])


def test_each_part_is_one_pass_and_an_s_part_single_steps(model: LlamaForCausalLM, texts: list[Path]) -> None:
    made: list[Recording] = []

    def make(model: LlamaForCausalLM) -> Recording:
        made.append(Recording(config=model.config))
        return made[-1]

    spec = dataclasses.replace(full_cache(), name="recording", make=make)
    _, cell = run(model, texts, spec, cases=(40, "12+20+9", "12+3s", "3s+12 like"), windows=1)
    assert [cache.passes for cache in made] == [[40, 4, 4], [12, 20, 9, 4, 4], [12, 1, 1, 1, 4, 4], [1, 1, 1, 12, 4, 4]]
    assert [record["tokens"] for record in cell.records] == [40, 41, 15, 15]
    assert cell.scores["kl"] < 1e-9, "no cache, no loss"


def test_scores_are_of_all_windows_and_of_each_case(model: LlamaForCausalLM, texts: list[Path]) -> None:
    spec = dataclasses.replace(full_cache(), name="worse", make=lambda model: Recording(0.5, config=model.config))
    _, cell = run(model, texts, spec, cases=(40, "12+28"), windows=3)
    kl = [record["kl"] for record in cell.records]
    assert [record["case"] for record in cell.records] == ["40", "12+28"] * 3
    assert cell.scores == {
        "kl": pytest.approx(statistics.fmean(kl)),
        "kl_stderr": pytest.approx(statistics.stdev(kl) / math.sqrt(6)),
        "kl.40": pytest.approx(statistics.fmean(kl[::2])),
        "kl_stderr.40": pytest.approx(statistics.stdev(kl[::2]) / math.sqrt(3)),
        "kl.12+28": pytest.approx(statistics.fmean(kl[1::2])),
        "kl_stderr.12+28": pytest.approx(statistics.stdev(kl[1::2]) / math.sqrt(3)),
    }
    assert cell.scores["kl.12+28"] > cell.scores["kl.40"] > 1e-4


@pytest.mark.parametrize("name", ["turboquant", "kivi", "spectral"])
@torch.inference_mode()
def test_figures_are_those_of_a_users_own_run(model: LlamaForCausalLM, texts: list[Path], name: str) -> None:
    """With fused attention on, pass by pass; spectral takes its statistics from the queries."""
    config = method_config(name)
    if name == "spectral":
        config["keys"] = {"method": "spectral", "bits": 3}
    spec = preset_cache(config, name=name)
    options = {"cases": ("60+290+5s",), "windows": 1}
    _, cell = run(model, texts, spec, **options)
    assert model.config._attn_implementation == "sdpa", "the model is left as it was"
    (record,), (sample,) = cell.records, samples(texts, **options).values()
    (ids,) = torch.tensor([read(sample)])
    continuation = torch.tensor(sample.data["continuation"])

    def forced(cache: Any, passes: Sequence[int]) -> torch.Tensor:
        for start, stop in itertools.pairwise(itertools.accumulate(passes, initial=0)):
            last = model(input_ids=ids[None, start:stop], **with_cache(cache), logits_to_keep=1).logits[0]
        sizes.append(spec.measure(cache) if cache is own else None)
        return torch.cat(
            [last, *(model(input_ids=x[None], **with_cache(cache)).logits[0] for x in continuation.split(4))]
        )

    sizes: list[Any] = []
    own = spec.make(model)
    reference = forced(DynamicCache(config=model.config), [355])
    enable_fused_attention(model)
    logits = forced(own, [60, 290, *[1] * 5])
    disable_fused_attention(model)
    _, kl, _ = compare_tokens(reference, logits, continuation)
    assert record["kl"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert record["kl"] > 1e-6
    assert {key: record[key] for key in dataclasses.asdict(sizes[-1])} == dataclasses.asdict(sizes[-1])
    assert record["packed_tokens"] > 60, "sizes are those after the history"


def test_texts_that_do_not_do(model: LlamaForCausalLM, texts: list[Path], tmp_path: Path) -> None:
    for error, given in (
        ("b.txt': 400 tokens are too few for a window of 401; give a longer text", {"cases": ("1+393",)}),
        ("no such file", {"texts": [*texts, tmp_path / "none.txt"]}),
    ):
        (cell,) = run(model, **{"texts": texts[:2], "windows": 2, **given})
        assert error in cell.error
