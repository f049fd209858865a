"""Prefixes on disk: found again, continued as stored, and never trusted when damaged."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.saved_model import saved_model
from support.models.small_model import VOCAB, small_model
from transformers import ContinuousBatchingConfig, Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig

from kvcache_compress import PrefixStore, compress
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.serving import prefix_store
from kvcache_compress.serving.engine.allocator import Allocator

CONFIG: dict[str, Any] = {
    "keys": {"method": "spectral", "bits": 4}, "values": {"method": "turboquant", "bits": 4},
    "sink_tokens": 4, "recent_tokens": 8,
}  # fmt: skip
TEXT = torch.randint(1, VOCAB, (1200,), generator=torch.Generator().manual_seed(5))


def prompts(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (1, count), generator=generator) for count in lengths]


@pytest.fixture
def greedy(model: Any) -> Any:
    model.generation_config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
    return model


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch, greedy: Any) -> list[int]:
    """Tokens of each forward pass."""
    counts: list[int] = []
    forward = type(greedy).forward

    def counted(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.append(input_ids.shape[1])
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(greedy), "forward", counted)
    return counts


# `generate`


def test_generate_continues_as_the_stored_cache_would_have(greedy: Any, fed: list[int], tmp_path: Path) -> None:
    """A document with one question, then with another: the second call loads the document."""
    document, first, second = prompts(400, 10, 12)
    with compress(greedy, CONFIG, prefix_store=tmp_path) as compression:
        greedy.generate(torch.cat([document, first], 1))
        stored = compression.last_cache
        stored.crop(400 - int(stored.get_seq_length()))
        fed.clear()
        found = greedy.generate(torch.cat([document, second], 1))
        assert fed[0] == 12
    whole = torch.cat([document, second], 1)
    expected = greedy.generate(whole, attention_mask=torch.ones_like(whole), **{cache_argument(): stored})
    assert torch.equal(found, expected)


def test_a_chat_loads_its_earlier_turns(greedy: Any, fed: list[int], tmp_path: Path) -> None:
    (turn, more) = prompts(200, 9)
    with compress(greedy, CONFIG, prefix_store=PrefixStore(tmp_path)):
        answer = greedy.generate(turn)
    with compress(small_model(), CONFIG, prefix_store=PrefixStore(tmp_path)) as again:  # after a restart
        other = again._model()
        other.generation_config = greedy.generation_config
        fed.clear()
        other.generate(torch.cat([answer, more], 1))
    assert fed[0] == 10  # the last token of the answer was never fed


def test_prompts_that_are_not_one_plain_text_are_left_alone(greedy: Any, tmp_path: Path) -> None:
    (pair,) = prompts(200)
    pair = pair.repeat(2, 1)
    with compress(greedy, CONFIG, prefix_store=tmp_path):
        greedy.generate(pair)
        greedy.generate(pair[:1], num_beams=2)
        greedy.generate(pair[:1], attention_mask=torch.tensor([[0] + [1] * 199]))
        greedy.generate(pair[:1, :40])  # too short to be worth a file's reading
        assert not list(tmp_path.iterdir())
        greedy.generate(pair[:1, :80])
        assert len(list(tmp_path.iterdir())) == 1


def test_another_model_or_config_finds_nothing(greedy: Any, tmp_path: Path) -> None:
    store = PrefixStore(tmp_path)
    (prompt,) = prompts(200)
    with compress(greedy, CONFIG, prefix_store=store) as compression:
        greedy.generate(prompt)
        config = compression.compression
    ids = prompt[0].tolist()
    assert store.get(greedy, config, ids) is not None
    assert store.get(greedy, config.changed(recent_tokens=16), ids) is None
    assert store.get(greedy, config, ids[1:]) is None
    with torch.no_grad():
        greedy.lm_head.weight[0, 0] += 1
    assert store.get(greedy, config, ids) is None


def test_entries_used_longest_ago_go_first(greedy: Any, tmp_path: Path) -> None:
    store = PrefixStore(tmp_path)
    first, second, third = prompts(300, 300, 300)
    with compress(greedy, CONFIG, prefix_store=store) as compression:
        greedy.generate(first)
        size = next(tmp_path.iterdir()).stat().st_size
        store.max_bytes = int(2.5 * size)
        greedy.generate(second)
        time.sleep(0.01)
        assert store.get(greedy, compression.compression, first[0].tolist()) is not None
        time.sleep(0.01)
        greedy.generate(third)
        kept = [store.get(greedy, compression.compression, one[0].tolist()) for one in (first, second, third)]
    assert [one is not None for one in kept] == [True, False, True]


def damage(path: Path, kind: int) -> None:
    """Spoil a file in one of twenty ways."""
    data = bytearray(path.read_bytes())
    if kind < 8:
        data = data[: len(data) * kind // 8]
    elif kind < 16:
        data[len(data) * (kind - 8) // 8] ^= 1 << (kind - 8)
    elif kind == 16:
        data += b"x"
    elif kind == 17:
        data = bytearray(os.urandom(len(data)))
    elif kind == 18:
        data[:8] = (2**62).to_bytes(8, "little")
    else:
        data = bytearray(data.replace(b"tokens", b"tokenz", 1))
    path.write_bytes(data)


Answers = tuple[torch.Tensor, list[int]]


def answers_of(model: Any, folder: Path) -> Answers:
    """Tokens of `generate` and `generate_batch` for one prompt, which store it."""
    model.generation_config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
    (prompt,) = prompts(200)
    with compress(model, CONFIG, memory="400KiB", statistics=TEXT, prefix_store=folder) as compression:
        generated = model.generate(prompt)
        (output,) = model.generate_batch(prompt.tolist()).values()
        compression._call.store.wait()
    assert output.error is None
    return generated, output.generated_tokens


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    folder = tmp_path_factory.mktemp("store")
    answers = answers_of(small_model(), folder)
    assert {path.suffix for path in folder.iterdir()} == {".cache", ".page", ".statistics"}
    return folder, answers


@pytest.mark.parametrize("kind", range(20))
def test_damaged_entries_are_removed_and_made_again(
    model: Any, stored: tuple[Path, Answers], tmp_path: Path, kind: int
) -> None:
    whole, (generated, batched) = stored
    folder = shutil.copytree(whole, tmp_path / "store")
    for path in list(folder.iterdir()):
        damage(path, kind)
    again = answers_of(model, folder)
    assert torch.equal(again[0], generated)
    assert again[1] == batched
    for _ in range(2):  # a page is read only once those before it are found
        answers_of(model, folder)
    for path in whole.iterdir():
        assert (folder / path.name).stat().st_size == path.stat().st_size


@pytest.mark.parametrize("broken", ["missing", "read-only", "full"])
def test_a_folder_that_cannot_be_used_costs_the_hits(
    greedy: Any, tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "store"
    if broken == "missing":
        folder.write_text("a file")
    else:

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(28 if broken == "full" else 30, "no room" if broken == "full" else "read-only")

        monkeypatch.setattr(prefix_store, "save_cache", refuse)
        monkeypatch.setattr(prefix_store, "write_model_file", refuse)
    (prompt,) = prompts(200)
    with compress(greedy, CONFIG, memory="400KiB", statistics=TEXT, prefix_store=folder) as compression:
        greedy.generate(prompt)
        (output,) = greedy.generate_batch(prompt.tolist()).values()
        compression._call.store.wait()
    assert output.error is None
    assert "prefix store" in caplog.text


# Continuous batching


def test_pages_are_found_after_a_restart(
    greedy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests give the same tokens from stored pages as from pages in memory, in a new process' place."""
    document, first, second = (one[0].tolist() for one in prompts(330, 10, 12))
    inputs = [document + first, document + second]
    config = ContinuousBatchingConfig(max_requests_per_batch=2)

    shared: list[int] = []
    acquire = Allocator.acquire_prefix
    monkeypatch.setattr(Allocator, "acquire_prefix", lambda *args: shared.append(acquire(*args)) or shared[-1])

    def answers(model: Any, ids: list[list[int]]) -> list[list[int]]:
        found = []
        with (
            compress(model, CONFIG, memory="1MiB", statistics=TEXT, prefix_store=tmp_path) as compression,
            model.continuous_batching_context_manager(continuous_batching_config=config) as manager,
        ):
            for prompt in ids:
                manager.add_request(prompt, max_new_tokens=8)
                output = manager.get_result(timeout=60)
                assert output.error is None
                found.append(output.generated_tokens)
            compression._call.store.wait()
        return found

    _, from_memory = answers(greedy, inputs)
    assert shared == [0, 4 + 320]
    other = small_model()
    other.generation_config = greedy.generation_config
    caplog.clear()
    (from_disk,) = answers(other, inputs[1:])
    assert shared == [0, 4 + 320, 4 + 320]
    assert from_disk == from_memory
    assert "measuring the statistics" not in caplog.text


