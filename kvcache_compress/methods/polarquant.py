"""`PolarQuantCache`: the two methods of that name, of Han et al. (recursive) and of Wu et al. (RoPE pairs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from transformers import PreTrainedConfig

from ..cache import CompressedCache
from ..config import config_from_options

Variant = Literal["recursive", "rope"]
ROPE_VALUES = {"method": "turboquant", "bits": 4}
"""What values take where the variant, `rope`, encodes keys only."""


class PolarQuantCache(CompressedCache):
    """A cache compressed by PolarQuant.

    Args:
        model_config: the model's config.
        variant: `recursive`, a tree of angles for keys and values (Han et al.), or `rope`, one angle and one radius
            per rotary pair of the keys (Wu et al.).
        sink_tokens: first tokens kept in full precision.
        recent_tokens: last tokens kept in full precision.
        values: another method for the values, a name or a dictionary such as `{"method": "turboquant", "bits": 3}`;
            options without a method change those of the default, the keys' method or for `rope` TurboQuant's 4 bits.
        options: options of the method, `polarquant_recursive` or `polarquant_rope` (`bits`, `angle_bits`, ...;
            `center`: keys alone), or of `CompressionConfig` (`layers`, `seed`, ...).

    Raises:
        ValueError: for options out of range and for models without full-attention layers.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        variant: Variant = "recursive",
        sink_tokens: int = 16,
        recent_tokens: int = 64,
        values: str | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if variant not in get_args(Variant):
            raise ValueError(f"variant={variant!r} for PolarQuantCache: allowed {', '.join(get_args(Variant))}")
        sides: dict[str, dict[str, Any]] = {"keys": {}, "values": {}}
        if "center" in options:
            sides["keys"]["center"] = options.pop("center")
        given: dict[str, Any] = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
        if isinstance(values, Mapping) and "method" not in values:
            values = (ROPE_VALUES if variant == "rope" else {"method": "polarquant_recursive"}) | dict(values)
        if variant == "rope" or values is not None:
            del sides["values"]
            given["values"] = ROPE_VALUES if values is None else values
        super().__init__(model_config, config_from_options(f"polarquant_{variant}", sides, options, **given))
