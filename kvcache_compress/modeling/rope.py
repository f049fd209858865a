"""Rotary position embedding as the model itself applies it, and its pairs of channels.

Methods that encode keys before RoPE, or by its pairs, treat a head's channels as complex numbers. `RopeLayout` holds
the two channels of each pair, found by probing the model's own functions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Rope: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Rotary factors of a run of tokens: cos and sin per pair, each `[B, T, rotary]`."""
_ROPE_ONLY_WHERE_SLIDING = {"afmoe", "cohere2", "cohere2_moe", "flint"}
_ROPE_ONLY_WHERE_SLIDING_IF_ANY = {"exaone4", "exaone_moe", "kolibri1"}
"""Model types without RoPE in full attention, always or if other layers use sliding attention."""


@lru_cache(maxsize=64)
def _index(entries: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 indices on the device, cached; usable outside of inference mode even if first requested inside."""
    with torch.inference_mode(False):
        return torch.tensor(entries, device=device)


@dataclass(frozen=True)
class RopeLayout:
    """A head's channels as `pairs` complex numbers, the rotary ones first.

    Attributes:
        order: channels, real parts first: `x[..., order]` is `[real of every pair | imaginary of every pair]`.
        rotary: number of leading pairs that RoPE rotates; the other channels of a partially rotary head are paired in
            order.
        columns: columns of the model's own cos and sin with the factors of each rotary pair.
    """

    order: tuple[int, ...]
    rotary: int
    columns: tuple[int, ...]

    @cached_property
    def _inverse_order(self) -> tuple[int, ...]:
        return tuple(sorted(range(len(self.order)), key=self.order.__getitem__))

    @property
    def pairs(self) -> int:
        return len(self.order) // 2

    @cached_property
    def in_order(self) -> bool:
        """True if all real parts already come first, as in most models, so that no channel moves."""
        return self.order == tuple(range(len(self.order)))

    def columns_on(self, device: torch.device) -> torch.Tensor:
        """`columns` as int64 indices on the device."""
        return _index(self.columns, device)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Real and imaginary parts `[..., pairs]` of `x` `[..., head_dim]`; views of `x` where no channel moves."""
        ordered = x if self.in_order else x[..., _index(self.order, x.device)]
        real, imaginary = ordered.chunk(2, -1)
        return real, imaginary

    def join(self, real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
        """Inverse of `split`, as a new tensor."""
        joined = torch.cat([real, imaginary], -1)
        return joined if self.in_order else joined[..., _index(self._inverse_order, real.device)]

    def factors(self, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> Rope:
        """Select the factors of each rotary pair from the model's own `(cos, sin)`, each `[B, T, C]`."""
        cos, sin = position_embeddings
        columns = self.columns_on(cos.device)
        return cos[..., columns], sin[..., columns]

    def rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Apply RoPE to `x` `[B, H, T, head_dim]`."""
        return self._turn(x, rope, 1.0)

    def unrotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Undo RoPE, including the scale of its factors (YaRN's attention factor)."""
        cos, sin = rope
        scale = cos.float().square() + sin.float().square()
        return self._turn(x, (cos.float() / scale, sin.float() / scale), -1.0)

    def rotate_query(self, query: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Transpose of `rotate`: `rotate(x) · query = x · rotate_query(query)`, both `[B, H, T, head_dim]`."""
        return self._turn(query, rope, -1.0)

    def _turn(self, x: torch.Tensor, rope: Rope, sign: float) -> torch.Tensor:
        real, imaginary = self.split(x.float())
        cos, sin = (factor.float().unsqueeze(1) for factor in rope)
        sin = sin * sign
        a, b = real[..., : self.rotary], imaginary[..., : self.rotary]
        turned = (a * cos).sub_(b * sin), (a * sin).add_(b * cos)
        if self.rotary == self.pairs:
            return self.join(*turned)
        rest = (real[..., self.rotary :], imaginary[..., self.rotary :])
        return self.join(torch.cat([turned[0], rest[0]], -1), torch.cat([turned[1], rest[1]], -1))


def _modeling(config: PreTrainedConfig) -> Any:
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    return sys.modules.get(name) or import_module(name)


def rotary_embedding(config: PreTrainedConfig) -> Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]] | None:
    """The model's own rotary embedding, from `(x, position_ids [B, T])` to `(cos, sin)`, each `[B, T, C]`, or None."""
    try:
        module = _modeling(config)
    except ImportError:
        return None
    if not _full_attention_rotates(config):
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
    """True if the model rotates the keys of this decoder layer; some models have layers without RoPE."""
    for name in ("no_rope_layers", "layer_rope_theta"):
        listed = getattr(config, name, None)
        if listed is not None and len(listed) > layer:
            return bool(listed[layer])
    kinds = getattr(config, "layer_types", None) or ()
    some = config.model_type in _ROPE_ONLY_WHERE_SLIDING_IF_ANY and "sliding_attention" in kinds
    if some or config.model_type in _ROPE_ONLY_WHERE_SLIDING:
        return bool(kinds[layer] == "sliding_attention")
    return getattr(config, "position_embedding_type", "rope") in ("rope", "rotary")


def _full_attention_rotates(config: PreTrainedConfig) -> bool:
    """True unless the config's RoPE parameters leave out full attention."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(kind in parameters for kind in getattr(config, "layer_types", None) or ()):
        return parameters.get("full_attention") is not None
    return parameters.get("rope_theta", 0) is not None


def rope_layout(config: PreTrainedConfig, head_dim: int) -> RopeLayout | None:
    """Channel pairs that the model's own `apply_rotary_pos_emb` rotates; None if they cannot be found."""
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
    """Find the real channels, imaginary channels and columns of cos and sin by applying RoPE to unit vectors."""
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