KILLS = """
import os, random, signal, sys, time
from pathlib import Path

import torch

from kvcache_compress import CompressedCache, PrefixStore, load_config
from kvcache_compress.modeling.facts import model_facts
from kvcache_compress.modeling.loading import load_model

torch.set_num_threads(1)
model, _ = load_model(sys.argv[1])
store = PrefixStore(sys.argv[2], max_bytes="1MiB")
config = load_config({"keys": "kivi", "values": "kivi", "sink_tokens": 4, "recent_tokens": 8})
facts = model_facts(model.config)
cache = CompressedCache(model.config, config)
with torch.no_grad():
    model(torch.randint(1, 127, (1, 150)), past_key_values=cache)
for kill in range(50):
    child = os.fork()
    if child == 0:
        for count in range(10**6):
            store.put(model, cache, [kill + 1, count, *range(148)])
            store.put_page([f"page-{kill}-{count}"], facts, [1, 2], {"block": torch.zeros(5000)})
    while not list(Path(sys.argv[2]).glob("*.page")):
        time.sleep(0.01)  # the first child may be slow
    time.sleep(random.uniform(0.005, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    held = sum(path.stat().st_size for path in Path(sys.argv[2]).iterdir())
    assert held < 1.2 * 2**20, held
found = [CompressedCache.load(path, model.config) for path in Path(sys.argv[2]).glob("*.cache")]
for one in found:
    assert torch.equal(one.layers[0].keys, cache.layers[0].keys)
print(len(found), len(list(Path(sys.argv[2]).glob("*.page"))))
"""


