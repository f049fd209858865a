"""Calibration of CommVQ: collected states, the file, and refused arguments."""

from __future__ import annotations

import re
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cache_name import with_cache
from support.models.saved_model import saved_model
from torch.nn.functional import normalize
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache
from typer.testing import CliRunner

from kvcache_compress import disable_fused_attention, enable_fused_attention
from kvcache_compress.cache.by_method import CommVQCache
from kvcache_compress.cli import app
from kvcache_compress.cli import calibrate as command
from kvcache_compress.codecs.base import SIDES
from kvcache_compress.files.lock import only_one
from kvcache_compress.methods.commvq import additive
from kvcache_compress.methods.commvq.calibration import CommVQSettings, calibrate_commvq
from kvcache_compress.methods.commvq.calibration import calibrate as commvq
from kvcache_compress.methods.commvq.calibration.calibrate import Report, split_windows
from kvcache_compress.methods.commvq.calibration.collect import collect, read_layer
from kvcache_compress.methods.commvq.calibration.em import Schedule
from kvcache_compress.methods.commvq.calibration.encoder import EncoderSchedule, encoder_bits
from kvcache_compress.methods.commvq.codebook_file import read_codebooks
from kvcache_compress.modeling.calibration.text import read_windows
from kvcache_compress.modeling.decoder import cache_argument

LAYERS, HEADS, HEAD_DIM, CONTEXT = 3, 2, 16, 64
SHORT = Schedule(soft_steps=2, soft_vectors=128, hard_steps=2, hard_vectors=512, full_steps=1)
SETTINGS: dict[str, Any] = {"tokens": 576, "context": CONTEXT, "centres": 8, "schedule": SHORT}


