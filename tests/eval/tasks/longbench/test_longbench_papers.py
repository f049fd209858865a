"""Averages of the papers' LongBench tables, computed again from their columns."""

import pytest

from kvcache_compress.eval.tasks.longbench.data import GROUPS, TASKS
from kvcache_compress.eval.tasks.longbench.scores import aggregate

HALF_A_DIGIT = 0.005 + 1e-9
BY_TASK = {
    # PolarQuant (Wu et al., arXiv:2502.00527), table 1.
    "narrativeqa qasper multifieldqa_en 2wikimqa hotpotqa musique gov_report qmsum multi_news trec triviaqa samsum": """
        19.36 21.82 36.90 29.59 27.50 8.05 26.83 20.73 26.39 64.50 83.31 41.56 33.88
        18.55 21.03 36.38 30.88 27.01 7.54 27.30 20.67 26.02 64.50 83.67 41.47 33.75""",
    # CommVQ (Li et al., 2025), table 1.
    "qasper qmsum multi_news trec triviaqa samsum lcc repobench-p": """
        25.19 23.31 26.82 72.50 91.65 43.49 52.47 49.01 48.05
        24.67 24.36 26.48 72.50 91.92 43.98 53.02 46.92 47.98""",
}
# PolarQuant (Han et al., arXiv:2502.02617), table 1: the six groups, and their mean.
RECURSIVE = ("45.71 45.32 26.69 68.62 59.25 46.17 48.63", "45.45 45.13 26.42 68.54 59.57 45.13 48.37")
# TurboQuant (Zandieh et al., arXiv:2504.19874), table 1: the six groups of LongBench-E, and the mean over its tasks.
TURBOQUANT = ("45.29 45.16 26.55 68.38 59.54 46.28 50.06", "44.16 44.96 24.80 68.01 59.65 45.76 49.44")


@pytest.mark.parametrize(("names", "row"), [(n, row) for n, rows in BY_TASK.items() for row in rows.split("\n")[1:]])
def test_average_over_tasks(names: str, row: str) -> None:
    *columns, printed = map(float, row.split())
    assert abs(aggregate(dict(zip(names.split(), columns, strict=True)))["average"] - printed) <= HALF_A_DIGIT


@pytest.mark.parametrize("row", RECURSIVE)
def test_recursive_polarquant_averages_the_groups(row: str) -> None:
    *columns, printed = map(float, row.split())
    groups = dict(zip(GROUPS, columns, strict=True))
    averages = aggregate({name: groups[task.group] for name, task in TASKS.items() if task.language == "en"})
    assert {group: averages[group] for group in GROUPS} == pytest.approx(groups)
    assert abs(averages["group_average"] - printed) <= HALF_A_DIGIT


@pytest.mark.parametrize("row", TURBOQUANT)
def test_turboquant_averages_the_tasks_of_longbench_e(row: str) -> None:
    *columns, printed = map(float, row.split())
    groups = dict(zip(GROUPS, columns, strict=True))
    averages = aggregate({name: groups[task.group] for name, task in TASKS.items() if task.in_e})
    assert abs(averages["average"] - printed) <= 2 * HALF_A_DIGIT  # each group's columns are themselves rounded
    assert abs(averages["group_average"] - printed) > 1


def test_groups_by_hand() -> None:
    scores = aggregate({"qasper": 10.0, "narrativeqa": 20.0, "trec": 60.0})
    assert scores == pytest.approx(
        {"average": 30.0, "single_document_qa": 15.0, "few_shot": 60.0, "group_average": 37.5}
    )
    for wrong in ({"squad": 1.0}, {}):
        with pytest.raises(ValueError, match="tasks "):
            aggregate(wrong)
