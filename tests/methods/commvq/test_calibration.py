"""Calibration of CommVQ: collected states, the file, refused arguments, and the steps of training by arithmetic."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cache_name import with_cache
from support.models.saved_model import saved_model
from support.models.small_model import small_model
from support.models.toy_tokenizers import Letters
from torch.nn.functional import normalize
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from typer.testing import CliRunner

from kvcache_compress.cache.by_method import CommVQCache
from kvcache_compress.cli import app
from kvcache_compress.eval.runner import progress
from kvcache_compress.methods.commvq import additive
from kvcache_compress.methods.commvq.bit_encoder import logits
from kvcache_compress.methods.commvq.calibration import calibrate as commvq
from kvcache_compress.methods.commvq.calibration import em
from kvcache_compress.methods.commvq.calibration.collect import collect, read_layer
from kvcache_compress.methods.commvq.calibration.encoder import EncoderSchedule, encoder_loss, train_encoder
from kvcache_compress.methods.commvq.codebook_file import read_codebooks
from kvcache_compress.modeling.calibration_text import read_windows

LAYERS, HEADS, HEAD_DIM, CONTEXT = 3, 2, 16, 64
SHORT = em.Schedule(soft_steps=2, soft_vectors=128, hard_steps=2, hard_vectors=512, full_steps=1)
SETTINGS: dict[str, Any] = {"tokens": 576, "context": CONTEXT, "schedule": SHORT}


@pytest.fixture
def model() -> LlamaForCausalLM:
    return small_model(LAYERS, head_dim=HEAD_DIM, initializer_range=0.2)


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(32 + (i * i + i // 7) % 90) for i in range(1000)))
    return [str(path)]


def calibrate(model: Any, text: list[str], output: Path, **changes: Any) -> None:
    """Run a calibration with short settings."""
    settings = commvq.CommVQSettings(**SETTINGS | changes)
    tokenizer: Any = Letters([3])
    commvq.calibrate_commvq(model, tokenizer, text, output, settings, lambda done, total, doing: None)


def test_keys_are_collected_before_rope(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Collected keys equal the key projection, whose halves are real and imaginary parts in this model."""
    windows = torch.randint(64, (3, CONTEXT), generator=torch.Generator().manual_seed(0))
    projected, values = [], []
    attention = model.model.layers[1].self_attn
    attention.k_proj.register_forward_hook(lambda module, given, output: projected.append(output[0]))
    attention.v_proj.register_forward_hook(lambda module, given, output: values.append(output[0]))
    collect(model, windows, tmp_path, [1], lambda: None)
    real, imaginary = torch.cat(projected).view(-1, HEADS, HEAD_DIM).transpose(0, 1).chunk(2, -1)
    found = read_layer(tmp_path, 1, "keys", HEADS, HEAD_DIM).float()
    assert found.shape == (HEADS, 3 * CONTEXT, HEAD_DIM)
    torch.testing.assert_close(found[..., ::2], real, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found[..., 1::2], imaginary, atol=2e-3, rtol=2e-3)
    expected = torch.cat(values).view(-1, HEADS, HEAD_DIM).transpose(0, 1)
    torch.testing.assert_close(read_layer(tmp_path, 1, "values", HEADS, HEAD_DIM), expected.half())


@pytest.mark.parametrize("changes", [{"bits": 1}, {"values": "encoder"}], ids=str)
def test_a_file_that_the_cache_takes(
    model: LlamaForCausalLM, text: list[str], tmp_path: Path, changes: dict[str, Any]
) -> None:
    output = tmp_path / "books.safetensors"
    calibrate(model, text, output, encoder=EncoderSchedule(steps=20, batch=64), **changes)
    file = read_codebooks(str(output))
    assert (file.facts.layers, file.facts.kv_heads, file.facts.head_dim) == (LAYERS, HEADS, HEAD_DIM)
    assert (file.header["data"]["windows"], file.header["data"]["held_out_windows"]) == (8, 1)
    assert set(file.header["losses"]) == {str(layer) for layer in range(LAYERS)}
    assert file.shape("keys") == (HEADS, 1, 1 if "bits" in changes else 3, 64)
    cache = CommVQCache(model.config, codebooks=output, sink_tokens=2, recent_tokens=4)
    model(input_ids=torch.arange(48)[None], **with_cache(cache))
    assert cache.packed_tokens == 32  # of 42 outside sinks and window, in blocks of 32
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "books.safetensors"}


def test_windows_are_held_out() -> None:
    """Held out is one window in eight, evenly spread, and at least one; each window is in one of both sets."""
    for count, held_out in ((2, [1]), (8, [7]), (15, [14]), (18, [8, 17]), (54, [8, 17, 26, 35, 44, 53])):
        trained, others = commvq.split_windows(torch.arange(count)[:, None])
        assert others.flatten().tolist() == held_out
        assert sorted([*trained.flatten().tolist(), *held_out]) == list(range(count))


