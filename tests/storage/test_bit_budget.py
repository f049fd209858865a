"""Which bits a budget gives to layers and sides, and the losses that it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache_compress.codecs.base import SIDES, Codec, CodecContext, Prompt, Side
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.config import SideConfig
from kvcache_compress.storage.bit_budget import BITS_APART, BitBudget, output_losses

LAYERS = 12
DIM = 64


def codec(side: Side, layer: int = 0, bits: float = 2, **options: Any) -> Codec:
    config = SideConfig.of({"method": "turboquant", "bits": bits, **options})
    made = config.codec()(config.options(), CodecContext(side, DIM, 2, layer, 0, 0, torch.float32, torch.device("cpu")))
    made.prepare(torch.zeros(1, 2, 1, DIM))
    return made


def size(*codecs: Codec) -> float:
    return sum(bytes_per_token(one.fields) for one in codecs)


PLANNED = size(codec("keys"), codec("values"))


class Layers:
    """Layers that offer losses to a budget, and the bits that they get."""

    def __init__(self, **options: Any) -> None:
        self.budget = BitBudget(dict.fromkeys(range(LAYERS), PLANNED), **options)
        self.bits: dict[int, list[float]] = {}

    def offer(self, layer: int, keys: float, values: float, tokens: int = 1000) -> None:
        def settle(codecs: dict[Side, Codec]) -> None:
            self.bits[layer] = [codecs[side].options.bits for side in SIDES]

        codecs: dict[Side, Codec] = {side: codec(side, layer) for side in SIDES}
        self.budget.offer(layer, codecs, {"keys": keys, "values": values}, settle, tokens)


def test_equal_losses_keep_the_bits() -> None:
    layers = Layers()
    for layer in range(LAYERS):
        layers.offer(layer, 1e-3, 1e-3)
    assert list(layers.bits.values()) == [[2, 2]] * LAYERS


def test_layers_choose_when_all_are_measured() -> None:
    layers = Layers()
    for layer in range(LAYERS):
        assert not layers.bits
        layers.offer(layer, 1e-3 * 16 ** (layer % 2), 1e-3)
    assert layers.bits.keys() == set(range(LAYERS))
    sensitive, others = layers.bits[1], layers.bits[0]
    # Sixteen times the loss is two bits more.
    assert sensitive[0] == others[0] + 2
    assert sum(layers.budget.spent.values()) == LAYERS * PLANNED


@pytest.mark.parametrize("held", [0, 10_000])
def test_the_budget_is_kept(held: int) -> None:
    generator = torch.Generator().manual_seed(held)
    layers = Layers(most_held=held)
    for layer in range(LAYERS):
        losses = 1e-3 * torch.randn(2, generator=generator).mul(2).exp()
        layers.offer(layer, *losses.tolist())
        assert (layer in layers.bits) == (held == 0 or layer == LAYERS - 1)
    spent = sum(layers.budget.spent.values())
    # No side could take another bit.
    assert LAYERS * PLANNED - DIM / 8 < spent <= LAYERS * PLANNED
    assert all(abs(bits - 2) <= BITS_APART for pair in layers.bits.values() for bits in pair)
    assert len(set(map(tuple, layers.bits.values()))) > 2


def test_long_prompts_do_not_wait() -> None:
    layers = Layers(most_held=100)
    layers.offer(0, 1e-3, 1e-3, tokens=101)
    layers.offer(1, 1e-3, 1e-3, tokens=100)
    assert layers.bits.keys() == {0}
    layers.budget.settle(1)
    assert layers.bits.keys() == {0, 1}
    assert not layers.budget.waiting


def test_a_layer_that_keeps_its_bits_is_waited_for_no_longer() -> None:
    layers = Layers()
    for layer in range(LAYERS - 1):
        layers.offer(layer, 1e-3, 1e-3)
    kept: dict[Side, Codec] = {"keys": codec("keys", bits=4), "values": codec("values", bits=4)}
    layers.budget.spend(LAYERS - 1, kept)
    assert sum(layers.budget.spent.values()) <= LAYERS * PLANNED
    assert min(layers.bits.values()) < [2, 2]


def test_forgotten_layers_have_spent_nothing() -> None:
    layers = Layers()
    for layer in range(LAYERS):
        layers.offer(layer, 1e-3 * (layer + 1), 1e-3)
    before = dict(layers.bits)
    for layer in range(LAYERS):
        layers.budget.forget(layer)
    for layer in range(LAYERS):
        layers.offer(layer, 1e-3 * (layer + 1), 1e-3)
    assert layers.bits == before


def test_losses_are_those_of_the_output() -> None:
    """Expected losses agree with those of attention over decoded tokens, one side at a time."""
    tokens, sinks, recent = 512, 8, 32
    generator = torch.Generator().manual_seed(0)
    keys, values, query = (torch.randn(1, 2, tokens, DIM, generator=generator) for _ in range(3))
    scaling = DIM**-0.5
    codecs: dict[Side, Codec] = {side: codec(side) for side in SIDES}
    call = AttentionCall.of(query, scaling=scaling)
    prompt = Prompt(keys[:, :, :sinks], keys[:, :, sinks:], recent, queries=call)
    found = output_losses(codecs, prompt, values)

    def output(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = scaling * query @ k.mT
        at = torch.arange(tokens)
        scores = scores.masked_fill(at > at[:, None], -torch.inf)
        # Dense tokens have no error.
        packed = (at >= sinks) & (at <= at[:, None] - recent)
        exact = scaling * query @ keys.mT
        scores = torch.where(packed, scores, exact.masked_fill(at > at[:, None], -torch.inf))
        p = scores.softmax(-1)
        return torch.where(packed, p, 0) @ v + torch.where(packed, 0, p) @ values

    exact, first = output(keys, values), sinks + recent
    for side, x in (("keys", keys), ("values", values)):
        coded = codecs[side].decode(codecs[side].encode(x))  # type: ignore[index]
        lossy = output(coded, values) if side == "keys" else output(keys, coded)
        loss = (lossy - exact)[:, :, first:].square().sum() / exact[:, :, first:].square().sum()
        assert found[side] == pytest.approx(loss.item(), rel=0.25)  # type: ignore[index]