class Characters:
    """Tokenizer with a token per character, and one at the start of a text."""

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [*([3] if add_special_tokens else []), *(ord(character) % 64 for character in text)]}


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(32 + (i * i + i // 7) % 90) for i in range(1000)))
    return [str(path)]


def calibrate(
    model: Any, text: list[str], output: Path, report: Report = lambda doing, done, total: None, **changes: Any
) -> None:
    """Run a calibration with short settings."""
    settings = CommVQSettings(**SETTINGS | changes)
    calibrate_commvq(model, Characters(), text, output, settings, report=report)  # type: ignore[arg-type]


def test_keys_are_collected_before_rope(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Collected keys equal the key projection, whose halves are real and imaginary parts in this model."""
    windows = torch.randint(64, (3, CONTEXT), generator=torch.Generator().manual_seed(0))
    projected, values = [], []
    attention = model.model.layers[1].self_attn
    attention.k_proj.register_forward_hook(lambda module, given, output: projected.append(output[0]))
    attention.v_proj.register_forward_hook(lambda module, given, output: values.append(output[0]))
    collect(model, windows, tmp_path, [1])
    real, imaginary = torch.cat(projected).view(-1, HEADS, HEAD_DIM).transpose(0, 1).chunk(2, -1)
    found = read_layer(tmp_path, 1, "keys", HEADS, HEAD_DIM).float()
    assert found.shape == (HEADS, 3 * CONTEXT, HEAD_DIM)
    torch.testing.assert_close(found[..., ::2], real, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found[..., 1::2], imaginary, atol=2e-3, rtol=2e-3)
    expected = torch.cat(values).view(-1, HEADS, HEAD_DIM).transpose(0, 1)
    torch.testing.assert_close(read_layer(tmp_path, 1, "values", HEADS, HEAD_DIM), expected.half())


def test_collecting_holds_one_window(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Only one window's cache is alive at a time."""
    alive, most = weakref.WeakSet[DynamicCache](), [0]

    def count(module: Any, given: Any, options: dict[str, Any]) -> None:
        alive.add(options[cache_argument()])
        most.append(len(alive))
        assert options["input_ids"].shape == (1, CONTEXT)

    model.model.register_forward_pre_hook(count, with_kwargs=True)
    collect(model, torch.zeros(20, CONTEXT, dtype=torch.long), tmp_path, [0, 2])
    assert len(most) == 21
    assert max(most) <= 2  # the last window's cache is freed when the next one gets its name
    numbers = 20 * CONTEXT * HEADS
    of_layer = 2 * numbers * HEAD_DIM * torch.float16.itemsize
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == 2 * of_layer


@pytest.mark.parametrize("values", ["residual", "encoder"])
def test_a_file_that_the_cache_takes(model: LlamaForCausalLM, text: list[str], tmp_path: Path, values: str) -> None:
    output = tmp_path / "books.safetensors"
    calibrate(model, text, output, values=values, encoder=EncoderSchedule(steps=20, batch=64), centres=16)
    header = read_codebooks(str(output))
    assert (header.facts.layers, header.facts.kv_heads, header.facts.head_dim) == (LAYERS, HEADS, HEAD_DIM)
    assert header.header["options"]["bits"] == 2
    assert (header.header["data"]["windows"], header.header["data"]["held_out_windows"]) == (8, 1)
    assert set(header.header["losses"]) == {str(layer) for layer in range(LAYERS)}
    cache = CommVQCache(model.config, codebooks=output, sink_tokens=2, recent_tokens=4)
    model(input_ids=torch.arange(48)[None], **with_cache(cache))
    assert cache.packed_tokens == 32  # of 42 outside sinks and window, in blocks of 32
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "books.safetensors"}


def test_windows_are_held_out() -> None:
    """Held out is one window in eight, evenly spread, and at least one; each window is in one of both sets."""
    for count, held_out in ((2, [1]), (8, [7]), (15, [14]), (18, [8, 17]), (54, [8, 17, 26, 35, 44, 53])):
        trained, others = split_windows(torch.arange(count)[:, None])
        assert others.flatten().tolist() == held_out
        assert sorted([*trained.flatten().tolist(), *held_out]) == list(range(count))


def own_search(file: dict[str, torch.Tensor], side: str, states: torch.Tensor) -> list[float]:
    """Mean squared error of a layer's normalized states, per head or of the encoder's tokens, by the stored tensors."""
    own = {name.removeprefix(f"{side}."): tensor.float() for name, tensor in file.items() if name.startswith(side)}
    if "codebook" in own:
        tokens = normalize(states.float().transpose(0, 1).flatten(1), dim=-1)
        return [(tokens - encoder_bits(own, tokens) @ own["codebook"]).square().sum(-1).mean().item()]
    x, books = normalize(states.float(), dim=-1), own["codebooks"][:, 0]
    if side.startswith("keys"):
        decoded = additive.complex_decode(additive.complex_encode(x.unflatten(-1, (-1, 2)), books), books).flatten(-2)
    else:
        decoded = additive.real_decode(additive.real_encode(x, books), books)
    return [head.item() for head in (x - decoded).square().sum(-1).mean(-1)]


@pytest.mark.parametrize("values", ["residual", "encoder"])
def test_losses_of_what_was_held_out(model: LlamaForCausalLM, text: list[str], tmp_path: Path, values: str) -> None:
    """Held-out losses equal those of the codec's search, on windows that took no part in training."""
    output = tmp_path / "books.safetensors"
    schedule = EncoderSchedule(steps=200, batch=64)
    calibrate(model, text, output, values=values, encoder=schedule, key_rounds=4, value_rounds=4)
    file, losses = load_file(output), read_codebooks(str(output)).header["losses"]["1"]
    windows, _ = read_windows(text, Characters(), 576, CONTEXT)  # type: ignore[arg-type]
    collect(model, windows[:8], tmp_path / "trained", [1])
    collect(model, windows[8:], tmp_path / "held-out", [1])
    for side in SIDES:
        for folder, kind in (("trained", "rounds"), ("held-out", "held_out")):
            states = read_layer(tmp_path / folder, 1, side, HEADS, HEAD_DIM)
            found = losses[side].get(kind, losses[side].get("encoder"))
            ends = [found] if isinstance(found, float) else [head[-1] for head in found]
            assert ends == pytest.approx(own_search(file, f"{side}.1", states), rel=2e-3)


def test_calibration_is_repeatable(model: LlamaForCausalLM, text: list[str], tmp_path: Path) -> None:
    """Two runs with one seed write equal files, and another seed other codebooks."""
    files = []
    for seed in (0, 0, 1):
        calibrate(model, text, tmp_path / "books.safetensors", seed=seed)
        files.append(load_file(tmp_path / "books.safetensors"))
    one, again, other = files
    assert len(one) == 2 * LAYERS
    assert all(torch.equal(one[name], again[name]) and not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("groups", [2, 8])
def test_groups_and_centres(model: LlamaForCausalLM, text: list[str], tmp_path: Path, groups: int) -> None:
    output = tmp_path / "books.safetensors"
    calibrate(model, text, output, groups=groups, centres=4)
    assert read_codebooks(str(output)).shape("keys")[1] == groups
    assert read_codebooks(str(output)).shape("values")[3] == 4
    cache = CommVQCache(model.config, output, sink_tokens=2, recent_tokens=4)
    model(input_ids=torch.arange(48)[None], **with_cache(cache))
    assert cache.packed_tokens == 32


def test_calibrated_keys_in_every_path(model: LlamaForCausalLM, text: list[str], tmp_path: Path) -> None:
    """Keys decode close to the originals, and fused attention in torch and Triton agrees with decoding."""
    output = tmp_path / "books.safetensors"
    calibrate(model, text, output, key_rounds=5, value_rounds=3)
    tokens = torch.tensor([ord(character) % 64 for character in Path(text[0]).read_text()[:35]])[None]
    exact = DynamicCache(config=model.config)
    model(input_ids=tokens[:, :32], **with_cache(exact))
    logits = {}
    for backend in (None, "torch", "triton"):
        cache = CommVQCache(model.config, output, sink_tokens=0, recent_tokens=0, backend=backend or "torch")
        (enable_fused_attention if backend else disable_fused_attention)(model)
        with torch.inference_mode():
            model(input_ids=tokens[:, :32], **with_cache(cache))
            logits[backend] = model(input_ids=tokens[:, 32:], **with_cache(cache)).logits
        assert cache.packed_tokens == 32
        if backend is None:
            empty = torch.zeros(1, HEADS, 0, HEAD_DIM)
            keys = cache.layers[1].update(empty, empty)[0][:, :, :32]
            error = (keys - exact.layers[1].keys).square().sum() / exact.layers[1].keys.square().sum()
            assert 1e-4 < error < 0.3
    for backend in ("torch", "triton"):
        torch.testing.assert_close(logits[backend], logits[None], atol=1e-4, rtol=1e-4)


def test_what_is_refused(model: LlamaForCausalLM, text: list[str], tmp_path: Path) -> None:
    output = tmp_path / "books.safetensors"
    with pytest.raises(ValueError, match=r"text='nowhere.txt': no such file"):
        calibrate(model, ["nowhere.txt"], output)
    with pytest.raises(ValueError, match=r"tokens=4096: too little text, 1000 tokens"):
        calibrate(model, text, output, tokens=4096)
    with pytest.raises(ValueError, match=r"bits=3 for commvq: allowed 1, 2"):
        calibrate(model, text, output, bits=3)
    with pytest.raises(ValueError, match=r"groups=3 for commvq: heads of 16 numbers allow 1, 2, 4, 8"):
        calibrate(model, text, output, groups=3, key_rounds=2, value_rounds=2)
    with pytest.raises(
        ValueError, match=r"bits=1 for commvq: with 8 groups of 64 centres a round of keys takes 6 bits"
    ):
        calibrate(model, text, output, groups=8, bits=1, centres=64)
    with pytest.raises(ValueError, match=r"output=.*\.safetensors"):
        calibrate(model, text, tmp_path / "books.bin")
    without_rope = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    with pytest.raises(ValueError, match="gpt2 has no rotary position embeddings"):
        calibrate(without_rope, text, output)
    for changes, message in (
        ({"centres": 7}, "centres=7 for commvq: allowed 2, 4"),
        ({"context": 1}, "context=1 for commvq"),
        ({"groups": 0}, "groups=0 for commvq: allowed at least 1"),
        ({"tokens": 127}, "tokens=127 for commvq: allowed at least two windows of 64"),
    ):
        with pytest.raises(ValueError, match=message):
            CommVQSettings(**SETTINGS | changes)
    (tmp_path / "folder.safetensors").mkdir()
    for place, message in (("folder.safetensors", "is a folder"), ("text.txt/x.safetensors", "writable folder")):
        with pytest.raises(ValueError, match=message):
            calibrate(model, ["nowhere.txt"], tmp_path / place)
    with pytest.raises(ValueError, match=r"context=1: must be more than 1"):
        read_windows(text, Characters(), 4, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"text=\[\]"):
        read_windows([], Characters(), 64, 64)  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "folder.safetensors"}


def run_command(*options: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["calibrate", *options])


@pytest.mark.parametrize("values", ["residual", "encoder"])
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: str) -> None:
    """The command prints progress with the remaining time, a table of losses, and the file's size and cost."""
    monkeypatch.setattr(command, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(commvq, "QUICK_ENCODER", EncoderSchedule(steps=5, batch=64))
    monkeypatch.setattr("kvcache_compress.methods.commvq.calibration.calibrate.QUICK_SCHEDULE", SHORT)
    text, output = tmp_path / "text.txt", tmp_path / "books.safetensors"
    text.write_text("".join(chr(32 + (i * i + i // 7) % 90) for i in range(3000)))
    given = ("--text", str(text), "--output", str(output), "--tokens", "2048", "--quick", "--bits", "1")
    given += ("--model", saved_model(), "--centres", "8", "--groups", "2")
    result = run_command(*given, "--values", values, "--key-rounds", "2", "--value-rounds", "2")
    assert result.exit_code == 0, result.output
    assert "reading text: 1 of 2," in result.output
    assert re.search(r"training: \d+ of \d+, \d+ s left", result.output)
    header = read_codebooks(str(output))
    assert header.shape("keys") == (2, 2, 2, 8)
    rows = [line.split("│") for line in result.output.splitlines() if line.startswith("│ values")]
    for row, windows, kind in zip(rows, ("trained on", "held out"), ("rounds", "held_out"), strict=True):
        layers = [layer["values"] for layer in header.header["losses"].values()]
        if values == "encoder":
            rounds, ends = "encoder", [layer["encoder" if kind == "rounds" else kind] for layer in layers]
        else:
            rounds, ends = "2", [error[-1] for layer in layers for error in layer[kind]]
        assert [row[2].strip(), row[3].strip()] == [rounds, windows]
        assert [float(figure) for figure in row[4:7]] == pytest.approx(
            [min(ends), sum(ends) / len(ends), max(ends)], abs=1e-4
        )
    assert re.search(r"books\.safetensors: [\d.]+ MiB in [\d.]+ minutes, peak memory [\d.]+ GiB", result.output)


def test_command_refuses_in_a_sentence(tmp_path: Path) -> None:
    """The command refuses bad arguments before it loads the model, here a folder without one."""
    file = tmp_path / "text.txt"
    file.write_text("a text")
    text, output = ("--text", str(file)), ("--output", str(tmp_path / "x.safetensors"))
    for options, message in (
        ((*text, *output, "--bits", "5"), "bits=5"),
        ((*text, *output, "--method", "kivi"), "method='kivi'"),
        ((*text, *output, "--tokens", "3"), "tokens=3"),
        ((*text, *output, "--device", "foo"), "device='foo'"),
        ((*text, *output, "--device", "meta"), "device='meta' is unavailable: it holds no data"),
        (("--text", str(tmp_path / "no.txt"), *output), "no such file"),
        ((*text, "--output", str(file / "x.safetensors")), "writable folder"),
        ((*text, "--output", str(tmp_path)), "output="),
    ):
        result = run_command(*options, "--model", str(tmp_path))
        assert (result.exit_code, type(result.exception)) == (1, SystemExit), options
        assert message in result.output


def test_command_waits_for_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The command waits for another one that writes the same file."""
    text, output = tmp_path / "text.txt", tmp_path / "x.safetensors"
    text.write_text("a text")
    options = ("--text", str(text), "--output", str(output), "--model", saved_model())
    with ThreadPoolExecutor(1) as pool:
        with only_one(tmp_path / ".x.safetensors.lock"):
            running = pool.submit(run_command, *options)
            until = time.monotonic() + 60
            while not running.done() and "another run is using this folder" not in caplog.text:
                assert time.monotonic() < until, "no warning of another run"
                time.sleep(0.01)
            assert not running.done()
        assert "too little text" in running.result().output
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvcache_compress.modeling.loading.load_model", full)
    (tmp_path / "text.txt").write_text("a text")
    result = run_command("--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "x.safetensors"))
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "No space left on device" in result.output
