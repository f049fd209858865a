"""Rotary position embedding as the model itself applies it: which channels turn together, and by which cos and sin.

Methods that encode keys before RoPE, or in its pairs, see a head's channels as complex numbers: `RopeLayout` says which
two channels make a pair, found by asking the model's own functions. `RopeTrack` keeps the cos and sin that the model
rotated each cached token by, once for all layers, so that left padding, partial rotary and scaling are right.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedConfig

from .layout import grown_capacity

Rope: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Factors of a run of tokens: cos and sin of each rotary pair, each `[B, T, rotary]`."""
_ROPE_ONLY_WHERE_SLIDING = {"cohere2", "exaone4"}
DTYPE = torch.float16
"""In which cos and sin are kept per token."""


@dataclass(frozen=True)
class RopeLayout:
    """Channels of a head as `pairs` complex numbers, the rotary ones first.

    order: channels, real parts first: `x[..., order]` is `[real of every pair | imaginary of every pair]`.
    rotary: number of leading pairs that RoPE turns; the rest of a partially rotary head is paired as it comes.
    columns: where the model's own cos and sin hold the factors of each rotary pair.
    """

    order: tuple[int, ...]
    rotary: int
    columns: tuple[int, ...]

    @property
    def pairs(self) -> int:
        return len(self.order) // 2

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Real and imaginary parts `[..., pairs]` of `x` `[..., head_dim]`."""
        real, imaginary = x[..., torch.tensor(self.order, device=x.device)].chunk(2, -1)
        return real, imaginary

    def join(self, real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
        """Inverse of `split`."""
        return torch.cat([real, imaginary], -1)[..., torch.tensor(self.order, device=real.device).argsort()]

    def factors(self, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> Rope:
        """The model's own `(cos, sin)`, each `[B, T, C]`, per rotary pair."""
        cos, sin = position_embeddings
        columns = torch.tensor(self.columns, device=cos.device)
        return cos[..., columns], sin[..., columns]

    def rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Applies RoPE to `x` `[B, H, T, head_dim]`."""
        return self._turn(x, rope, 1.0)

    def unrotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Undoes RoPE, the scale of its factors (YaRN's attention factor) included."""
        cos, sin = rope
        scale = cos.float().square() + sin.float().square()
        return self._turn(x, (cos.float() / scale, sin.float() / scale), -1.0)

    def _turn(self, x: torch.Tensor, rope: Rope, sign: float) -> torch.Tensor:
        real, imaginary = self.split(x.float())
        cos, sin = (factor.float().unsqueeze(1) for factor in rope)
        a, b = real[..., : self.rotary], imaginary[..., : self.rotary]
        turned = (a * cos - b * sin * sign, a * sin * sign + b * cos)
        rest = (real[..., self.rotary :], imaginary[..., self.rotary :])
        return self.join(torch.cat([turned[0], rest[0]], -1), torch.cat([turned[1], rest[1]], -1))


def _modeling(config: PreTrainedConfig) -> Any:
    """The module with the model's own functions."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    return sys.modules.get(name) or import_module(name)


def rotary_embedding(config: PreTrainedConfig) -> Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]] | None:
    """The model's own embedding: `(x, position_ids [B, T])` to `(cos, sin)`, each `[B, T, C]`; None without RoPE."""
    try:
        module = _modeling(config)
    except ImportError:
        return None
    for name, kind in vars(module).items():
        if not name.endswith("RotaryEmbedding") or "Vision" in name or "Audio" in name or not inspect.isclass(kind):
            continue
        if "config" not in inspect.signature(kind).parameters:
            continue
        embedding: Any = kind(config=config)  # type: ignore[call-arg]
        typed = "layer_type" in inspect.signature(embedding.forward).parameters
        return lambda x, ids: embedding(x, ids, **({"layer_type": "full_attention"} if typed else {}))
    return None


def layer_has_rope(config: PreTrainedConfig, layer: int) -> bool:
    """Whether the model rotates the keys of this decoder layer; some models leave RoPE out of some layers."""
    listed = getattr(config, "no_rope_layers", None)
    if listed is not None and len(listed) > layer:
        return bool(listed[layer])
    if config.model_type in _ROPE_ONLY_WHERE_SLIDING and "sliding_attention" in config.layer_types:
        return bool(config.layer_types[layer] == "sliding_attention")
    return True