def test_losses_of_what_was_held_out(model: LlamaForCausalLM, text: list[str], tmp_path: Path) -> None:
    output = tmp_path / "books.safetensors"
    calibrate(model, text, output)
    tables = additive.complex_tables(load_file(output)["keys.1.codebooks"][:, 0].float())
    windows, _ = read_windows(text, Letters([3]), 576, CONTEXT)  # type: ignore[arg-type]
    for kind, part in (("rounds", windows[:8]), ("held_out", windows[8:])):
        collect(model, part, tmp_path / kind, [1], lambda: None)
        z = normalize(read_layer(tmp_path / kind, 1, "keys", HEADS, HEAD_DIM).float(), dim=-1)
        error = (z - additive.decode(additive.encode(z, tables), tables)).square().sum(-1).mean(-1)
        losses = read_codebooks(str(output)).header["losses"]["1"]["keys"][kind]
        assert [head[-1] for head in losses] == pytest.approx(error.tolist(), rel=2e-3)


def test_calibration_is_repeatable(model: LlamaForCausalLM, text: list[str], tmp_path: Path) -> None:
    files = []
    for seed in (0, 0, 1):
        calibrate(model, text, tmp_path / "books.safetensors", seed=seed)
        files.append(load_file(tmp_path / "books.safetensors"))
    one, again, other = files
    assert len(one) == 2 * LAYERS
    assert all(torch.equal(one[name], again[name]) and not torch.equal(one[name], other[name]) for name in one)


