"""Training of additive codes: the steps of expectation–maximization against plain arithmetic, and the encoder."""

from __future__ import annotations

import itertools
import resource

import pytest
import torch
from support.paths import ROOT

from kvcache_compress.methods.commvq import additive
from kvcache_compress.methods.commvq.calibration.collect import collect, read_layer
from kvcache_compress.methods.commvq.calibration.em import (
    ComplexForm,
    Form,
    RealForm,
    Schedule,
    hard_steps,
    reseed,
    start_centres,
    train_residual,
)
from kvcache_compress.methods.commvq.calibration.encoder import EncoderSchedule, encoder_bits, train_encoder
from kvcache_compress.modeling.calibration.text import read_windows
from kvcache_compress.modeling.loading import load_model

HEADS, VECTORS, CENTRES, PAIRS = 2, 300, 8, 6
FORMS = {"complex": ComplexForm(), "real": RealForm()}
SHORT = Schedule(soft_steps=3, soft_vectors=256, hard_steps=4, hard_vectors=512, full_steps=1)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(count: int = VECTORS, heads: int = HEADS, pairs: int = PAIRS, seed: int = 0) -> torch.Tensor:
    """Unit vectors around a mean, with channels of unlike size, as keys are."""
    spread = torch.linspace(0.2, 1.5, 2 * pairs)
    x = 0.5 + spread * torch.randn(heads, count, 2 * pairs, generator=generator(seed))
    return torch.nn.functional.normalize(x, dim=-1)


