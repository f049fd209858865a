"""Calibrate CommVQ: train codebooks for a model on a text, and write them to a file (`codebook_file.py`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.codecs.rotation import hashed_seed
from kvcache_compress.files.model_file import check_output
from kvcache_compress.methods.commvq.additive import code_bytes
from kvcache_compress.methods.commvq.codebook_file import (
    ALLOWED_CENTRES,
    CENTRES,
    code_bits,
    codebook_facts,
    group_count,
    rounds_for,
    share_rounds,
    write_codebooks,
)
from kvcache_compress.modeling.calibration.text import Report, read_windows
from kvcache_compress.modeling.facts import head_shape

from .collect import calibrated_layers, collect, layer_file, read_costs, read_layer
from .em import ComplexForm, RealForm, Schedule, residual_squares, train_residual
from .encoder import EncoderSchedule, encoder_loss, train_encoder
from .parts import Parts

_TRAINING = 5
"""Version of the training, increased when it changes, so that parts of different versions are never mixed."""
HELD_OUT = 8
"""One window in `HELD_OUT`, and at least one, is not trained on: it measures the loss on new text of the same kind."""
QUICK_SCHEDULE = Schedule(soft_steps=4, soft_vectors=2048, hard_steps=3, hard_vectors=8192, full_steps=1)
QUICK_ENCODER = EncoderSchedule(steps=400)

ERRORS_MOST = 2.0**15
"""Largest of a layer's errors in the file, whose ratios count: most of float16's range is below it."""
SPARE = 1.5
"""Rounds in the file per round of a head on average, where heads share the rounds."""
MOST_ROUNDS = 256
"""Most residual rounds: with as many, heads of 128 numbers take more bits than uncompressed ones."""


@dataclass(frozen=True)
class CommVQSettings:
    """Settings of a calibration: size of the codes, amount of text, length of training.

    bits: code bits per number, 1 or 2, which set the rounds unless `key_rounds` and `value_rounds` do.
    tokens: calibration tokens, in windows of `context`; about one window in `HELD_OUT` is not trained on.
    values: `residual` codebooks, which are not in the paper, or its `encoder`.
    key_rounds, value_rounds: residual rounds of each side, of a head on average.
    share_rounds: give heads unequal numbers of rounds, by the error on held-out text; the paper does not.
    centres: centres N of a codebook, a power of two up to 64; two indices for keys, one for values name a round's code.
    groups: groups G of each head, with codes and codebooks of their own; by default one for up to 128 channels.
    weigh_pairs: weigh errors of pairs of keys by the lengths of the queries; the paper does not.
    seed: seed of samples and starting points.
    """

    bits: int = 2
    tokens: int = 55_296
    context: int = 1024
    values: Literal["residual", "encoder"] = "residual"
    key_rounds: int | None = None
    value_rounds: int | None = None
    share_rounds: bool = True
    centres: int = CENTRES
    groups: int | None = None
    weigh_pairs: bool = True
    seed: int = 0
    schedule: Schedule = field(default_factory=Schedule)
    encoder: EncoderSchedule = field(default_factory=EncoderSchedule)

    def __post_init__(self) -> None:
        if self.bits not in (1, 2):
            raise ValueError(f"bits={self.bits} for commvq: allowed 1, 2")
        if self.values not in ("residual", "encoder"):
            raise ValueError(f"values={self.values!r} for commvq: allowed 'residual', 'encoder'")
        if self.centres not in ALLOWED_CENTRES["keys"]:
            raise ValueError(
                f"centres={self.centres} for commvq: allowed {', '.join(map(str, ALLOWED_CENTRES['keys']))}"
            )
        if self.groups is not None and self.groups < 1:
            raise ValueError(f"groups={self.groups} for commvq: allowed at least 1")
        if self.context < 2:
            raise ValueError(f"context={self.context} for commvq: allowed at least 2")
        if self.tokens < 2 * self.context:
            raise ValueError(f"tokens={self.tokens} for commvq: allowed at least two windows of {self.context}")
        for name in ("key_rounds", "value_rounds"):
            rounds = getattr(self, name)
            if rounds is not None and not 1 <= rounds <= MOST_ROUNDS:
                raise ValueError(f"{name}={rounds} for commvq: allowed 1 to {MOST_ROUNDS}")

    @classmethod
    def quick(cls, **changes: Any) -> CommVQSettings:
        """Settings for a quick calibration, with less text and fewer steps."""
        short: dict[str, Any] = {"tokens": 18_432, "schedule": QUICK_SCHEDULE, "encoder": QUICK_ENCODER}
        return cls(**short | changes)

    def groups_of(self, head_dim: int) -> int:
        """Groups of a head of `head_dim` channels.

        Raises:
            ValueError: pairs of channels cannot be divided into so many groups.
        """
        groups = self.groups or group_count(head_dim)
        if head_dim % (2 * groups):
            allowed = ", ".join(str(n) for n in range(1, head_dim // 2 + 1) if head_dim % (2 * n) == 0)
            raise ValueError(f"groups={groups} for commvq: heads of {head_dim} numbers allow {allowed}")
        return groups

    def rounds(self, side: Side, head_dim: int) -> int:
        """Rounds of a head on average.

        Raises:
            ValueError: as `groups_of`, or whole rounds do not come near the bits.
        """
        groups = self.groups_of(head_dim)
        chosen = self.key_rounds if side == "keys" else self.value_rounds
        if chosen:
            return chosen
        rounds = rounds_for(self.bits, side, head_dim, groups, self.centres)
        each = groups * code_bits(side, self.centres) / head_dim
        if rounds > MOST_ROUNDS or abs(rounds * each - self.bits) > self.bits / 4:
            raise ValueError(
                f"bits={self.bits} for commvq: with {groups} groups of {self.centres} centres a round of {side} takes "
                f"{each:.3g} bits per number, and up to {MOST_ROUNDS} rounds are allowed"
            )
        return rounds

    def trained_rounds(self, side: Side, head_dim: int) -> int:
        """Rounds in the file, some of them to spare if heads share them."""
        rounds = self.rounds(side, head_dim)
        return min(MOST_ROUNDS, math.ceil(SPARE * rounds)) if self.share_rounds else rounds


def calibrate_commvq(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Sequence[str],
    output: str | Path,
    settings: CommVQSettings | None = None,
    *,
    workers: int | None = None,
    report: Report = lambda doing, done, total: None,
    notice: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Train codebooks for every full-attention layer with RoPE, and write them to `output`.

    Finished layers are kept in a folder `<output>.*.parts/` until all are done, so a second call with the same settings
    and text resumes an interrupted one. Memory holds the model and the keys and values of the layers in training.

    Args:
        model: the model; training happens on its device.
        tokenizer: its tokenizer.
        text: text files, or a dataset on the hub (see `read_windows`).
        output: the file to write; an existing one is replaced at the end.
        settings: settings of the training; 2 bits by default.
        workers: layers trained at once; by default as many as make it faster.
        report: called as work proceeds.
        notice: called with messages for the user.

    Returns:
        The losses by layer, as in the file: mean squared error of normalized vectors (see `train_side`).

    Raises:
        ValueError: CommVQ does not support the model, the text cannot be read or is too short, keys are not finite, or
            the output cannot be a file.
        OSError: a file cannot be written.
    """
    settings, output = settings or CommVQSettings(), Path(output)
    check_output(output)
    config = model.config.get_text_config(decoder=True)
    layers = calibrated_layers(config)
    head_dim, heads, _ = head_shape(config)
    rounds = {side: settings.rounds(side, head_dim) for side in SIDES}
    windows, digest = read_windows(text, tokenizer, settings.tokens, settings.context)
    training, held_out = split_windows(windows)
    data: dict[str, Any] = {"windows": len(training), "held_out_windows": len(held_out)}
    data |= {"context": settings.context, "sha256": digest, "rounds": rounds}
    data["dtype"] = str(model.dtype).removeprefix("torch.")
    described = {"model": codebook_facts(config).model_dump(), "options": asdict(settings), "data": data}
    parts = Parts(output, described | {"training": _TRAINING, "layers": layers})
    if parts.others:
        notice(f"keeping parts of other settings or texts: {', '.join(map(str, parts.others))}")
    missing = [layer for layer in layers if parts.load(layer) is None]
    if len(missing) < len(layers):
        notice(
            f"{parts.folder}: {len(layers) - len(missing)} of {len(layers)} layers are finished; resuming from there"
        )
    weights = parts.load_weights()
    folders = (parts.states, parts.held_out)
    files = {
        layer: [layer_file(folder, layer, side) for folder in folders for side in SIDES]
        + [layer_file(parts.held_out, layer, "costs")]
        for layer in missing
    }
    if missing and not (
        all(file.exists() for layer in missing for file in files[layer]) and set(missing) <= weights.keys()
    ):
        count = _Counter(report, "reading text", len(windows))
        collect(model, held_out, parts.held_out, missing, count, costs=settings.share_rounds)
        weights = collect(model, training, parts.states, missing, count)
        parts.save_weights(weights)
    weighed = {layer for layer in missing if settings.weigh_pairs and bool((weights[layer] != 1).any())}
    if settings.weigh_pairs and len(weighed) < len(missing):
        notice(
            f"no queries could be observed in {len(missing) - len(weighed)} layers, where all pairs of keys are "
            f"weighed equally; attn_implementation='sdpa' allows it (this is {config._attn_implementation!r})"
        )
    per_layer = settings.trained_rounds("keys", head_dim) + (
        settings.trained_rounds("values", head_dim) if settings.values == "residual" else settings.encoder.steps
    )
    count = _Counter(report, "training", per_layer * len(missing))

    def train_layer(layer: int) -> None:
        tensors: dict[str, torch.Tensor] = {}
        losses: dict[str, Any] = {}
        for side in SIDES:
            states, others = (read_layer(folder, layer, side, heads, head_dim).to(model.device) for folder in folders)
            layer_weights = weights[layer] if layer in weighed else None
            costs = read_costs(parts.held_out, layer, side, heads).to(model.device)
            trained, losses[side] = train_side(states, others, costs, side, layer, settings, layer_weights, count)
            tensors |= {f"{side}.{layer}.{name}": tensor for name, tensor in trained.items()}
        parts.save(layer, tensors, losses)
        for file in files[layer]:
            file.unlink()

    _for_each(train_layer, missing, workers or _workers(model.device), count.stop)
    finished = {layer: parts.load(layer) for layer in layers}
    tensors = {name: tensor for part in finished.values() if part for name, tensor in part[0].items()}
    losses = {str(layer): part[1] for layer, part in finished.items() if part}
    data |= {"text": list(text), "unweighed": [layer for layer in layers if f"keys.{layer}.weights" not in tensors]}
    write_codebooks(output, config, tensors, options=asdict(settings), data=data, losses=losses)
    parts.remove()
    return losses