def rope_layout(config: PreTrainedConfig, head_dim: int) -> RopeLayout | None:
    """The pairs that the model's own `apply_rotary_pos_emb` turns together; None where it has none that is known."""
    embed = rotary_embedding(config)
    apply = getattr(_modeling(config), "apply_rotary_pos_emb", None) if embed else None
    if embed is None or apply is None or getattr(config, "kv_lora_rank", None) is not None:
        return None
    width = embed(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))[0].shape[-1]
    for rotary_dim in (width, 2 * width):
        if rotary_dim <= head_dim and (found := _probe(apply, rotary_dim, width)) is not None:
            real, imaginary, columns = found
            rest = range(rotary_dim, head_dim)
            order = (*real, *rest[: len(rest) // 2], *imaginary, *rest[len(rest) // 2 :])
            return RopeLayout(tuple(order), len(real), tuple(columns))
    return None


def _probe(apply: Callable[..., Any], dim: int, width: int) -> tuple[list[int], list[int], list[int]] | None:
    """Real channels, imaginary channels and columns of cos and sin, from what `apply` does to the unit vectors."""
    unit = torch.eye(dim).view(1, 1, dim, dim)
    marks = torch.arange(1.0, width + 1).expand(1, dim, width)
    zero = torch.zeros_like(marks)
    try:
        by_cos, by_sin = (
            (apply(unit, unit, *pair)[0] if "q" in inspect.signature(apply).parameters else apply(unit, *pair))[0, 0]
            for pair in ((marks, zero), (zero, marks))
        )
    except (RuntimeError, TypeError, IndexError):
        return None
    real = [channel for channel in range(dim) if by_sin[channel].max() > 0]
    imaginary = [int(by_sin[channel].argmax()) for channel in real]
    columns = [round(by_sin[channel].max().item()) - 1 for channel in real]
    if sorted(real + imaginary) != list(range(dim)):
        return None
    turns = all(
        by_sin[a, b] > 0 > by_sin[b, a] and by_cos[a, a] > 0 and by_cos[b, b] > 0
        for a, b in zip(real, imaginary, strict=True)
    )
    return (real, imaginary, columns) if turns else None


class RopeTrack:
    """cos and sin of every cached token, `[B, capacity, 2 * rotary]`, shared by the layers of a cache.

    An attention module with fused attention hands over the position embeddings of its step (`given`). Without them
    the model's own embedding is asked for the tokens' indices in the cache, which differ from the positions of
    left-padded rows: keys then come back as exactly, but are encoded as if at another position.
    """

    def __init__(self, config: PreTrainedConfig, layout: RopeLayout) -> None:
        self.layout = layout
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None
        self._config = config
        self._embed: Callable[..., tuple[Any, Any]] | None = None
        self.reset()

    def reset(self) -> None:
        self.tokens = 0
        self.buffer = torch.empty(0, 0, 2 * self.layout.rotary, dtype=DTYPE)

    def extend(self, start: int, states: torch.Tensor, again: bool = False) -> None:
        """Takes up the step's tokens, keys `[B, H, T, D]` from index `start` on.

        `again` is for the layers after the first, which find them there.
        """
        batch, _, count, _ = states.shape
        given, self.given = self.given, None
        if again and start + count == self.tokens:
            return
        if given is None or given[0].shape[1] != count:
            given = self._by_index(start, states)
        factors = torch.cat(self.layout.factors(given), -1)
        if start + count > self.buffer.shape[1] or batch != self.buffer.shape[0]:
            grown = self.buffer.new_empty(
                batch, grown_capacity(start + count, 1), self.buffer.shape[2], device=states.device
            )
            if start:
                grown[:, :start] = self.buffer[:, :start]
            self.buffer = grown
        elif self.buffer.is_inference() and not torch.is_inference_mode_enabled():
            self.buffer = self.buffer.clone()
        self.buffer[:, start : start + count] = factors.to(DTYPE)
        self.tokens = start + count

    def _by_index(self, start: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._embed is None:
            self._embed = rotary_embedding(self._config)
        if self._embed is None:
            raise RuntimeError("a RopeTrack needs a model with RoPE")
        ids = torch.arange(start, start + states.shape[2]).unsqueeze(0)
        cos, sin = self._embed(torch.zeros(1, dtype=torch.float32), ids)
        return cos.to(states.device), sin.to(states.device)

    def read(self, start: int, stop: int) -> Rope:
        """cos and sin `[B, stop - start, rotary]` of tokens `[start, stop)`."""
        cos, sin = self.buffer[:, start:stop].chunk(2, -1)
        return cos, sin

    def bytes_used(self) -> int:
        return self.buffer[:, : self.tokens].nbytes

    def truncate(self, tokens: int) -> None:
        self.tokens = min(self.tokens, tokens)

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces the buffer by `change(buffer)`: what the layers do to their batch."""
        if self.tokens:
            self.buffer = change(self.buffer).contiguous()
