"""Heads that share a layer's rounds: what their errors cost, how rounds follow from it, and codes in shared bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support.commvq_files import HEADS, codebook_file

from kvcache_compress.methods.commvq import additive
from kvcache_compress.methods.commvq.calibration.queries import STEP, token_costs
from kvcache_compress.methods.commvq.codebook_file import share_rounds
from kvcache_compress.methods.commvq.residual import ResidualBooks
from kvcache_compress.modeling.calibration.observed_attention import RECENT, SINKS

Make = Callable[..., Any]


def test_tokens_cost_what_attention_makes_of_their_errors() -> None:
    """Costs are the weights of squared errors in scores, p (1 - p) |q|², and in outputs, p², and a tenth the mean."""
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(4, 200, 16, generator=generator), torch.randn(2, 200, 16, generator=generator)
    costs = token_costs(query, keys, {"scaling": 0.5})
    assert costs.shape == (2, 2, 200)
    expected = torch.zeros(2, 2, 200)
    for head, at in product(range(4), range(SINKS + RECENT, 200, STEP)):
        p = (0.5 * keys[head // 2, : at + 1] @ query[head, at]).softmax(0)
        p[:SINKS], p[at + 1 - RECENT :] = 0, 0
        expected[0, head // 2, : at + 1] += p * (1 - p) * query[head, at].square().sum()
        expected[1, head // 2, : at + 1] += p * p
    expected = 0.9 * expected + 0.1 * expected.mean((1, 2), keepdim=True)
    torch.testing.assert_close(costs, expected)
    assert (token_costs(query[:, :64], keys[:, :64], {}) == 1).all(), "no query sees a token that would be encoded"


@pytest.mark.parametrize(("groups", "bits"), [(1, 12), (2, 6), (1, 5)])
def test_bytes_are_shared_where_they_lower_the_error_most(groups: int, bits: int) -> None:
    """No other share of as many bytes has less error in all."""
    fall = torch.rand(3, 1, generator=torch.Generator().manual_seed(bits))
    errors = torch.tensor([[1.0], [0.1], [0.02]]) * (0.5 + 0.4 * fall) ** torch.arange(9)

    def size(rounds: tuple[int, ...]) -> int:
        return sum(additive.code_bytes(groups * count, bits) for count in rounds)

    most = size((4, 4, 4))
    found = share_rounds(errors.tolist(), groups, bits, most)
    assert size(found) <= most
    assert len(set(found)) > 1
    others = [rounds for rounds in product(range(1, 9), repeat=3) if size(rounds) <= most]
    least = min(sum(float(errors[head, count]) for head, count in enumerate(rounds)) for rounds in others)
    assert sum(float(errors[head, count]) for head, count in enumerate(found)) == pytest.approx(least)


def test_a_round_that_raises_the_error_on_held_out_text() -> None:
    """Later rounds are used if they make up for it, and left out if not."""
    assert share_rounds([[1.0, 0.5, 0.4, 0.6, 0.1], [1.0, 0.9, 0.95, 0.95]], 1, 8, 100) == (4, 1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("parts", [(2, 16), (32,)])
@pytest.mark.parametrize("rounds", [(8, 4, 1), (1, 5, 5), (3, 3, 3)])
def test_heads_with_unequal_rounds(groups: int, parts: tuple[int, ...], rounds: tuple[int, ...]) -> None:
    """Each head is coded as if all had as many rounds as it has, and its codes come back from the shared bytes."""
    generator = torch.Generator().manual_seed(len(parts))
    *pair, width = parts
    books = torch.randn(3, groups, 8, 64, *pair, width // groups, generator=generator)
    books = (books * 0.7 ** torch.arange(1, 9).view(-1, *[1] * (1 + len(parts)))).half()
    z = torch.randn(2, 3, 20, 32, generator=generator)
    row = -(-sum(additive.code_bytes(groups * count, 6 * len(parts)) for count in rounds) // 3)
    shared = ResidualBooks.of_heads(books, rounds, row)
    packed, points = shared.encode(z, None)
    assert packed.shape == (2, 3, 20, row)
    torch.testing.assert_close(shared.decode(packed), points)
    for head, count in enumerate(rounds):
        even = ResidualBooks.of_heads(books, (count,) * 3, additive.code_bytes(groups * count, 6 * len(parts)))
        torch.testing.assert_close(even.encode(z, None)[1][:, head], points[:, head])


def test_heads_share_the_rounds_of_the_file(make_codec: Make) -> None:
    """A file with errors has rounds to spare; by default heads share the bytes of those it was calibrated for."""
    path = codebook_file(64, key_shape=(4, 64), shared=True)
    codec = make_codec("commvq", 64, "keys", heads=HEADS, codebooks=path)
    first, second = codec.books.rounds
    assert first > 4 > second
    assert codec.fields[0].bytes_per_token == additive.code_bytes(4, 12)
    assert codec.books.books.shape == (first + second, 64, 2, 32)
    more = make_codec("commvq", 64, "keys", heads=HEADS, codebooks=path, bits=1.5)
    assert more.books.rounds == (8, 8), "all that there are"