def test_what_is_refused(model: LlamaForCausalLM, text: list[str], tmp_path: Path) -> None:
    output = tmp_path / "books.safetensors"
    for given, changes, message in (
        (["nowhere.txt"], {}, "text='nowhere.txt'"),
        (text, {"tokens": 4096}, "tokens=4096"),
        (text, {"bits": 3}, "bits=3"),
        (text, {"context": 1}, "context=1"),
        (text, {"tokens": 127}, "tokens=127"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(model, given, output, **changes)
    (tmp_path / "folder.safetensors").mkdir()
    for place in ("books.bin", "folder.safetensors", "text.txt/x.safetensors"):
        with pytest.raises(ValueError, match=f"output='.*{place}'"):
            calibrate(model, text, tmp_path / place)
    without_rope = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    with pytest.raises(ValueError, match="gpt2 has no rotary position embeddings"):
        calibrate(without_rope, text, output)
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "folder.safetensors"}


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints progress with the remaining time, a table of losses, and the file's size and cost."""
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)
    monkeypatch.setattr(commvq, "QUICK_SCHEDULE", SHORT)
    text, output = tmp_path / "text.txt", tmp_path / "books.safetensors"
    text.write_text("".join(chr(32 + (i * i + i // 7) % 90) for i in range(3000)))
    options = ["--text", str(text), "--output", str(output), "--tokens", "2048", "--quick", "--bits", "1"]
    options = ["calibrate", *options, "--model", saved_model()]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "[1/2] reading text, " in result.output
    assert re.search(r"\[\d+/\d+\] training, [\d:]+ left", result.output)
    file = read_codebooks(str(output))
    assert file.shape("keys") == (2, 1, 3, 64)
    rows = [line.split("│") for line in result.output.splitlines() if line.startswith("│ values")]
    for row, windows, kind in zip(rows, ("trained on", "held out"), ("rounds", "held_out"), strict=True):
        ends = [error[-1] for layer in file.header["losses"].values() for error in layer["values"][kind]]
        assert [row[2].strip(), row[3].strip()] == ["5", windows]
        expected = [min(ends), sum(ends) / len(ends), max(ends)]
        assert [float(figure) for figure in row[4:7]] == pytest.approx(expected, abs=1e-4)
    assert re.search(r"books\.safetensors: [\d.]+ MiB in [\d.]+ minutes", result.output)


EM_HEADS, VECTORS, CENTRES, PAIRS = 2, 300, 8, 6
FORMS = {"complex": em.ComplexForm(), "real": em.RealForm()}
BRIEF = em.Schedule(soft_steps=3, soft_vectors=256, hard_steps=4, hard_vectors=512, full_steps=1)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> em.Form:
    return FORMS[request.param]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(count: int = VECTORS, heads: int = EM_HEADS, pairs: int = PAIRS, seed: int = 0) -> torch.Tensor:
    """Unit vectors around a mean, with channels of unlike size, as keys are."""
    spread = torch.linspace(0.2, 1.5, 2 * pairs)
    x = 0.5 + spread * torch.randn(heads, count, 2 * pairs, generator=generator(seed))
    return torch.nn.functional.normalize(x, dim=-1)


def all_points(centres: torch.Tensor, form: em.Form) -> torch.Tensor:
    """Every point `[B, K, d]` of a round, in the order of its codes, by complex arithmetic."""
    if isinstance(form, em.RealForm):
        return centres
    c = torch.view_as_complex(centres.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real((c[:, :, None] + 1j * c[:, None]).flatten(1, 2)).flatten(-2)


def test_hard_codes_are_the_nearest_points(form: em.Form) -> None:
    x, centres = vectors(), vectors(CENTRES, seed=1)
    codes, rest = em.assign(x, form, centres)
    points = all_points(centres, form)
    best = torch.cdist(x, points).argmin(-1)
    assert torch.equal(codes[..., 0] * CENTRES + codes[..., 1] if codes.shape[-1] == 2 else codes[..., 0], best)
    torch.testing.assert_close(x - rest, points[torch.arange(2)[:, None], best])


def test_m_step_is_the_least_squares_solution() -> None:
    """Against a dense real least-squares problem with one unknown per real and imaginary part of a centre."""
    x, old = vectors(heads=1), vectors(CENTRES, heads=1, seed=1)
    codes, _ = em.assign(x, em.ComplexForm(), old)
    a, b = codes[0].unbind(-1)
    design = torch.zeros(VECTORS, 2, CENTRES, 2, dtype=torch.float64)
    rows = torch.arange(VECTORS)
    for part in range(2):
        design[rows, part, a, part] += 1
    design[rows, 0, b, 1] -= 1  # i (u + iv) = -v + iu
    design[rows, 1, b, 0] += 1
    target = x[0].double().unflatten(-1, (-1, 2)).transpose(1, 2).flatten(0, 1)
    assert (em.uses(codes, CENTRES) > 0).all()
    solved = torch.linalg.lstsq(design.view(2 * VECTORS, 2 * CENTRES), target).solution
    expected = solved.view(CENTRES, 2, PAIRS).transpose(1, 2).flatten(1).float()
    found = em.ComplexForm().update(x, codes, old)[0]
    for _ in range(30):  # the pull to the old centres vanishes as they stand still
        found = em.ComplexForm().update(x, codes, found[None])[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_soft_steps_meet_hard_ones_as_the_temperature_falls(form: em.Form) -> None:
    x, centres = vectors(), vectors(CENTRES, seed=1)
    codes, _ = em.assign(x, form, centres)
    hard = form.update(x, codes, centres)
    errors = [
        (form.soft_update(x, centres, torch.full((EM_HEADS,), temperature)) - hard).norm()
        for temperature in (1.0, 1e-7)
    ]
    assert errors[1] < 1e-2 * errors[0]


def test_hard_steps_never_raise_the_loss(form: em.Form) -> None:
    x = vectors()
    start = em.start_centres(x, form, 32, generator())
    start[:, -4:] = 50.0  # unused centres, which are reseeded
    books = [em.hard_steps(x, form, start, steps, 0.0, generator()) for steps in range(6)]
    losses = [em.mean_square(em.assign(x, form, book)[1]) for book in books]
    assert (losses[-1] < losses[1]).all()
    assert all((later <= earlier * (1 + 1e-5)).all() for earlier, later in itertools.pairwise(losses))


def test_unused_centres_move_to_used_ones(form: em.Form) -> None:
    x = vectors()
    centres = em.start_centres(x, form, CENTRES, generator())
    centres[0, 3] = 50.0
    codes, _ = em.assign(x, form, centres)
    moved = em.reseed(centres, em.uses(codes, CENTRES), generator())
    assert moved[0, 3].norm() < 2
    assert torch.equal(moved[0, :3], centres[0, :3])
    assert (em.uses(em.assign(x, form, moved)[0], CENTRES)[0] > 0).all()


def test_more_rounds_and_more_centres_lose_less(form: em.Form) -> None:
    x = vectors(1000)
    _, losses = em.train_residual(x, form, 5, CENTRES, BRIEF, generator())
    assert (losses.diff(dim=1) < 0).all()
    _, finer = em.train_residual(x, form, 1, 4 * CENTRES, BRIEF, generator())
    assert (finer[:, 0] < losses[:, 0]).all()


def test_encoder_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.nn.functional.normalize(torch.randn(2000, 4, generator=generator) @ torch.randn(4, 16), dim=-1)
    network = train_encoder(tokens, 16, EncoderSchedule(steps=300, batch=128), generator)
    error = (tokens - (logits(network, tokens) > 0).float() @ network["codebook"]).square().sum(-1).mean().item()
    assert error < 0.3
    assert encoder_loss(network, tokens) == pytest.approx(error)
