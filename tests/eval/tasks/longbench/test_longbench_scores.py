"""LongBench's metrics by hand, and as a module of `evaluate`."""

import sys

import evaluate
import pytest

from kvcache_compress.eval.tasks.longbench import metric as longbench_metric
from kvcache_compress.eval.tasks.longbench.scores import METRICS, best_score, first_line


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("The red house!", "a RED house", 1.0),  # case, articles and punctuation do not count
        ("the old red brick house", "red house", 2 * 2 / (4 + 2)),
        ("red red", "red", 2 * 1 / (2 + 1)),  # each word as often as it is there
        ("theater", "the ater", 0.0),
        ("", "red", 0.0),
    ],
)
def test_qa_f1(prediction: str, answer: str, expected: float) -> None:
    assert METRICS["qa_f1"](prediction, answer) == pytest.approx(expected)


def test_qa_f1_of_chinese_words() -> None:
    # jieba cuts 我 / 来到 / 北京 / 清华大学 and 他 / 来到 / 清华大学.
    assert METRICS["qa_f1_zh"]("我来到北京清华大学。", "他来到清华大学") == pytest.approx(2 * 2 / (4 + 3))
    assert METRICS["qa_f1_zh"]("“ 清华大学”，！", "清华大学") == 1.0
    assert METRICS["qa_f1_zh"]("。", "清华大学") == 0.0
    # The benchmark's list of punctuation lacks this bracket, which therefore is a word.
    assert METRICS["qa_f1_zh"]("《清华大学", "清华大学") == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("d c b a", "a b c d", 1 / 4),  # order counts within a sentence
        ("c d. a b", "a b. c d", 1.0),  # but not of sentences
        ("a a a b", "a b", 1.0),  # distinct words
        ("A b", "a b", 1 / 2),
        # The union over sentences: a b of the first, c of the second; of 4 and 5 distinct words.
        ("a b x. c", "a b c y z", 2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5)),
        ("", "a", 0.0),
        ("...", "a", 0.0),
        ("a. ", "a", 2 * (1 / 2) * 1 / (3 / 2)),  # what is left behind the full stop is an empty word
    ],
)
def test_rouge_l(prediction: str, answer: str, expected: float) -> None:
    assert METRICS["rouge_l"](prediction, answer) == pytest.approx(expected)


def test_rouge_l_of_long_sentences_and_chinese_words() -> None:
    words = [f"w{index}" for index in range(1200)]
    assert METRICS["rouge_l"](" ".join(words), " ".join(words[600:])) == pytest.approx(2 * 0.5 / 1.5)
    assert METRICS["rouge_l_zh"]("我来到北京清华大学", "他来到清华大学") == pytest.approx(2 * 2 / (4 + 3))


def test_classification() -> None:
    classes = ["City", "Country", "Other location", "location", "Food"]
    score = METRICS["classification"]
    assert score("City or Country", "City", classes) == 0.5
    assert score("Food", "City", classes) == 0.0
    assert score("Other location", "Other location", classes) == 1.0  # `location` is part of the right name
    assert score("Other location", "location", classes) == 0.5


def test_count_and_retrieval() -> None:
    assert METRICS["count"]("7", "7") == 1.0
    assert METRICS["count"]("7 or 8, no, 7 of 17", "7") == 0.5
    assert METRICS["count"]("seven", "7") == 0.0
    assert METRICS["retrieval"]("Paragraph 12", "Paragraph 12") == 1.0
    assert METRICS["retrieval"]("1 and 12", "Paragraph 12") == 0.5
    assert METRICS["retrieval_zh"]("段落3", "段落3") == 1.0
    assert METRICS["retrieval_zh"]("段落33", "段落3") == 0.0
    with pytest.raises(ValueError, match="answer='twelve': must contain Paragraph N"):
        METRICS["retrieval"]("12", "twelve")


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("\n\nreturn x\nmore", "return x", 1.0),
        ("```python\n# a comment\n// another\nreturn x\n```", "return x", 1.0),
        ("abcd", "abcx", 0.75),  # of 8 characters, 6 are common
        ("ab", "abcd", 0.67),  # whole per cent
        ("# only a comment", "x", 0.0),
    ],
)
def test_code_similarity(prediction: str, answer: str, expected: float) -> None:
    assert METRICS["code_similarity"](prediction, answer) == expected


def test_the_best_of_all_answers_counts() -> None:
    assert best_score("qa_f1", "red", ["blue", "red", "red house"]) == 1.0
    assert first_line("\n\nfirst\nsecond") == "first"
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
