"""Train the paper's encoder of values (CommVQ, section 4.1), which gives each token one bit per row of a codebook.

A token's values of all heads make one vector v of length 1; its bits are `s = [W2 GELU(W1 v + b1) + b2 > 0]`, and it
decodes to `s C`. Training is gradient descent on the squared error: bits are drawn with logistic noise, the binary case
of Gumbel-softmax, with a straight-through gradient of their soft version. The noise falls to zero, so that training
ends at the deterministic codes of inference; the codebook is then the least-squares one for those codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

_RIDGE = 1e-4
"""Weight of the trained codebook in the final least-squares solve, relative to the mean uses of a row."""


@dataclass(frozen=True)
class EncoderSchedule:
    """Schedule of Adam on batches of tokens; `hidden` is the hidden size in multiples of the token's."""

    steps: int = 1200
    batch: int = 512
    learning_rate: float = 2e-3
    hidden: int = 4


def encoder_bits(network: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Bits `[n, bits]` of normalized tokens `[n, H * D]`, as floats 0 and 1."""
    return (_logits(network, tokens) > 0).to(tokens.dtype)


def _logits(network: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(F.linear(tokens, network["weight1"], network["bias1"]))
    return F.linear(hidden, network["weight2"], network["bias2"])


def train_encoder(
    tokens: torch.Tensor,
    bits: int,
    schedule: EncoderSchedule,
    generator: torch.Generator,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[dict[str, torch.Tensor], float]:
    """Train the encoder on normalized tokens `[n, H * D]`, float32.

    Returns:
        `weight1`, `bias1`, `weight2`, `bias2` and `codebook` (see `codebook_file`), and the mean squared error.
    """
    width = tokens.shape[1]
    hidden = schedule.hidden * width

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(tokens)

    network = {
        "weight1": normal(hidden, width),
        "bias1": torch.zeros(hidden).to(tokens),
        "weight2": normal(bits, hidden) * (2 / hidden) ** 0.5,
        "bias2": torch.zeros(bits).to(tokens),
        "codebook": normal(bits, width) / (width * bits) ** 0.5,
    }
    for tensor in network.values():
        tensor.requires_grad_(True)
    optimizer = torch.optim.Adam(network.values(), lr=schedule.learning_rate)
    decay = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.learning_rate, total_steps=schedule.steps)
    for step in range(schedule.steps):
        batch = tokens[torch.randint(len(tokens), (schedule.batch,), generator=generator).to(tokens.device)]
        logits = _logits(network, batch)
        uniform = torch.rand(logits.shape, generator=generator).clamp_(1e-6, 1 - 1e-6).to(tokens)
        soft = torch.sigmoid(logits + max(0.0, 1 - 1.25 * step / schedule.steps) * torch.logit(uniform))
        hard = (soft > 0.5).to(soft) - soft.detach() + soft
        loss = (batch - hard @ network["codebook"]).square().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        on_step()
    trained = {name: tensor.detach().half().to(tokens) for name, tensor in network.items()}
    codes = encoder_bits(trained, tokens)
    trained["codebook"] = _least_squares(codes, tokens, trained["codebook"]).half().to(tokens)
    return trained, encoder_loss(trained, tokens)


def encoder_loss(network: dict[str, torch.Tensor], tokens: torch.Tensor) -> float:
    """Mean squared error of normalized tokens `[n, H * D]`."""
    return (tokens - encoder_bits(network, tokens) @ network["codebook"]).square().sum(-1).mean().item()


def _least_squares(codes: torch.Tensor, tokens: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Codebook with the least squared error for these codes; unused rows stay."""
    gram = (codes.mT @ codes).double()
    ridge = _RIDGE * gram.diagonal().mean().clamp_min(1e-9)
    gram.diagonal().add_(ridge)
    return torch.linalg.solve(gram, (codes.mT @ tokens).double() + ridge * codebook.double()).to(tokens)