def split_windows(windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows to train on, and about every `HELD_OUT`th window, evenly spread, to measure on; of two, the second."""
    step = len(windows) // max(1, len(windows) // HELD_OUT)
    held_out = torch.arange(len(windows)) % step == step - 1
    return windows[~held_out], windows[held_out]


def train_side(
    states: torch.Tensor,
    held_out: torch.Tensor,
    costs: torch.Tensor,
    side: Side,
    layer: int,
    settings: CommVQSettings,
    weights: torch.Tensor | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train one side of a layer on states `[H, tokens, head_dim]`, keys before RoPE with pairs interleaved.

    Keys are first scaled by `weights` `[H, pairs]`. Errors of `held_out` cost `costs` `[H, tokens]`, or all alike if it
    is empty; by them heads share the rounds.

    Returns:
        The tensors of the file by name, and the losses. A loss is the mean squared error of normalized vectors: of each
        head after each round (`rounds`), or of the encoder's tokens (`encoder`); under `held_out` that of states
        `held_out`, which are not trained on; `of_heads` has the rounds of each head.
    """
    generator = torch.Generator().manual_seed(hashed_seed(settings.seed, layer, side))
    started = time.perf_counter()
    heads, _, head_dim = states.shape
    if side == "values" and settings.values == "encoder":
        tokens, others = (normalize(x.float().transpose(0, 1).flatten(1), dim=-1) for x in (states, held_out))
        tensors, loss = train_encoder(tokens, settings.bits * heads * head_dim, settings.encoder, generator, on_step)
        encoder_losses: dict[str, Any] = {"encoder": loss, "held_out": encoder_loss(tensors, others)}
        return tensors, encoder_losses | {"seconds": time.perf_counter() - started}
    groups, rounds = settings.groups_of(head_dim), settings.trained_rounds(side, head_dim)
    scale = weights.repeat_interleave(2, -1)[:, None] if side == "keys" and weights is not None else torch.ones(1)

    def by_group(states: torch.Tensor) -> torch.Tensor:
        """Normalize and split by group: `[H * G, tokens, head_dim / G]`."""
        unit = normalize(states.float() * scale.to(states.device), dim=-1)
        return unit.unflatten(-1, (groups, -1)).transpose(1, 2).flatten(0, 1)

    form = ComplexForm() if side == "keys" else RealForm()
    books, losses = train_residual(
        by_group(states), form, rounds, settings.centres, settings.schedule, generator, on_step
    )
    squares = residual_squares(by_group(held_out), form, books).unflatten(0, (heads, groups)).sum(1)
    by_head = losses.unflatten(0, (heads, groups)).sum(1)
    shaped = books.unflatten(0, (heads, groups))
    tensors = {"codebooks": shaped.unflatten(-1, (-1, 2)) if side == "keys" else shaped}
    if side == "keys" and weights is not None:
        tensors["weights"] = weights
    of_heads = (rounds,) * heads
    if settings.share_rounds:
        energy = (held_out.float() * scale.to(held_out.device)).square().sum(-1)
        errors = (squares * (energy * costs if costs.numel() else energy)[:, None]).mean(-1)
        tensors["errors"] = errors = (errors / errors.max().clamp_min(1e-30) * ERRORS_MOST).half()
        bits = code_bits(side, settings.centres)
        row = code_bytes(groups * settings.rounds(side, head_dim), bits)
        of_heads = share_rounds(errors.tolist(), groups, bits, heads * row)
    found = {"rounds": by_head.tolist(), "held_out": squares[:, 1:].mean(-1).tolist(), "of_heads": of_heads}
    return tensors, found | {"seconds": time.perf_counter() - started}


def _workers(device: torch.device) -> int:
    """Layers trained at once: several on a CPU, as the small steps of one layer leave threads idle."""
    return min(4, torch.get_num_threads()) if device.type == "cpu" else 1


def _for_each(work: Callable[[int], None], layers: Sequence[int], workers: int, stop: Callable[[], None]) -> None:
    """Call `work` for each layer on `workers` threads, which share torch's threads; call `stop` if one fails."""
    if workers == 1:
        for layer in layers:
            work(layer)
        return
    threads = max(1, torch.get_num_threads() // workers)
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        pending = [pool.submit(work, layer) for layer in layers]
        try:
            for future in as_completed(pending):
                future.result()
        except BaseException:
            stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Counter:
    """Thread-safe counter of steps, which reports each of them."""

    def __init__(self, report: Report, doing: str, total: int) -> None:
        self._report, self._doing, self._total, self._done = report, doing, total, 0
        self._lock = Lock()
        self._stopped = False
        report(doing, 0, total)

    def __call__(self) -> None:
        if self._stopped:
            raise InterruptedError("calibration was stopped")
        with self._lock:
            self._done += 1
            self._report(self._doing, self._done, self._total)

    def stop(self) -> None:
        """Make the next call in any thread raise `InterruptedError`."""
        self._stopped = True
