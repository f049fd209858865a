"""Train codebooks of residual additive codes by expectation–maximization (CommVQ, section 4.2 and appendix A.2).

Two forms share one loop. Real, for values: a round adds `c[a]`, so training is k-means. Complex, for keys before RoPE:
a round adds `c[a] + i c[b]` to the pairs of a head. With W_nab the weight of vector n on the point (a, b), its M-step

    min over c of  Σ_n Σ_ab W_nab |z_n - c_a - i c_b|²

is a linear system in the N complex centres (2N real unknowns per pair), with one Hermitian matrix for all pairs that
depends only on the counts C_ab = Σ_n W_nab:

    (diag(Σ_b C_ab + Σ_b C_ba) + i (C - Cᵀ)) c = Σ_n (W_na z_n - i W_nb z_n)

A round begins with soft steps, W = softmax(-distance / T) with T falling exponentially, on a sample of the vectors;
then come hard steps on a larger sample until the loss settles, and a few on all vectors. T is in units of the mean
squared length of the residuals, so one schedule serves all rounds; the paper's code lowers a fixed T to a tenth after
some rounds.

Vectors are `[B, n, d]`: B heads train at once. Complex vectors have real and imaginary parts interleaved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvcache_compress.methods.commvq.additive import chunk_of, complex_tables, nearest, point_costs, times_i

_BLOCK = 8192
"""Vectors per head whose inner products are held at once."""
_PULL = 1e-3
"""Weight of the old centre in the M-step, relative to the mean uses, so that unused centres do not move."""


@dataclass(frozen=True)
class Schedule:
    """Steps and temperatures of one round of training.

    soft_steps: soft steps, on at most `soft_vectors` vectors per head.
    hard_steps: most hard steps, on at most `hard_vectors` vectors; they end early once no head's loss falls by more
        than the share `tolerance`.
    full_steps: hard steps on all vectors after that.
    hottest, coldest: temperature of the first and the last soft step, in mean squared lengths of the residuals.
    """

    soft_steps: int = 6
    soft_vectors: int = 4096
    hard_steps: int = 8
    hard_vectors: int = 16_384
    full_steps: int = 2
    tolerance: float = 2e-3
    hottest: float = 0.1
    coldest: float = 0.01

    def temperature(self, step: int) -> float:
        return self.hottest * (self.coldest / self.hottest) ** (step / max(1, self.soft_steps - 1))


class RealForm:
    """Real form: points `c[a]`. Both forms have these methods; codes are `[B, n, S]`, centres `[B, N, d]`."""

    def tables(self, centres: torch.Tensor) -> torch.Tensor:
        """Tables `[B, S, N, d]` whose rows add up to points."""
        return centres[:, None]

    def update(self, x: torch.Tensor, codes: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        """M-step for hard codes: new centres."""
        code, count = codes[..., 0], centres.shape[1]
        return self._solve(_count(code, count), _sums(x, code, count), centres)

    def soft_update(self, x: torch.Tensor, centres: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Soft E-step at `temperature` `[B]` (in squared distances) and M-step for its weights: new centres."""
        costs = point_costs(self.tables(centres))[:, None] - x @ centres.mT
        weights = costs.mul_(-2 / temperature[:, None, None]).softmax(-1)
        return self._solve(weights.sum(1), weights.mT @ x, centres)

    @staticmethod
    def _solve(counts: torch.Tensor, sums: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        pull = _PULL * counts.mean(-1, keepdim=True)
        return (sums + pull[..., None] * centres) / (counts + pull)[..., None]


class ComplexForm:
    """Complex form: points `c[a] + i c[b]`."""

    def tables(self, centres: torch.Tensor) -> torch.Tensor:
        return complex_tables(_by_pairs(centres))

    def update(self, x: torch.Tensor, codes: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        (a, b), count = codes.unbind(-1), centres.shape[1]
        pairs = _count(a * count + b, count * count).unflatten(-1, (count, count))
        return self._solve(pairs, _sums(x, a, count), _sums(x, b, count), centres)

    def soft_update(self, x: torch.Tensor, centres: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        tables = self.tables(centres)
        table = point_costs(tables)
        pairs, by_a, by_b = torch.zeros_like(table), torch.zeros_like(centres), torch.zeros_like(centres)
        for block in x.split(chunk_of(table), 1):
            first, second = (block @ tables.flatten(1, 2).mT).chunk(2, -1)
            costs = (table[:, None] - second[:, :, None, :]).sub_(first[..., None])
            weights = costs.mul_(-2 / temperature[:, None, None, None]).flatten(2).softmax(-1).view_as(costs)
            pairs += weights.sum(1)
            by_a += weights.sum(3).mT @ block
            by_b += weights.sum(2).mT @ block
        return self._solve(pairs, by_a, by_b, centres)

    @staticmethod
    def _solve(pairs: torch.Tensor, by_a: torch.Tensor, by_b: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        uses = pairs.sum(2) + pairs.sum(1)
        pull = _PULL * uses.mean(-1, keepdim=True)
        matrix = torch.complex(torch.diag_embed(uses + pull), pairs - pairs.mT).to(torch.complex128)
        right = _by_pairs(by_a) - times_i(_by_pairs(by_b)) + _by_pairs(pull[..., None] * centres)
        solved = torch.linalg.solve(matrix, torch.view_as_complex(right.double().contiguous()))
        return torch.view_as_real(solved).flatten(-2).to(centres.dtype)


Form: TypeAlias = RealForm | ComplexForm


def assign(x: torch.Tensor, form: Form, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E-step: codes of the nearest points, and the residuals."""
    tables = form.tables(centres)
    costs = point_costs(tables)
    codes, rest = zip(*(nearest(block, tables, costs) for block in x.split(_BLOCK, 1)), strict=True)
    return torch.cat(codes, 1), torch.cat(rest, 1)


@torch.inference_mode()
def train_round(
    x: torch.Tensor, form: Form, centres: int, schedule: Schedule, generator: torch.Generator
) -> torch.Tensor:
    """Train one round on vectors `[B, n, d]`: centres `[B, N, d]`."""
    order = torch.randperm(x.shape[1], generator=generator).to(x.device)
    sample = x[:, order[: schedule.soft_vectors]]
    energy = mean_square(sample).clamp_min(1e-30)
    book = start_centres(sample, form, centres, generator)
    for step in range(schedule.soft_steps):
        book = form.soft_update(sample, book, schedule.temperature(step) * energy)
    part = x[:, order[: schedule.hard_vectors].sort().values]
    book = hard_steps(part, form, book, schedule.hard_steps, schedule.tolerance, generator)
    if len(order) > schedule.hard_vectors:
        book = hard_steps(x, form, book, schedule.full_steps, 0.0, generator)
    return book


def hard_steps(
    x: torch.Tensor, form: Form, centres: torch.Tensor, steps: int, tolerance: float, generator: torch.Generator
) -> torch.Tensor:
    """Run at most `steps` hard-EM steps: new centres."""
    before = None
    for _ in range(steps):
        codes, rest = assign(x, form, centres)
        loss = mean_square(rest)
        if before is not None and bool((before - loss <= tolerance * before).all()):
            break
        centres, before = form.update(x, codes, reseed(centres, uses(codes, centres.shape[1]), generator)), loss
    return centres


@torch.inference_mode()
def train_residual(
    x: torch.Tensor,
    form: Form,
    rounds: int,
    centres: int,
    schedule: Schedule,
    generator: torch.Generator,
    on_round: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train round after round, each on the residuals of the rounds before, for float32 vectors `[B, n, d]`.

    Returns centres `[B, R, N, d]`, rounded to float16, and the mean squared residual after each round, `[B, R]`.
    """
    books, losses = [], []
    for _ in range(rounds):
        books.append(train_round(x, form, centres, schedule, generator).half().float())
        _, x = assign(x, form, books[-1])
        losses.append(mean_square(x))
        on_round()
    return torch.stack(books, 1), torch.stack(losses, 1)


@torch.inference_mode()
def residual_losses(x: torch.Tensor, form: Form, books: torch.Tensor) -> torch.Tensor:
    """Mean squared residuals `[B, R]` of vectors `[B, n, d]` after each round of centres `[B, R, N, d]`."""
    losses = []
    for book in books.unbind(1):
        _, x = assign(x, form, book)
        losses.append(mean_square(x))
    return torch.stack(losses, 1)


def start_centres(sample: torch.Tensor, form: Form, centres: int, generator: torch.Generator) -> torch.Tensor:
    """Random vectors of the sample, shortened: a point of the complex form is the sum of two centres."""
    chosen = torch.randint(sample.shape[1], (centres,), generator=generator)
    return sample[:, chosen.to(sample.device)] * (0.5 if isinstance(form, ComplexForm) else 0.7)


def uses(codes: torch.Tensor, centres: int) -> torch.Tensor:
    """Number of uses of each centre, `[B, N]`."""
    return torch.stack([_count(code, centres) for code in codes.unbind(-1)]).sum(0)


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Mean squared length `[B]` of vectors `[B, n, d]`."""
    return x.square().sum(-1).mean(-1)


def reseed(centres: torch.Tensor, uses: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move unused centres next to the most used ones, which never raises the loss of hard codes."""
    centres = centres.clone()
    for row in (uses == 0).any(-1).nonzero().flatten().tolist():
        dead = (uses[row] == 0).nonzero().flatten()
        donors = centres[row, uses[row].argsort(descending=True)[: len(dead)]]
        noise = torch.randn(donors.shape, generator=generator).to(donors)
        centres[row, dead[: len(donors)]] = donors + 0.1 * noise * donors.square().mean(-1, keepdim=True).sqrt()
    return centres


def _by_pairs(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 2))


def _flat(codes: torch.Tensor, count: int) -> torch.Tensor:
    return (codes + count * torch.arange(len(codes), device=codes.device)[:, None]).flatten()


def _count(codes: torch.Tensor, count: int) -> torch.Tensor:
    return torch.bincount(_flat(codes, count), minlength=len(codes) * count).view(len(codes), count).float()


def _sums(x: torch.Tensor, codes: torch.Tensor, count: int) -> torch.Tensor:
    """Sum of the vectors of each code, `[B, N, d]`."""
    sums = x.new_zeros(len(x) * count, x.shape[-1])
    return sums.index_add_(0, _flat(codes, count), x.flatten(0, 1)).unflatten(0, (len(x), count))
