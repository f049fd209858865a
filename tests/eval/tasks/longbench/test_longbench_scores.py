"""LongBench's metrics by hand, and as a module of `evaluate`."""

import sys

import evaluate
import pytest

from kvcache_compress.eval.tasks.longbench import metric as longbench_metric
from kvcache_compress.eval.tasks.longbench.scores import METRICS, best_score, first_line

CLASSES = ["City", "Country", "Other location", "location", "Food"]
WORDS = [f"w{index}" for index in range(1200)]


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "expected"),
    [
        ("qa_f1", "The red house!", "a RED house", 1.0),  # case, articles and punctuation do not count
        ("qa_f1", "the old red brick house", "red house", 2 * 2 / (4 + 2)),
        ("qa_f1", "red red", "red", 2 * 1 / (2 + 1)),  # each word as often as it is there
        ("qa_f1", "theater", "the ater", 0.0),
        ("qa_f1", "", "red", 0.0),
        # jieba cuts 我 / 来到 / 北京 / 清华大学 and 他 / 来到 / 清华大学.
        ("qa_f1_zh", "我来到北京清华大学。", "他来到清华大学", 2 * 2 / (4 + 3)),
        ("qa_f1_zh", "“ 清华大学”，！", "清华大学", 1.0),
        ("qa_f1_zh", "。", "清华大学", 0.0),
        # The benchmark's list of punctuation lacks this bracket, which therefore is a word.
        ("qa_f1_zh", "《清华大学", "清华大学", 2 / 3),
        ("rouge_l", "d c b a", "a b c d", 1 / 4),  # order counts within a sentence
        ("rouge_l", "c d. a b", "a b. c d", 1.0),  # but not of sentences
        ("rouge_l", "a a a b", "a b", 1.0),  # distinct words
        ("rouge_l", "A b", "a b", 1 / 2),
        # The union over sentences: a b of the first, c of the second; of 4 and 5 distinct words.
        ("rouge_l", "a b x. c", "a b c y z", 2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5)),
        ("rouge_l", "", "a", 0.0),
        ("rouge_l", "...", "a", 0.0),
        ("rouge_l", "a. ", "a", 2 * (1 / 2) * 1 / (3 / 2)),  # what is left behind the full stop is an empty word
        ("rouge_l", " ".join(WORDS), " ".join(WORDS[600:]), 2 * 0.5 / 1.5),
        ("rouge_l_zh", "我来到北京清华大学", "他来到清华大学", 2 * 2 / (4 + 3)),
        ("classification", "City or Country", "City", 0.5),
        ("classification", "Food", "City", 0.0),
        ("classification", "Other location", "Other location", 1.0),  # `location` is part of the right name
        ("classification", "Other location", "location", 0.5),
        ("count", "7", "7", 1.0),
        ("count", "7 or 8, no, 7 of 17", "7", 0.5),
        ("count", "seven", "7", 0.0),
        ("retrieval", "Paragraph 12", "Paragraph 12", 1.0),
        ("retrieval", "1 and 12", "Paragraph 12", 0.5),
        ("retrieval_zh", "段落3", "段落3", 1.0),
        ("retrieval_zh", "段落33", "段落3", 0.0),
        ("code_similarity", "\n\nreturn x\nmore", "return x", 1.0),
        ("code_similarity", "```python\n# a comment\n// another\nreturn x\n```", "return x", 1.0),
        ("code_similarity", "abcd", "abcx", 0.75),  # of 8 characters, 6 are common
        ("code_similarity", "ab", "abcd", 0.67),  # whole per cent
        ("code_similarity", "# only a comment", "x", 0.0),
    ],
)
def test_scores(metric: str, prediction: str, answer: str, expected: float) -> None:
    classes = [CLASSES] if metric == "classification" else []
    assert METRICS[metric](prediction, answer, *classes) == pytest.approx(expected)


def test_the_best_of_all_answers_counts() -> None:
    assert best_score("qa_f1", "red", ["blue", "red", "red house"]) == 1.0
    assert first_line("\n\nfirst\nsecond") == "first"
    with pytest.raises(ValueError, match="answer='twelve': must contain Paragraph N"):
        METRICS["retrieval"]("12", "twelve")
    with pytest.raises(ValueError, match="metric='f1'"):
        best_score("f1", "red", ["red"])
    with pytest.raises(ValueError, match=r"answers=\[\]"):
        best_score("qa_f1", "red", [])


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ImportError, match=r'pip install "kvcache-compress\[eval\]"'):
        METRICS["qa_f1_zh"]("a", "a")


def test_evaluate_loads_a_metric_by_path() -> None:
    predictions, references = ["City of 2 or 3", "Food"], [["a red house", "City"], ["Country"]]
    module = evaluate.load(longbench_metric.__file__, "classification")
    computed = module.compute(predictions=predictions, references=references, classes=["City", "of"])
    assert computed == {"classification": 0.25}
