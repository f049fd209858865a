"""Optimal allocation of a budget: pick one option per unit so that the total loss is least."""

from collections.abc import Sequence

import numpy as np


def allocate(costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Return the index of each unit's option with the least total loss whose costs sum to at most `budget`.

    Solves the multiple-choice knapsack problem exactly, by dynamic programming over the budget spent. Units may differ
    in their number of options.
    """
    least = [min(of_unit) for of_unit in costs]
    spare = min(budget, sum(max(of_unit) for of_unit in costs)) - sum(least)
    if spare < 0:
        raise ValueError(f"budget={budget}: the cheapest choices cost {sum(least)}")
    best = np.zeros(spare + 1)
    taken = np.zeros((len(costs), spare + 1), dtype=np.int16)
    for unit, (of_unit, lost) in enumerate(zip(costs, losses, strict=True)):
        sums = np.full((len(of_unit), spare + 1), np.inf)
        for number, (cost, loss) in enumerate(zip(of_unit, lost, strict=True)):
            if (more := cost - least[unit]) <= spare:
                sums[number, more:] = best[: spare + 1 - more] + loss
        taken[unit] = sums.argmin(0)
        best = sums.min(0)
    chosen: list[int] = []
    left = int(best.argmin())
    for unit in reversed(range(len(costs))):
        chosen.append(int(taken[unit, left]))
        left -= costs[unit][chosen[-1]] - least[unit]
    return chosen[::-1]
