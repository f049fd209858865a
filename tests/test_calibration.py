"""Calibration of CommVQ: what is collected, that an interrupted run goes on, the file, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

from kvcache_compress import disable_fused_attention, enable_fused_attention
from kvcache_compress.calibration import CommVQSettings, calibrate_commvq, commvq
from kvcache_compress.calibration.collect import collect, read_layer
from kvcache_compress.calibration.em import Schedule
from kvcache_compress.calibration.encoder import EncoderSchedule
from kvcache_compress.calibration.text import read_windows
from kvcache_compress.cli import app
from kvcache_compress.commvq_file import read_header
from kvcache_compress.methods.commvq import CommVQCache

LAYERS, HEADS, HEAD_DIM, CONTEXT = 3, 2, 16, 64
SHORT = Schedule(soft_steps=2, soft_vectors=128, hard_steps=2, hard_vectors=512, full_steps=1)
SETTINGS: dict[str, Any] = {"tokens": 512, "context": CONTEXT, "centres": 8, "schedule": SHORT}


class Characters:
    """A tokenizer with a token per character, and one that starts a text."""

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


def calibrate(model: Any, text: list[str], output: Path, **changes: Any) -> list[str]:
    """Notices of a calibration with short settings."""
    notices: list[str] = []
    calibrate_commvq(
        model,
        Characters(),  # type: ignore[arg-type]
        text,
        output,
        CommVQSettings(**SETTINGS | changes),
        workers=1,
        notice=notices.append,
    )
    return notices


def test_keys_are_collected_before_rope(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Against the key projection itself, whose halves are the real and imaginary parts in this model."""
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


def test_collecting_holds_one_window(model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches alive at once, and the tokens that each holds."""
    alive, most = set[int](), [0]

    class Counted(DynamicCache):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

        def update(self, *args: Any, **options: Any) -> Any:
            most[0] = max(most[0], len(alive))
            assert args[0].shape[2] == CONTEXT
            return super().update(*args, **options)

    monkeypatch.setattr("kvcache_compress.calibration.collect.DynamicCache", Counted)
    collect(model, torch.zeros(20, CONTEXT, dtype=torch.long), tmp_path, [0, 2])
    assert most[0] <= 2  # the last window's goes when the next takes its name
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == 2 * 2 * 20 * CONTEXT * HEADS * HEAD_DIM * 2


@pytest.mark.parametrize("values", ["residual", "encoder"])
def test_a_file_that_the_cache_takes(model: LlamaForCausalLM, text: list[str], tmp_path: Path, values: str) -> None:
    output = tmp_path / "books.safetensors"
    calibrate(model, text, output, values=values, encoder=EncoderSchedule(steps=20, batch=64), centres=16)
    header = read_header(str(output))
    assert (header.layers, header.kv_heads, header.head_dim) == (LAYERS, HEADS, HEAD_DIM)
    assert header.options["bits"] == 2
    assert header.data["windows"] == 512 // CONTEXT
    assert set(header.losses) == {str(layer) for layer in range(LAYERS)}
    cache = CommVQCache(model.config, codebooks=output, sink_tokens=2, recent_tokens=4)
    model(input_ids=torch.arange(48)[None], past_key_values=cache)
    assert cache.packed_tokens == 32  # of 42 outside sinks and window, in blocks of 32
    assert not (tmp_path / "books.safetensors.parts").exists()


def test_an_interrupted_run_goes_on(
    model: LlamaForCausalLM, text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in layer 1: layer 0 is not trained again, and the file is that of an uninterrupted run."""
    whole, output = tmp_path / "whole.safetensors", tmp_path / "books.safetensors"
    calibrate(model, text, whole)
    original, trained = commvq.train_side, []

    def train(states: torch.Tensor, side: Any, layer: int, *rest: Any) -> Any:
        if layer == 1 and not trained.count("resumed"):
            raise KeyboardInterrupt
        trained.append((side, layer))
        return original(states, side, layer, *rest)

    monkeypatch.setattr(commvq, "train_side", train)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, text, output)
    assert trained == [("keys", 0), ("values", 0)]
    assert not output.exists()
    trained.append("resumed")
    monkeypatch.setattr(commvq, "collect", lambda *_: pytest.fail("collected again"))
    notices = calibrate(model, text, output)
    assert "1 of 3 layers" in notices[0]
    assert {layer for _, layer in trained[3:]} == {1, 2}
    one, other = load_file(whole), load_file(output)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("changed", [{"bits": 1}, {"seed": 1}, {"tokens": 576}, {"schedule": Schedule(soft_steps=1)}])
