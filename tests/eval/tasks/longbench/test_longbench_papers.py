"""Averages of the papers' LongBench tables, computed again from their columns."""

import statistics

import pytest

from kvcache_compress.eval.tasks.longbench.data import GROUPS, TASKS
from kvcache_compress.eval.tasks.longbench.scores import aggregate

HALF_A_DIGIT = 0.005 + 1e-9


def table(text: str) -> dict[str, tuple[list[float], float]]:
    """Columns and printed average by row name."""
    rows = [line.split("|") for line in text.strip().splitlines()]
    numbers = {name.strip(): [float(number) for number in columns.split()] for name, columns in rows}
    return {name: (columns[:-1], columns[-1]) for name, columns in numbers.items()}


# PolarQuant (Wu et al., arXiv:2502.00527), table 1.
ROPE_TASKS = (
    "narrativeqa qasper multifieldqa_en 2wikimqa hotpotqa musique gov_report qmsum multi_news trec triviaqa samsum"
)
ROPE = table("""
llama-2 fp16       | 19.36 21.82 36.90 29.59 27.50 8.05 26.83 20.73 26.39 64.50 83.31 41.56 33.88
llama-2 KVQuant    | 18.88 17.60 32.98 30.79 24.74 8.40 25.64 20.67 25.96 64.50 83.61 41.29 32.92
llama-2 KIVI       | 18.75 21.44 36.30 30.58 27.21 7.55 26.76 20.92 26.19 64.50 82.90 41.47 33.71
llama-2 PolarQuant | 18.55 21.03 36.38 30.88 27.01 7.54 27.30 20.67 26.02 64.50 83.67 41.47 33.75
mistral fp16       | 26.73 33.01 49.34 27.35 43.02 18.78 32.81 24.15 27.09 68.50 86.48 41.12 39.87
mistral KIVI       | 26.68 32.38 49.46 27.59 42.91 18.81 32.99 24.40 27.17 68.50 86.41 41.04 39.86
mistral PolarQuant | 27.43 32.58 49.54 26.61 42.55 18.65 32.52 24.00 27.09 68.50 86.64 41.78 39.82
llama-3.1 fp16     | 31.63 46.58 56.89 48.96 58.10 31.57 34.44 25.23 26.99 74.00 92.64 43.22 47.52
llama-3.1 KIVI     | 30.97 46.43 56.66 49.13 58.02 31.46 34.52 25.36 27.29 74.00 92.46 43.57 47.49
llama-3.1 PolarQuant | 32.50 46.16 56.73 48.97 57.91 31.67 34.04 25.47 26.76 74.00 92.86 43.07 47.51
""")
# Table 5 of the same.
ROPE_3BIT_TASKS = "narrativeqa qasper multifieldqa_en 2wikimqa hotpotqa musique trec triviaqa"
ROPE_3BIT = table("""
fp16            | 31.63 46.58 56.89 48.96 58.10 31.57 74.00 92.64 55.05
PolarQuant-m4n2 | 31.59 45.77 55.85 49.62 58.15 30.98 74.00 92.76 54.84
""")
# CommVQ (Li et al., 2025), table 1.
COMMVQ_TASKS = "qasper qmsum multi_news trec triviaqa samsum lcc repobench-p"
COMMVQ = table("""
FP16      | 25.19 23.31 26.82 72.50 91.65 43.49 52.47 49.01 48.05
KIVI-2    | 22.71 24.33 27.29 72.50 92.06 43.26 51.32 47.53 47.62
KVQuant-2 | 41.86 22.37 25.76 69.00 89.00 42.09 36.22 36.51 45.35
VQLLM-2   | 32.39 25.20 26.22 69.95 92.01 41.03 40.58 36.19 45.45
CommVQ-2  | 24.67 24.36 26.48 72.50 91.92 43.98 53.02 46.92 47.98
KIVI-1    | 4.99 9.57 9.20 38.75 25.07 11.93 17.67 16.40 16.70
KVQuant-1 | 1.01 8.71 6.06 1.00 1.50 6.64 11.01 11.09 5.88
VQLLM-1   | 11.92 17.91 13.12 47.98 63.34 23.72 18.92 22.44 27.42
CommVQ-1  | 18.86 23.02 24.34 69.00 91.61 41.83 48.78 42.08 44.94
""")
# PolarQuant (Han et al., arXiv:2502.02617), table 1: the six groups.
RECURSIVE = table("""
Exact                  | 45.71 45.32 26.69 68.62 59.25 46.17 48.63
SnapKV                 | 38.23 42.61 19.07 64.65 59.60 43.28 44.57
HeadKV                 | 39.45 42.69 19.77 68.07 59.48 42.60 45.34
PyramidKV              | 36.80 41.54 18.91 64.88 59.68 42.38 44.03
StreamingLLM           | 25.68 35.79 20.90 56.91 58.81 32.07 38.36
KIVI                   | 43.38 37.81 27.44 68.60 58.67 44.29 46.70
PolarQuant             | 44.03 44.34 27.32 68.68 59.82 44.46 48.11
PolarQuant-R (offline) | 44.71 44.72 26.43 68.58 60.08 45.20 48.29
PolarQuant-R (online)  | 45.45 45.13 26.42 68.54 59.57 45.13 48.37
""")
# TurboQuant (Zandieh et al., arXiv:2504.19874), table 1: the six groups of LongBench-E.
TURBOQUANT = table("""
llama-3.1 full          | 45.29 45.16 26.55 68.38 59.54 46.28 50.06
llama-3.1 KIVI 3        | 43.38 37.99 27.16 68.38 59.50 44.68 48.50
llama-3.1 KIVI 5        | 45.04 45.70 26.47 68.57 59.55 46.41 50.16
llama-3.1 PolarQuant    | 45.18 44.48 26.23 68.25 60.07 45.24 49.78
llama-3.1 TurboQuant 2.5 | 44.16 44.96 24.80 68.01 59.65 45.76 49.44
llama-3.1 TurboQuant 3.5 | 45.01 45.31 26.00 68.63 59.95 46.17 50.06
ministral full          | 47.53 49.06 26.09 66.83 53.50 47.90 49.89
ministral TurboQuant 2.5 | 48.38 49.22 24.91 66.69 53.17 46.83 49.62
""")
BY_TASK = [
    pytest.param(dict(zip(names.split(), columns, strict=True)), printed, id=f"{paper}-{row}")
    for paper, names, rows in (
        ("polarquant_rope", ROPE_TASKS, ROPE),
        ("polarquant_rope 3 bits", ROPE_3BIT_TASKS, ROPE_3BIT),
        ("commvq", COMMVQ_TASKS, COMMVQ),
    )
    for row, (columns, printed) in rows.items()
]