def all_points(centres: torch.Tensor, form: Form) -> torch.Tensor:
    """Every point `[B, K, d]` of a round, in the order of its codes, by complex arithmetic."""
    if isinstance(form, RealForm):
        return centres
    c = torch.view_as_complex(centres.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real((c[:, :, None] + 1j * c[:, None]).flatten(1, 2)).flatten(-2)


def test_hard_codes_are_the_nearest_points(form: Form) -> None:
    x, centres = vectors(), vectors(CENTRES, seed=1)
    codes, loss = form.assign(x, centres)
    distances = torch.cdist(x, all_points(centres, form)).square()
    assert torch.equal(codes, distances.argmin(-1))
    torch.testing.assert_close(loss, distances.amin(-1).sum(-1))
    torch.testing.assert_close(form.points(codes, centres), all_points(centres, form)[torch.arange(2)[:, None], codes])


def test_codes_are_those_of_the_cache() -> None:
    x, centres = vectors(), vectors(CENTRES, seed=1)
    codes, _ = ComplexForm().assign(x, centres)
    stored = additive.complex_encode(x.unflatten(-1, (-1, 2)), centres.unflatten(-1, (-1, 2)).unsqueeze(-4)).squeeze(-2)
    assert torch.equal(codes, stored[..., 0] * CENTRES + stored[..., 1])
    assert torch.equal(RealForm().assign(x, centres)[0], additive.real_encode(x, centres.unsqueeze(-3)).squeeze(-1))


def test_m_step_is_the_least_squares_solution() -> None:
    """Against a dense real least-squares problem with one unknown per real and imaginary part of a centre."""
    x, old = vectors(heads=1), vectors(CENTRES, heads=1, seed=1)
    codes, _ = ComplexForm().assign(x, old)
    a, b = codes[0] // CENTRES, codes[0] % CENTRES
    design = torch.zeros(VECTORS, 2, CENTRES, 2, dtype=torch.float64)
    rows = torch.arange(VECTORS)
    for part in range(2):
        design[rows, part, a, part] += 1
    design[rows, 0, b, 1] -= 1  # i (u + iv) = -v + iu
    design[rows, 1, b, 0] += 1
    target = x[0].double().unflatten(-1, (-1, 2)).transpose(1, 2).flatten(0, 1)
    assert (ComplexForm().uses(codes, CENTRES) > 0).all()
    solved = torch.linalg.lstsq(design.view(2 * VECTORS, 2 * CENTRES), target).solution
    expected = solved.view(CENTRES, 2, PAIRS).transpose(1, 2).flatten(1).float()
    found = ComplexForm().update(x, codes, old)[0]
    for _ in range(30):  # the pull to the old centres vanishes as they stand still
        found = ComplexForm().update(x, codes, found[None])[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_soft_steps_meet_hard_ones_as_the_temperature_falls(form: Form) -> None:
    x, centres = vectors(), vectors(CENTRES, seed=1)
    codes, _ = form.assign(x, centres)
    hard = form.update(x, codes, centres)
    errors = [
        (form.soft_update(x, centres, torch.full((HEADS,), temperature)) - hard).norm() for temperature in (1.0, 1e-7)
    ]
    assert errors[1] < 1e-2 * errors[0]


def test_soft_weights_by_hand() -> None:
    """One vector, two real centres: weights e^(-d/T)."""
    x, centres = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    weight = 1 / (1 + torch.tensor(-1 / 0.5).exp())
    pull = 1e-3 * 0.5
    expected = [(weight + pull) / (weight + pull), (1 - weight) / (1 - weight + pull)]
    found = RealForm().soft_update(x, centres, torch.tensor([0.5]))[0, :, 0]
    torch.testing.assert_close(found, torch.stack(expected))


def test_hard_steps_never_raise_the_loss(form: Form) -> None:
    x = vectors()
    start = start_centres(x, form, 32, generator())
    start[:, -4:] = 50.0  # unused centres, which are reseeded
    _, _, losses = hard_steps(x, form, start, 12, 0.0, generator())
    assert len(losses) > 3
    assert all((later <= earlier * (1 + 1e-5)).all() for earlier, later in itertools.pairwise(losses))


def test_unused_centres_move_to_used_ones(form: Form) -> None:
    x = vectors()
    centres = start_centres(x, form, CENTRES, generator())
    centres[0, 3] = 50.0
    codes, _ = form.assign(x, centres)
    moved = reseed(centres, form.uses(codes, CENTRES), generator())
    assert moved[0, 3].norm() < 2
    assert torch.equal(moved[0, :3], centres[0, :3])
    assert (form.uses(form.assign(x, moved)[0], CENTRES)[0] > 0).all()


def test_residual_rounds_are_what_the_cache_encodes() -> None:
    """The losses that training reports are those of the codec's own search with the stored codebooks."""
    x = vectors(1000)
    books, losses = train_residual(x, ComplexForm(), 3, CENTRES, SHORT, generator())
    shaped = books.unflatten(-1, (-1, 2))
    z = x.unflatten(-1, (-1, 2))
    decoded = additive.complex_decode(additive.complex_encode(z, shaped), shaped)
    torch.testing.assert_close((z - decoded).square().sum((-1, -2)).mean(-1), losses[:, -1], rtol=1e-3, atol=0)
    assert torch.equal(books, books.half().float())


def test_more_rounds_and_more_centres_lose_less(form: Form) -> None:
    x = vectors(1000)
    _, losses = train_residual(x, form, 5, CENTRES, SHORT, generator())
    assert (losses.diff(dim=1) < 0).all()
    _, finer = train_residual(x, form, 1, 4 * CENTRES, SHORT, generator())
    assert (finer[:, 0] < losses[:, 0]).all()


def test_training_is_repeatable() -> None:
    x = vectors(600)
    first, second = (train_residual(x, ComplexForm(), 2, CENTRES, SHORT, generator())[0] for _ in range(2))
    assert torch.equal(first, second)


def test_encoder_learns_and_is_deterministic() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.nn.functional.normalize(torch.randn(2000, 4, generator=generator) @ torch.randn(4, 16), dim=-1)
    network, loss = train_encoder(tokens, 16, EncoderSchedule(steps=300, batch=128), generator)
    decoded = encoder_bits(network, tokens) @ network["codebook"]
    assert loss == pytest.approx((tokens - decoded).square().sum(-1).mean().item())
    assert loss < 0.3
    assert torch.equal(encoder_bits(network, tokens), encoder_bits(network, tokens))


@pytest.fixture(scope="module")
def real_keys(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Normalized keys before RoPE of SmolLM2's layer 10, `[3, 4096, 64]`."""
    model, tokenizer = load_model()
    source = str(ROOT / "eval" / "tasks" / "default_text.txt")
    windows, _ = read_windows([source], tokenizer, 4096, 512)
    folder = tmp_path_factory.mktemp("states")
    collect(model, windows, folder, [10])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6 * 2**20  # KiB
    return torch.nn.functional.normalize(read_layer(folder, 10, "keys", 3, 64).float(), dim=-1)


def loss_of(keys: torch.Tensor, pairs: int, centres: int, rounds: int) -> float:
    """Mean squared error of normalized keys in groups of `pairs`, over heads."""
    heads = keys.shape[0]
    grouped = keys.unflatten(-1, (-1, 2 * pairs)).transpose(1, 2).flatten(0, 1)
    schedule = Schedule(soft_steps=3, soft_vectors=1024, hard_steps=3, hard_vectors=4096)
    _, losses = train_residual(grouped, ComplexForm(), rounds, centres, schedule, torch.Generator().manual_seed(0))
    return float(losses[:, -1].sum() / heads)


@pytest.mark.slow
def test_errors_fall_as_in_the_paper(real_keys: torch.Tensor) -> None:
    """Tables 9 and 10 and figure 4 in shape: larger groups at equal bits, and more rounds, lose less.

    The paper's rows with half its head dimension: pairs, centres and rounds of a group.
    """
    one_round = [loss_of(real_keys, pairs, centres, 1) for pairs, centres in ((8, 2), (16, 4), (32, 16))]
    assert one_round == sorted(one_round, reverse=True)
    one_bit = [loss_of(real_keys, *size) for size in ((8, 2, 8), (16, 4, 8), (32, 16, 8), (32, 64, 5))]
    assert one_bit == sorted(one_bit, reverse=True)
    by_rounds = [loss_of(real_keys, 32, 64, rounds) for rounds in (1, 2, 4)]
    assert by_rounds == sorted(by_rounds, reverse=True)