def test_parts_of_other_settings_are_not_used(
    model: LlamaForCausalLM,
    text: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
) -> None:
    output = tmp_path / "books.safetensors"
    monkeypatch.setattr(commvq, "write_codebooks", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, text, output)
    monkeypatch.undo()
    assert "starting afresh" in calibrate(model, text, output, **changed)[0]
    expected = tmp_path / "expected.safetensors"
    calibrate(model, text, expected, **changed)
    one, other = load_file(output), load_file(expected)
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_damaged_part_is_made_again(
    model: LlamaForCausalLM, text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "books.safetensors"
    monkeypatch.setattr(commvq, "write_codebooks", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, text, output)
    monkeypatch.undo()
    part = tmp_path / "books.safetensors.parts" / "layer-001.safetensors"
    part.write_bytes(part.read_bytes()[:100])
    assert "2 of 3 layers" in calibrate(model, text, output)[0]
    assert len(load_file(output)) == 3 * LAYERS  # codebooks of both sides, weights of keys


def test_workers_train_the_same(model: LlamaForCausalLM, text: list[str], tmp_path: Path) -> None:
    one, several = tmp_path / "one.safetensors", tmp_path / "several.safetensors"
    calibrate(model, text, one)
    calibrate_commvq(model, Characters(), text, several, CommVQSettings(**SETTINGS), workers=3)  # type: ignore[arg-type]
    expected, found = load_file(one), load_file(several)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_worker_that_fails_stops_the_others(
    model: LlamaForCausalLM, text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = commvq.train_side

    def train(states: torch.Tensor, side: Any, layer: int, *rest: Any) -> Any:
        if layer == 1:
            raise ValueError("layer 1")
        return original(states, side, layer, *rest)

    monkeypatch.setattr(commvq, "train_side", train)
    settings = CommVQSettings(**SETTINGS)
    with pytest.raises(ValueError, match="layer 1"):
        calibrate_commvq(model, Characters(), text, tmp_path / "b.safetensors", settings, workers=2)  # type: ignore[arg-type]


def test_queries_weigh_pairs(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Mean squares of the query projection's pairs, grouped heads together; the attention functions are put back."""
    name = model.config._attn_implementation
    before, squares = ALL_ATTENTION_FUNCTIONS[name], []
    attention = model.model.layers[2].self_attn

    def project(module: Any, given: Any, output: torch.Tensor) -> None:
        squares.append(output[0].view(CONTEXT, HEADS, 2, 2, HEAD_DIM // 2).square().sum((0, 2, 3)))

    attention.q_proj.register_forward_hook(project)
    windows = torch.randint(64, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    weights = collect(model, windows, tmp_path, [2])[2]
    expected = sum(squares)
    torch.testing.assert_close(weights, (expected / expected.mean(-1, keepdim=True)).sqrt(), atol=1e-3, rtol=1e-3)
    assert ALL_ATTENTION_FUNCTIONS[name] is before


def test_weighted_keys_in_every_path(model: LlamaForCausalLM, text: list[str], tmp_path: Path) -> None:
    """Keys come back near what they were, and fused attention in torch and in Triton agrees with decoding them."""
    output = tmp_path / "books.safetensors"
    calibrate(model, text, output, key_rounds=5, value_rounds=3)
    tokens = torch.tensor([ord(character) % 64 for character in Path(text[0]).read_text()[:35]])[None]
    exact = DynamicCache(config=model.config)
    model(input_ids=tokens[:, :32], past_key_values=exact)
    logits = {}
    for backend in (None, "torch", "triton"):
        cache = CommVQCache(model.config, output, sink_tokens=0, recent_tokens=0, backend=backend or "torch")
        (enable_fused_attention if backend else disable_fused_attention)(model)
        with torch.inference_mode():
            model(input_ids=tokens[:, :32], past_key_values=cache)
            logits[backend] = model(input_ids=tokens[:, 32:], past_key_values=cache).logits
        assert cache.packed_tokens == 32
        if backend is None:
            empty = torch.zeros(1, HEADS, 0, HEAD_DIM)
            keys = cache.layers[1].update(empty, empty)[0][:, :, :32]
            error = (keys - exact.layers[1].keys).square().sum() / exact.layers[1].keys.square().sum()
            assert 1e-4 < error < 0.3
    for backend in ("torch", "triton"):
        torch.testing.assert_close(logits[backend], logits[None], atol=1e-4, rtol=1e-4)


def test_windows_are_spread_over_the_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(i % 64) for i in range(600)))
    windows, _ = read_windows([str(path)], Characters(), 256, 64)  # type: ignore[arg-type]
    assert windows.shape == (4, 64)
    assert (windows[:, 0] == 3).all()
    assert windows[-1, -1] == 599 % 64


def test_what_is_refused(model: LlamaForCausalLM, text: list[str], tmp_path: Path) -> None:
    output = tmp_path / "books.safetensors"
    with pytest.raises(ValueError, match=r"text='nowhere.txt': no such file"):
        calibrate(model, ["nowhere.txt"], output)
    with pytest.raises(ValueError, match=r"tokens=4096: too little text, 1000 tokens"):
        calibrate(model, text, output, tokens=4096)
    with pytest.raises(ValueError, match=r"bits=3 for commvq: allowed 1, 2"):
        calibrate(model, text, output, bits=3)
    with pytest.raises(ValueError, match=r"allowed are files that end in \.safetensors"):
        calibrate(model, text, tmp_path / "books.bin")
    without_rope = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    with pytest.raises(ValueError, match="gpt2 has no rotary position embeddings"):
        calibrate(without_rope, text, output)
    assert not output.with_name("books.safetensors.parts").exists()


def test_command_refuses_in_a_sentence(tmp_path: Path) -> None:
    runner = CliRunner()
    given = ["calibrate", "--text", str(tmp_path / "no.txt"), "--output", str(tmp_path / "x.safetensors")]
    for options, message in ((["--bits", "5"], "bits=5"), (["--method", "kivi"], "method='kivi'")):
        result = runner.invoke(app, [*given, *options])
        assert result.exit_code == 1
        assert message in result.output
