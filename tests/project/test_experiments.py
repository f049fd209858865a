"""`docs/dev/experiments.md`: its tables are those of the result files, and what it says of them holds."""

import itertools
import json
import statistics
from typing import Any

import experiments
import experiments_likelihood
import pytest


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((experiments.RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def test_tables_are_those_of_the_result_files() -> None:
    page = experiments.PAGE.read_text(encoding="utf-8")
    assert experiments.rendered() == page, "run: python benchmarks/experiments.py page"


def test_prefix_code_is_the_best_one() -> None:
    """Probabilities of powers of two are coded in their entropy; equal thirds in 1, 2 and 2 bits."""
    assert experiments.prefix_code_bits([0.5, 0.25, 0.125, 0.125]) == 1.75
    assert experiments.prefix_code_bits([1 / 3] * 3) == pytest.approx(5 / 3)


def test_claims_about_codes_and_angles_hold() -> None:
    codes = {row["bits"]: row for row in rows("codes")}
    assert 0.03 < 1 - codes[4]["prefix_code"] / 4 < 0.06
    assert all(row["entropy"] <= row["prefix_code"] <= row["bits"] for row in codes.values())
    mean = {(row["level"], row["preconditioned"]): statistics.fmean(row["distance"]) for row in rows("angles")}
    assert all(mean[level, True] < mean[level, False] for level in range(1, experiments.LEVELS + 1))
    assert mean[4, True] < 0.4 * mean[4, False]


def test_prod_loses_more_than_twice_as_much() -> None:
    kl = {(row["sinks"], row["bits"], row["estimator"]): row["kl"] for row in rows("prod")}
    for sinks, _ in experiments.WINDOWS:
        assert all(kl[sinks, bits, "prod"] > 2 * kl[sinks, bits, "mse"] for bits in (3, 4))


def test_commvq_loses_less_with_more_pairs_centres_and_rounds() -> None:
    losses = {(row["g"], row["centres"]): row["held_out"] for row in rows("commvq")}
    mean = {pair: [statistics.fmean(of_round) for of_round in zip(*of, strict=True)] for pair, of in losses.items()}
    for by_round in mean.values():
        assert all(later < earlier for earlier, later in itertools.pairwise(by_round))
    for layers in (mean, {pair: of[0] for pair, of in losses.items()}):
        for rounds in (1, 8):
            by_pairs = [layers[pair][rounds - 1] for pair in ((8, 2), (16, 4), (32, 16))]
            assert by_pairs == sorted(by_pairs, reverse=True)
        assert layers[32, 4][15] > layers[32, 16][7]


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


def test_claims_about_times_hold() -> None:
    decode = {row["cache"]: row["decode_seconds"] for row in rows("generation")}
    assert decode["quanto-4"] > 1.5 * decode["full"]
    assert all(
        0.35 < seconds / decode["full"] < 0.7 for name, seconds in decode.items() if name[:2] in ("ki", "po", "tu")
    )
    assert decode["polarquant-paper-online"] == pytest.approx(decode["polarquant-paper-offline"], rel=0.05)
    ratios: dict[str, list[float]] = {}
    for row in rows("scores"):
        ratios.setdefault(row["way"], []).append(row["ratio"])
    assert min(ratios["lookup"]) > 2.5
    assert min(ratios["commvq-2bit"]) > 2
    assert max(ratios["turboquant-2bit"]) < 1


def test_claims_about_likelihoods_hold() -> None:
    by_cache = {row["cache"]: row for row in rows("likelihood")}
    dense, full = by_cache[None], by_cache["full"]
    pairs = zip(itertools.chain(*full["scores"]), itertools.chain(*dense["scores"]), strict=True)
    assert all(abs(ours - theirs) < 1e-3 for ours, theirs in pairs)
    right = {name: experiments_likelihood.right_scores(row) for name, row in by_cache.items()}
    change = {name: statistics.fmean(of) - statistics.fmean(right[None]) for name, of in right.items()}
    assert abs(change["turboquant-4bit"]) < 0.01
    assert -0.5 < change["turboquant-2bit"] < -0.3
    rise = {name: row["word_perplexity"] / dense["word_perplexity"] - 1 for name, row in by_cache.items()}
    assert 0.02 < rise["turboquant-2bit"] < 0.035
    assert 0.15 < rise["kivi-2bit"] < 0.175
