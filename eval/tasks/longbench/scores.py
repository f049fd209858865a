"""LongBench's metrics, and the averages of its tables.

A metric takes a prediction and one right answer and returns 0 to 1, as LongBench's own `metrics.py` and `eval.py` do
(Bai et al., 2023, section 4 and table 1). `best_score` is the best over all right answers.
"""

import logging
import re
import statistics
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from kvcache_compress.validation import require

from .data import GROUPS, TASKS

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CHINESE_PUNCTUATION = (
    (0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0x3001, 0x3003), (0x300B, 0x3011),
    (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0xFE4F, 0xFE4F), (0xFF01, 0xFF0D), (0xFF0F, 0xFF0F),
    (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64),
)  # fmt: skip
"""The benchmark's punctuation beyond ASCII, as ranges; 《 and · are not part of it."""
_NO_ASCII = str.maketrans("", "", string.punctuation)
_NO_PUNCTUATION = _NO_ASCII | {code: None for first, last in _CHINESE_PUNCTUATION for code in range(first, last + 1)}


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of lower-case words without punctuation and articles, as in SQuAD."""
    return _f1(*(_ARTICLES.sub(" ", text.lower().translate(_NO_ASCII)).split() for text in (prediction, answer)))


def qa_f1_zh(prediction: str, answer: str) -> float:
    """F1 of the words that jieba finds, without punctuation and white space."""
    words = []
    for text in (prediction, answer):
        cut = ("".join(word.lower().translate(_NO_PUNCTUATION).split()) for word in _jieba().cut(text))
        words.append([word for word in cut if word])
    return _f1(*words)


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L as the package `rouge` 1.0.1 computes it, which the benchmark uses.

    Both texts are cut into sentences at each full stop, and into words at white space. Let u be the set of all words in
    a longest common subsequence of a sentence of one text and a sentence of the other, and m and n the numbers of
    *distinct* words. The result is the F1 of precision |u| / n and recall |u| / m. Case and punctuation count.
    """
    lcs_ind = require("rouge_score.rouge_scorer", "LongBench's scores", "rouge-score").lcs_ind
    predicted, wanted = ([part.split() or [""] for part in text.split(".") if part] for text in (prediction, answer))
    if not predicted or not wanted:
        return 0.0
    common = {ours[index] for theirs in wanted for ours in predicted for index in lcs_ind(ours, theirs)}
    precision = len(common) / len({word for sentence in predicted for word in sentence})
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    return 2 * precision * recall / (precision + recall) if common else 0.0


def rouge_l_zh(prediction: str, answer: str) -> float:
    """`rouge_l` of the words that jieba finds."""
    return rouge_l(*(" ".join(_jieba().cut(text)) for text in (prediction, answer)))


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / (number of classes named in the prediction) if the right one is among them, else 0.

    A class whose name is part of the right one's name does not count as named.
    """
    named = [name for name in classes if name in prediction and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """Share of the right number among all numbers in the prediction."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Score answers such as `Paragraph 7` or `段落7` by their number, with `count`."""
    match = re.search(r"(?:Paragraph |段落)(\d+)", answer)
    if match is None:
        raise ValueError(f"answer={answer!r}: must contain Paragraph N or 段落N")
    return count(prediction, match.group(1))


def code_similarity(prediction: str, answer: str) -> float:
    """Similarity of the first line of code: 1 - (insertions + deletions) / both lengths, rounded to whole per cent.

    Lines with a backtick, `#` or `//` are fences or comments, and are skipped.
    """
    fuzz = require("rapidfuzz.fuzz", "LongBench's scores", "rapidfuzz")
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(code, answer)) / 100


METRICS: dict[str, Callable[..., float]] = {
    metric.__name__: metric
    for metric in (qa_f1, qa_f1_zh, rouge_l, rouge_l_zh, classification, count, retrieval, code_similarity)
}


def best_score(metric: str, prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """A metric's best score over all right answers.

    Args:
        metric: a key of `METRICS`.
        prediction: the model's text.
        answers: right answers, at least one.
        classes: names of all classes, for `classification`.

    Raises:
        ValueError: The metric cannot read an answer.
        ImportError: The metric's package is not installed.
    """
    extra = (classes,) if metric == "classification" else ()
    return max(METRICS[metric](prediction, answer, *extra) for answer in answers)


def first_line(prediction: str) -> str:
    """The first non-empty line, for tasks in which models go on with more examples."""
    return prediction.lstrip("\n").split("\n")[0]


def aggregate(scores: Mapping[str, float]) -> dict[str, float]:
    """Averages of scores by task, as the papers print them.

    Returns:
        `average`, the mean over tasks (TurboQuant, CommVQ, PolarQuant with RoPE pairs); the mean of each group that has
        a task; and `group_average`, the mean over groups (LongBench's leaderboard, recursive PolarQuant).
    """
    members = {group: [score for name, score in scores.items() if TASKS[name].group == group] for group in GROUPS}
    groups = {group: statistics.fmean(values) for group, values in members.items() if values}
    overall = statistics.fmean(scores.values())
    return {"average": overall, **groups, "group_average": statistics.fmean(groups.values())}


def _f1(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def _jieba() -> ModuleType:
    jieba = require("jieba", "LongBench's scores", "jieba")
    jieba.setLogLevel(logging.WARNING)
    return jieba
