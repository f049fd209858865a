"""Experiments of the papers: what they are computed from."""

import experiments
import experiments_likelihood
import pytest


def test_prefix_code_is_the_best_one() -> None:
    """Probabilities of powers of two are coded in their entropy; equal thirds in 1, 2 and 2 bits."""
    assert experiments.prefix_code_bits([0.5, 0.25, 0.125, 0.125]) == 1.75
    assert experiments.prefix_code_bits([1 / 3] * 3) == pytest.approx(5 / 3)


def test_questions_have_the_words_that_follow_among_four_answers() -> None:
    words = [f"w{number}" for number in range(200)]
    found = experiments_likelihood.continuations(words, questions=6, context=50, answer=5)
    assert [row["label"] for row in found] == [0, 1, 2, 3, 0, 1]
    for row in found:
        follows = int(row["text"].split()[-1][1:]) + 1
        assert row["choices"][row["label"]] == " ".join(words[follows : follows + 5])
        assert len(set(row["choices"])) == 4
        assert not any(choice in row["text"] for choice in row["choices"])
    with pytest.raises(ValueError, match="questions=40: the text of 200 words allows fewer"):
        experiments_likelihood.continuations(words, questions=40, context=50, answer=5)
