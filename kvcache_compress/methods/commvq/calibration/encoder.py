"""Train the paper's encoder of values (CommVQ, section 4.1), which gives each token one bit per row of a codebook.

A token's values of all heads make one vector v of length 1; its bits are `s = [W2 GELU(W1 v + b1) + b2 > 0]`, and it
decodes to `s C`. Training is gradient descent on the squared error: bits are drawn with logistic noise, the binary case
of Gumbel-softmax, with a straight-through gradient of their soft version. The noise falls to zero, so that training
ends at the deterministic codes of inference; the codebook is then the least-squares one for those codes.
"""

from dataclasses import dataclass

import torch

from kvcache_compress.methods.commvq.bit_encoder import logits

_RIDGE = 1e-4
"""Weight of the trained codebook in the least-squares one, relative to the mean uses of a row: unused rows stay."""


@dataclass(frozen=True)
class EncoderSchedule:
    """Schedule of Adam on batches of tokens; `hidden` is the hidden size in multiples of the token's."""

    steps: int = 1200
    batch: int = 512
    learning_rate: float = 2e-3
    hidden: int = 4


def train_encoder(
    tokens: torch.Tensor, bits: int, schedule: EncoderSchedule, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Train the encoder on normalized float32 tokens `[n, H * D]`; tensors are rounded to float16."""
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
        uniform = torch.rand((len(batch), bits), generator=generator).clamp_(1e-6, 1 - 1e-6).to(tokens)
        noise = max(0.0, 1 - 1.25 * step / schedule.steps) * torch.logit(uniform)
        soft = torch.sigmoid(logits(network, batch) + noise)
        hard = (soft > 0.5).to(soft) - soft.detach() + soft
        optimizer.zero_grad()
        (batch - hard @ network["codebook"]).square().sum(-1).mean().backward()
        optimizer.step()
        decay.step()
    trained = {name: tensor.detach().half().to(tokens) for name, tensor in network.items()}
    codes = (logits(trained, tokens) > 0).to(tokens)
    gram = (codes.mT @ codes).double()
    ridge = _RIDGE * gram.diagonal().mean().clamp_min(1e-9)
    gram.diagonal().add_(ridge)
    sums = (codes.mT @ tokens).double() + ridge * trained["codebook"].double()
    trained["codebook"] = torch.linalg.solve(gram, sums).half().to(tokens)
    return trained


def encoder_loss(network: dict[str, torch.Tensor], tokens: torch.Tensor) -> float:
    """Mean squared error of normalized tokens `[n, H * D]`."""
    codes = (logits(network, tokens) > 0).to(tokens)
    return (tokens - codes @ network["codebook"]).square().sum(-1).mean().item()
