"""Trellis-coded quantization: the levels of a code depend on the codes before it (Marcellin and Fischer, 1990).

The `2 ** (bits + 1)` levels are dealt in turn to four subsets. Bit 0 of a code is shifted into a register of `MEMORY`
bits. Two parities of the register choose the subset, and the code's other bits the level within it. So `bits` stored
bits select among the levels of `bits + 1` bits. Relative squared errors of Gaussian numbers at 1, 2 and 3 bits are
.292, .083 and .0226, against .363, .118 and .0345 for scalar codes. The parities are Ungerboeck's for 64 states. The
register runs through the codes in memory order (`packing.memory_order`). It starts with the token's last codes, so that
every number gains alike (tail-biting).

The encoder finds the path of least error through the trellis (Viterbi's algorithm) in integers, so that all back ends
agree to the bit. It first finds the state at the ends of a token from the `WARM_UP` numbers on either side.
"""

import math
from functools import reduce
from operator import xor
from typing import TypeAlias

import torch

from .. import packing
from ..base import Fields
from ..device import on_cpu
from .scalar import Scalar, stored_scalar

MEMORY = 6
STATES = 2**MEMORY
LOW_DELAYS, HIGH_DELAYS = (0, 1, 6), (2, 4)
"""Delays of the register bits whose parities are bit 0 and bit 1 of the subset's number."""
WARM_UP = 16
STEPS = 256
"""Integer units per standard deviation of a coordinate."""
UNREACHABLE = 1 << 29

_UPPER_LEVELS = {
    1: (-0.2631, 1.2215),
    2: (-0.1617, 0.5928, 1.0356, 1.8568),
    3: (0.0794, 0.4860, 0.3107, 0.7384, 0.9700, 1.3150, 1.7647, 2.4532),
}
"""Upper half of the levels by bits, for coordinates of variance 1, from Lloyd's algorithm on unit vectors times √128.

They ascend within each subset, but neighbouring levels of different subsets have crossed."""
TRELLIS_BITS = tuple(_UPPER_LEVELS)
LEAST_WIDTH = 32
"""Fewest codes of a token for which a trellis gains; with 16 one-bit codes the error is that of scalar codes."""


@on_cpu()
def trellis_levels(dim: int, bits: int) -> torch.Tensor:
    """Levels for coordinates of unit vectors of `dim` numbers, float64 `[2 ** (bits + 1)]`, symmetric about zero."""
    upper = torch.tensor(_UPPER_LEVELS[bits], dtype=torch.float64) / math.sqrt(dim)
    return torch.cat([-upper.flip(0), upper])


def level_indices(codes: torch.Tensor) -> torch.Tensor:
    """Indices of the levels of codes `[..., width]`, both in memory order."""
    stream = codes & 1
    low, high = (reduce(xor, (stream.roll(delay, -1) for delay in delays)) for delays in (LOW_DELAYS, HIGH_DELAYS))
    return (codes >> 1) << 2 | high << 1 | low


def look_up(planes: tuple[torch.Tensor, ...], bits: int, levels: torch.Tensor) -> torch.Tensor:
    """Levels of packed codes: float32 `[..., width]`, in memory order."""
    return levels[level_indices(packing.memory_order(packing.unpack(planes, bits)))]


def quantize(z: torch.Tensor, norm: torch.Tensor, levels: torch.Tensor, bits: int, scalar: Scalar) -> Fields:
    """Pack the codes with the least squared error for unit vectors `z` `[..., width]`, and one scalar per vector.

    `levels` `[2 ** (bits + 1)]`; the scalar is that of `scalar.quantize`, in 16 bits.
    """
    ordered, width = packing.memory_order(z), z.shape[-1]
    path = best_path(in_steps(ordered, width).flatten(0, -2), in_steps(levels, width))
    codes, indices = (x.view(z.shape) for x in path)
    planes = packing.pack(packing.channel_order(codes), bits)
    point, numbers, norms = (x.double() for x in (levels[indices], ordered, norm))
    return (*planes, stored_scalar(numbers, point, norms, scalar))


def in_steps(x: torch.Tensor, width: int) -> torch.Tensor:
    """Round coordinates, or levels, of unit vectors of `width` numbers to integer units, int32."""
    return (x * (STEPS * math.sqrt(width))).round().int()


def best_path(z: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes closest to the rows of `z` `[n, width]`, and the indices of their levels, both int64 `[n, width]`.

    `levels` `[2 ** (bits + 1)]` and `z` are int32 in the same units.
    """
    free = torch.zeros(len(z), STATES, dtype=torch.int32, device=z.device)
    warm = min(WARM_UP, z.shape[-1])
    around = torch.cat([z[:, -warm:], z[:, :warm]], 1)
    cost, steps = _forward(around, levels, free)
    last = ((cost.long() * STATES) + torch.arange(STATES, device=z.device)).min(1).values % STATES
    for subset_choice, from_upper in reversed(steps[warm:]):
        last, _, _ = _backward(last, subset_choice, from_upper)
    _, steps = _forward(z, levels, torch.full_like(free, UNREACHABLE).scatter_(1, last[:, None], 0))
    state, codes, indices = last, [], []
    for subset_choice, from_upper in reversed(steps):
        state, code, index = _backward(state, subset_choice, from_upper)
        codes.append(code)
        indices.append(index)
    return torch.stack(codes[::-1], 1), torch.stack(indices[::-1], 1)


_Step: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Level chosen in each subset, int64 `[n, 4]`, and by new state, if the upper of its two predecessors is better."""


def _forward(z: torch.Tensor, levels: torch.Tensor, cost: torch.Tensor) -> tuple[torch.Tensor, list[_Step]]:
    """Least costs `[n, STATES]` of reaching each state after the columns of `z`, and the choices on the way.

    `cost` has the costs before the first column. A state holds the last bits, the newest in bit 0: state `2m + u` is
    reached from `m` and `m + STATES / 2`.
    """
    subsets = levels.view(-1, 4)
    middles = subsets[1:] + subsets[:-1]
    subset = _subset(torch.arange(STATES, device=z.device))
    steps = []
    for x in z.unbind(1):
        choice = (2 * x[:, None, None] > middles).sum(1)
        nearest = subsets.gather(0, choice)
        metric = nearest * (nearest - 2 * x[:, None])
        lower, upper = (half.repeat_interleave(2, 1) for half in cost.chunk(2, 1))
        lower, upper = lower + metric[:, subset], upper + metric[:, subset ^ 1]
        cost = torch.minimum(lower, upper)
        steps.append((choice, upper < lower))
    return cost, steps


def _backward(
    state: torch.Tensor, choice: torch.Tensor, from_upper: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The predecessor of `state` `[n]`, the code that led from it and the index of the code's level, each `[n]`."""
    upper = from_upper.gather(1, state[:, None])[:, 0].long()
    subset = _subset(state) ^ upper
    level = choice.gather(1, subset[:, None])[:, 0]
    return state >> 1 | upper << (MEMORY - 1), level << 1 | state & 1, level << 2 | subset


def _subset(state: torch.Tensor) -> torch.Tensor:
    """Subset on the way to a state, if the bit that left the register is 0; if it is 1, the lowest bit flips."""
    low, high = (reduce(xor, (state >> delay for delay in delays)) for delays in (LOW_DELAYS[:-1], HIGH_DELAYS))
    return (high & 1) << 1 | low & 1
