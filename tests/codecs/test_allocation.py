"""Allocation of a budget among units: the least loss of all shares."""

import itertools
import random
from typing import Any

import pytest

from kvcache_compress.codecs.allocation import allocate


@pytest.mark.parametrize("seed", range(8))
def test_no_other_share_loses_less(seed: int) -> None:
    dice = random.Random(seed)
    counts = [dice.randint(1, 4) for _ in range(5)]
    costs = [[dice.randint(1, 40) for _ in range(count)] for count in counts]
    losses = [[dice.random() for _ in range(count)] for count in counts]
    budget = dice.randint(sum(map(min, costs)), 150)

    def total(chosen: Any, numbers: list[list[Any]]) -> Any:
        return sum(of_unit[number] for of_unit, number in zip(numbers, chosen, strict=True))

    fitting = [x for x in itertools.product(*map(range, counts)) if total(x, costs) <= budget]
    found = allocate(costs, losses, budget)
    assert total(found, costs) <= budget
    assert total(found, losses) == pytest.approx(min(total(x, losses) for x in fitting))


def test_a_budget_below_the_cheapest_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget=3: the cheapest choices cost 4"):
        allocate([[2, 5], [2]], [[1, 0], [1]], 3)