@pytest.mark.parametrize(("scores", "printed"), BY_TASK)
def test_average_over_tasks(scores: dict[str, float], printed: float) -> None:
    assert abs(aggregate(scores)["average"] - printed) <= HALF_A_DIGIT


def test_average_that_does_not_follow_from_its_columns() -> None:
    """KIVI-2 in PolarQuant's table 5: printed is 54.80, its columns give 54.81 (they are rounded, so 54.80 can be)."""
    columns = [31.80, 45.28, 56.74, 49.80, 57.60, 31.18, 73.50, 92.56]
    average = aggregate(dict(zip(ROPE_3BIT_TASKS.split(), columns, strict=True)))["average"]
    assert average == pytest.approx(54.8075)
    assert HALF_A_DIGIT < average - 54.80 <= 2 * HALF_A_DIGIT


@pytest.mark.parametrize("row", RECURSIVE)
def test_recursive_polarquant_averages_the_groups(row: str) -> None:
    columns, printed = RECURSIVE[row]
    groups = dict(zip(GROUPS, columns, strict=True))
    english = {name: groups[task.group] for name, task in TASKS.items() if task.language == "en"}
    averages = aggregate(english)
    assert {group: averages[group] for group in GROUPS} == pytest.approx(groups)
    assert abs(averages["group_average"] - printed) <= HALF_A_DIGIT


@pytest.mark.parametrize("row", TURBOQUANT)
def test_turboquant_averages_the_tasks_of_longbench_e(row: str) -> None:
    columns, printed = TURBOQUANT[row]
    groups = dict(zip(GROUPS, columns, strict=True))
    # Each group's columns are themselves rounded.
    averages = aggregate({name: groups[task.group] for name, task in TASKS.items() if task.in_e})
    assert abs(averages["average"] - printed) <= 2 * HALF_A_DIGIT
    assert abs(averages["group_average"] - printed) > 1


def test_groups_by_hand() -> None:
    scores = aggregate({"qasper": 10.0, "narrativeqa": 20.0, "trec": 60.0})
    assert scores == pytest.approx(
        {"average": 30.0, "single_document_qa": 15.0, "few_shot": 60.0, "group_average": 37.5}
    )
    assert next(iter(scores)) == "average"
    assert statistics.fmean([15.0, 60.0]) == scores["group_average"]
    with pytest.raises(ValueError, match=r"tasks \['squad'\]: allowed some of narrativeqa, qasper"):
        aggregate({"squad": 1.0})
    with pytest.raises(ValueError, match=r"tasks \[\]: allowed some of"):
        aggregate({})
