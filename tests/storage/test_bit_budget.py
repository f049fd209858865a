"""`BitBudget`: the bits of layers and sides from their losses; and the losses of a layer's attention output."""

from typing import Any

import pytest
import torch

from kvcache_compress.codecs.base import SIDES, Codec, CodecContext, Prompt, Side
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.codecs.padding import LeftPadding
from kvcache_compress.config import SideConfig
from kvcache_compress.storage.adaptive.bit_budget import BITS_APART, BitBudget, output_losses

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
    """Layers that give their losses to a budget, and the bits that they get."""

    def __init__(self) -> None:
        self.budget = BitBudget(range(LAYERS), PLANNED)
        self.bits: dict[int, list[float]] = {}

    def choose(self, layer: int, keys: float, values: float, tokens: int = 1000) -> None:
        codecs: dict[Side, Codec] = {side: codec(side, layer) for side in SIDES}
        chosen = self.budget.choose(layer, codecs, {"keys": keys, "values": values}, tokens)
        self.budget.spend(layer, chosen)
        self.bits[layer] = [chosen[side].options.bits for side in SIDES]


def test_equal_losses_keep_the_bits() -> None:
    layers = Layers()
    for layer in range(LAYERS):
        layers.choose(layer, 1e-3, 1e-3)
    assert list(layers.bits.values()) == [[2, 2]] * LAYERS


@pytest.mark.parametrize("seed", range(3))
def test_the_budget_is_kept(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = Layers()
    for layer in range(LAYERS):
        losses = 1e-3 * torch.randn(2, generator=generator).mul(2).exp()
        layers.choose(layer, *losses.tolist())
    spent = sum(layers.budget.spent.values())
    # No side could take another bit.
    assert LAYERS * PLANNED - DIM / 8 < spent <= LAYERS * PLANNED
    assert all(abs(bits - 2) <= BITS_APART for pair in layers.bits.values() for bits in pair)
    assert len(set(map(tuple, layers.bits.values()))) > 2


def test_layers_that_keep_their_bits_count() -> None:
    """One that kept more than its share leaves less to the others; one that has not come keeps its share."""
    layers = Layers()
    layers.budget.spend(0, {"keys": codec("keys", bits=4), "values": codec("values", bits=4)})
    for layer in range(1, LAYERS - 1):
        layers.choose(layer, 1e-3, 1e-3)
    assert sum(layers.budget.spent.values()) <= (LAYERS - 1) * PLANNED
    assert min(layers.bits.values()) < [2, 2]


def test_bits_below_all_choices_can_be_kept() -> None:
    keys = SideConfig.of({"method": "spectral", "bits": 0.5})
    context = CodecContext("keys", DIM, 2, 0, 0, 0, torch.float32, torch.device("cpu"))
    codecs: dict[Side, Codec] = {"keys": keys.codec()(keys.options(), context), "values": codec("values", bits=1)}
    budget = BitBudget(range(2), size(*codecs.values()))
    for layer in range(2):
        budget.spend(layer, budget.choose(layer, codecs, {"keys": 1e-3, "values": 1e-3}, 1000))
    assert sum(budget.spent.values()) <= 2 * budget.planned


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e4])
def test_any_scale_of_losses(scale: float) -> None:
    layers = Layers()
    for layer in range(LAYERS):
        layers.choose(layer, scale * 16 ** (layer % 2), scale)
    assert layers.bits[3][0] == layers.bits[2][0] + 2


def test_few_tokens_keep_the_bits_nearly_equal() -> None:
    spread = []
    for tokens in (32, 256, 4096):
        layers = Layers()
        for layer in range(LAYERS):
            layers.choose(layer, 1e-3 * 64 ** (layer % 2), 1e-3, tokens)
        spread.append(layers.bits[3][0] - layers.bits[2][0])
    assert spread == [0, 2, 3]  # 64 times the loss is three bits


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
    assert found is not None

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


def test_padding_changes_no_loss() -> None:
    tokens, padding, sinks, recent = 448, 192, 8, 32
    generator = torch.Generator().manual_seed(0)
    keys, values, query = (torch.randn(1, 2, tokens, DIM, generator=generator) for _ in range(3))
    codecs: dict[Side, Codec] = {side: codec(side) for side in SIDES}

    def losses(count: int) -> dict[Side, float]:
        rows = LeftPadding(torch.tensor([count]), count)
        k, v, q = (torch.cat([50 * torch.ones(1, 2, count, DIM), x], 2) for x in (keys, values, query))
        rows.exchange_(k.mT, sinks)
        rows.exchange_(v.mT, sinks)
        call = AttentionCall.of(q, scaling=DIM**-0.5)
        prompt = Prompt(k[:, :, :sinks], k[:, :, sinks:], recent, queries=call, padding=rows)
        found = output_losses(codecs, prompt, v)
        assert found is not None
        return found

    alone, padded = losses(0), losses(padding)
    for side in SIDES:
        assert padded[side] == pytest.approx(alone[side], rel=0.1)