def test_killed_writers_leave_whole_entries(tmp_path: Path) -> None:
    """A writer is killed 50 times at random moments; every entry that is left is whole and right."""
    run = subprocess.run(
        [sys.executable, "-c", KILLS, saved_model(), tmp_path], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "is removed" not in run.stderr  # nothing was damaged
    caches, pages = map(int, run.stdout.split())
    assert caches > 0
    assert pages > 0


def test_offloaded_weights_are_refused(model: Any, tmp_path: Path) -> None:
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="prefix_store: some weights are offloaded"):
        compress(model, CONFIG, prefix_store=tmp_path)


def test_files_of_others_stay(greedy: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_bytes(bytes(100_000))
    (tmp_path / "folder").mkdir()
    with compress(greedy, CONFIG, prefix_store=PrefixStore(tmp_path, 50_000)):
        for prompt in prompts(200, 200, 200):
            greedy.generate(prompt)
    assert (tmp_path / "thesis.txt").stat().st_size == 100_000
    assert sum(path.stat().st_size for path in tmp_path.glob("*.cache")) <= 50_000


def test_layers_that_cannot_be_cropped_load_whole_prefixes(tmp_path: Path, fed: list[int]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": VOCAB, "sliding_window": 32}
    kinds = ["sliding_attention", "full_attention"]
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds, pad_token_id=None)).eval()
    model.generation_config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
    document, first, second = prompts(200, 10, 12)
    with compress(model, CONFIG, prefix_store=tmp_path) as compression:
        answer = model.generate(torch.cat([document, first], 1))
        model.generate(torch.cat([document, second], 1))
        assert compression.last_cache.get_seq_length() == 200 + 12 + 7
        model.generate(torch.cat([answer, second], 1))
        assert compression.last_cache.get_seq_length() == answer.shape[1] + 12 + 7


def test_a_warming_request_of_one_token_stores_its_pages(greedy: Any, tmp_path: Path) -> None:
    (prompt,) = prompts(200)
    with compress(greedy, CONFIG, memory="400KiB", statistics=TEXT, prefix_store=tmp_path) as compression:
        greedy.generate_batch(prompt.tolist(), max_new_tokens=1)
        compression._call.store.wait()
    assert len(list(tmp_path.glob("*.page"))) == 2


def test_beams_of_the_models_own_config_are_left_alone(greedy: Any, tmp_path: Path) -> None:
    greedy.generation_config.num_beams = 3
    with compress(greedy, CONFIG, prefix_store=tmp_path):
        for _ in range(2):
            greedy.generate(*prompts(200))
    assert not list(tmp_path.iterdir())
