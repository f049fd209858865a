"""Training of additive codes: the steps of expectation–maximization against plain arithmetic, and the encoder."""

import itertools

import pytest
import torch

from kvcache_compress.methods.commvq.bit_encoder import logits
from kvcache_compress.methods.commvq.calibration import em
from kvcache_compress.methods.commvq.calibration.encoder import EncoderSchedule, encoder_loss, train_encoder

HEADS, VECTORS, CENTRES, PAIRS = 2, 300, 8, 6
FORMS = {"complex": em.ComplexForm(), "real": em.RealForm()}
SHORT = em.Schedule(soft_steps=3, soft_vectors=256, hard_steps=4, hard_vectors=512, full_steps=1)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> em.Form:
    return FORMS[request.param]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(count: int = VECTORS, heads: int = HEADS, pairs: int = PAIRS, seed: int = 0) -> torch.Tensor:
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
        (form.soft_update(x, centres, torch.full((HEADS,), temperature)) - hard).norm() for temperature in (1.0, 1e-7)
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
    _, losses = em.train_residual(x, form, 5, CENTRES, SHORT, generator())
    assert (losses.diff(dim=1) < 0).all()
    _, finer = em.train_residual(x, form, 1, 4 * CENTRES, SHORT, generator())
    assert (finer[:, 0] < losses[:, 0]).all()


def test_encoder_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.nn.functional.normalize(torch.randn(2000, 4, generator=generator) @ torch.randn(4, 16), dim=-1)
    network = train_encoder(tokens, 16, EncoderSchedule(steps=300, batch=128), generator)
    error = (tokens - (logits(network, tokens) > 0).float() @ network["codebook"]).square().sum(-1).mean().item()
    assert error < 0.3
    assert encoder_loss(network, tokens) == pytest.approx(error)
