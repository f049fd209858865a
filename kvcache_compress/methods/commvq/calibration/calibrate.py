"""Calibrate CommVQ: train codebooks for a model on a text, and write them to a file (`codebook_file.py`)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.codecs.base import SIDES, Side, hashed_seed
from kvcache_compress.files.model_file import check_output
from kvcache_compress.methods.commvq.codebook_file import (
    CENTRES,
    codebook_facts,
    group_count,
    rounds_for,
    write_codebooks,
)
from kvcache_compress.modeling.calibration_text import Report, read_windows
from kvcache_compress.modeling.facts import calibrated_layers, head_shape

from .collect import collect, read_layer
from .em import ComplexForm, RealForm, Schedule, residual_losses, train_residual
from .encoder import EncoderSchedule, encoder_loss, train_encoder

HELD_OUT = 8
"""One window in `HELD_OUT`, and at least one, is not trained on: it measures the loss on new text of the same kind."""
QUICK_SCHEDULE = Schedule(soft_steps=4, soft_vectors=2048, hard_steps=3, hard_vectors=8192, full_steps=1)
QUICK_ENCODER = EncoderSchedule(steps=400)


@dataclass(frozen=True)
class CommVQSettings:
    """Settings of a calibration: size of the codes, amount of text, length of training.

    Attributes:
        bits: code bits per number, 1 or 2.
        tokens: calibration tokens, in windows of `context`; about one window in `HELD_OUT` is not trained on.
        context: tokens per window.
        values: `residual` codebooks (ours), or the paper's `encoder`.
        seed: seed of samples and starting points.
        schedule, encoder: steps of the training of residual codebooks, and of the encoder.
    """

    bits: int = 2
    tokens: int = 55_296
    context: int = 1024
    values: Literal["residual", "encoder"] = "residual"
    seed: int = 0
    schedule: Schedule = field(default_factory=Schedule)
    encoder: EncoderSchedule = field(default_factory=EncoderSchedule)

    def __post_init__(self) -> None:
        for name, fits, must in (
            ("bits", self.bits in (1, 2), "be 1 or 2"),
            ("values", self.values in ("residual", "encoder"), "be 'residual' or 'encoder'"),
            ("context", self.context >= 2, "be at least 2"),
            ("tokens", self.tokens >= 2 * self.context, f"make at least two windows of {self.context}"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)!r} for commvq must {must}")

    @classmethod
    def quick(cls, **changes: Any) -> "CommVQSettings":
        """Settings for a quick calibration, with less text and fewer steps."""
        short: dict[str, Any] = {"tokens": 18_432, "schedule": QUICK_SCHEDULE, "encoder": QUICK_ENCODER}
        return cls(**short | changes)

    def rounds(self, side: Side, head_dim: int) -> int:
        """Rounds of a side; the encoder counts as one."""
        if side == "values" and self.values == "encoder":
            return 1
        return rounds_for(self.bits, side, head_dim, group_count(head_dim))


def calibrate_commvq(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Sequence[str],
    output: Path,
    settings: CommVQSettings,
    report: Report,
) -> dict[str, Any]:
    """Train codebooks for every full-attention layer with RoPE, and write them to `output`.

    The keys and values of the text lie in a temporary folder beside the output. `report` is called after each step.
    Returns the losses by layer, as in the file (see `train_side`).

    Raises:
        ValueError: CommVQ does not support the model, the text cannot be read or is too short, keys are not finite, or
            the output cannot be a file.
        OSError: a file cannot be written.
    """
    check_output(output)
    config = model.config.get_text_config(decoder=True)
    layers = calibrated_layers(config)
    codebook_facts(config)  # refuses a model without RoPE
    head_dim, heads, _ = head_shape(config)
    windows, digest = read_windows(text, tokenizer, settings.tokens, settings.context)
    parts = split_windows(windows)
    data: dict[str, Any] = {"windows": len(parts[0]), "held_out_windows": len(parts[1])}
    data |= {"context": settings.context, "sha256": digest, "text": list(text)}
    data["dtype"] = str(model.dtype).removeprefix("torch.")
    tensors: dict[str, torch.Tensor] = {}
    losses: dict[str, Any] = {str(layer): {} for layer in layers}
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output.absolute().parent, prefix=f".{output.name}.") as folder:
        folders = [Path(folder, name) for name in ("training", "held_out")]
        on_step = _counter(report, "reading text", len(windows))
        for part, place in zip(parts, folders, strict=True):
            collect(model, part, place, layers, on_step)
        rounds = sum(settings.rounds(side, head_dim) for side in SIDES)
        on_step = _counter(report, "training", rounds * len(layers))
        for layer in layers:
            for side in SIDES:
                states, others = (read_layer(place, layer, side, heads, head_dim).to(model.device) for place in folders)
                trained, losses[str(layer)][side] = train_side(states, others, side, layer, settings, on_step)
                tensors |= {f"{side}.{layer}.{name}": tensor.half().cpu() for name, tensor in trained.items()}
    write_codebooks(output, config, tensors, options=asdict(settings), data=data, losses=losses)
    return losses


def _counter(report: Report, doing: str, total: int) -> Callable[[], None]:
    """Count steps: each call reports one more."""
    done = count()
    report(next(done), total, doing)
    return lambda: report(next(done), total, doing)


def split_windows(windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows to train on, and about every `HELD_OUT`th window, evenly spread, to measure on; of two, the second."""
    step = len(windows) // max(1, len(windows) // HELD_OUT)
    held_out = torch.arange(len(windows)) % step == step - 1
    return windows[~held_out], windows[held_out]


def train_side(
    states: torch.Tensor,
    held_out: torch.Tensor,
    side: Side,
    layer: int,
    settings: CommVQSettings,
    on_step: Callable[[], None],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train one side of a layer on states `[H, tokens, head_dim]`, keys before RoPE with pairs interleaved.

    Returns the tensors of the file by name, and the losses: mean squared errors of normalized vectors of each head
    after each round, of the `states` (`rounds`) and of the states `held_out`, which are not trained on. The encoder
    counts as one round of one head, since it codes the heads of a token together.
    """
    generator = torch.Generator().manual_seed(hashed_seed(settings.seed, layer, side))
    started = time.perf_counter()
    heads, _, head_dim = states.shape
    if side == "values" and settings.values == "encoder":
        tokens, others = (normalize(x.float().transpose(0, 1).flatten(1), dim=-1) for x in (states, held_out))
        network = train_encoder(tokens, settings.bits * heads * head_dim, settings.encoder, generator)
        on_step()
        ends = {"rounds": [[encoder_loss(network, tokens)]], "held_out": [[encoder_loss(network, others)]]}
        return network, {**ends, "seconds": time.perf_counter() - started}
    groups = group_count(head_dim)

    def by_group(states: torch.Tensor) -> torch.Tensor:
        """Normalize and split by group: `[H * G, tokens, head_dim / G]`."""
        return normalize(states.float(), dim=-1).unflatten(-1, (groups, -1)).transpose(1, 2).flatten(0, 1)

    def by_head(losses: torch.Tensor) -> list[list[float]]:
        return losses.unflatten(0, (heads, groups)).sum(1).tolist()

    form, rounds = ComplexForm() if side == "keys" else RealForm(), settings.rounds(side, head_dim)
    books, trained = train_residual(by_group(states), form, rounds, CENTRES, settings.schedule, generator, on_step)
    shaped = books.unflatten(0, (heads, groups))
    losses: dict[str, Any] = {"rounds": by_head(trained)}
    losses["held_out"] = by_head(residual_losses(by_group(held_out), form, books))
    losses["seconds"] = time.perf_counter() - started
    return {"codebooks": shaped.unflatten(-1, (-1, 2)) if side == "keys" else shaped}, losses
