"""Caches of one method each, such as `TurboQuantCache`, over `CompressedCache`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal, get_args

from transformers import PreTrainedConfig

from kvcache_compress.config import CompressionConfig, SideConfig
from kvcache_compress.methods.qjl import QJLOptions
from kvcache_compress.methods.spectral.codec import SpectralOptions
from kvcache_compress.modeling.decoder import decoder_layers, head_dim_of
from kvcache_compress.validation.messages import quoted

from .compressed_cache import CompressedCache

Variant = Literal["recursive", "rope"]
ROPE_VALUES = {"method": "turboquant", "bits": 4}
"""Default method for values with the variant `rope`, which encodes keys only."""


class PolarQuantCache(CompressedCache):
    """Cache compressed by PolarQuant, in one of its two variants.

    Args:
        config: the model's config.
        variant: `recursive`, a tree of angles for keys and values (Han et al.), or `rope`, one angle and one radius
            per rotary pair of the keys (Wu et al.).
        sink_tokens: first tokens kept in full precision.
        recent_tokens: last tokens kept in full precision.
        values: method of the values, a name or a dictionary such as `{"method": "turboquant", "bits": 3}`. A dictionary
            without a method changes options of the default, which is the keys' method, or for `rope` TurboQuant at 4
            bits.
        options: options of the method, `polarquant_recursive` or `polarquant_rope` (`bits`, `angle_bits`, ...;
            `center`: keys only), or of `CompressionConfig` (`layers`, `seed`, ...).

    Raises:
        ValueError: An option is unknown or out of range, or the model has no full-attention layer.
    """

    methods = frozenset({"polarquant_recursive", "polarquant_rope"})

    def __init__(
        self,
        config: PreTrainedConfig,
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
        settings: dict[str, Any] = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
        if isinstance(values, Mapping) and "method" not in values:
            values = (ROPE_VALUES if variant == "rope" else {"method": "polarquant_recursive"}) | dict(values)
        if variant == "rope" or values is not None:
            del sides["values"]
            settings["values"] = ROPE_VALUES if values is None else values
        super().__init__(config, config_from_options(f"polarquant_{variant}", sides, options, **settings))


class TurboQuantCache(CompressedCache):
    """Cache compressed by TurboQuant: `model.generate(..., past_key_values=TurboQuantCache(model.config, bits=4))`.

    Args:
        config: the model's config.
        bits: bits per number, 1 to 6 in steps of 0.5, by default 4; `key_bits` and `value_bits` override it for one
            side.
        sink_tokens: first tokens kept in full precision.
        recent_tokens: last tokens kept in full precision.
        options: further options of `TurboQuantOptions`, for both sides (`center`: keys only), or of
            `CompressionConfig`.

    Raises:
        ValueError: An option is unknown or out of range, or the model has no full-attention layer.
    """

    methods = frozenset({"turboquant"})

    def __init__(
        self,
        config: PreTrainedConfig,
        bits: float | None = None,
        key_bits: float | None = None,
        value_bits: float | None = None,
        sink_tokens: int = 16,
        recent_tokens: int = 64,
        **options: Any,
    ) -> None:
        sides = bits_of_sides(bits, key_bits, value_bits, default=4)
        if "center" in options:
            sides["keys"]["center"] = options.pop("center")
        compression = config_from_options(
            "turboquant", sides, options, sink_tokens=sink_tokens, recent_tokens=recent_tokens
        )
        super().__init__(config, compression)


class KIVICache(CompressedCache):
    """Cache compressed by KIVI, by default with the paper's window of 128 recent tokens and no sinks.

    Args:
        config: the model's config.
        bits: code bits per number, 1 to 6 (the paper's are 2 and 4), by default 2; `key_bits` and `value_bits` override
            it for one side.
        group_size: tokens (keys) or channels (values) that share a scale and a zero point.
        sink_tokens: first tokens kept in full precision.
        recent_tokens: last tokens kept in full precision.
        options: options of `CompressionConfig` (`layers`, `backend`, `quantize_generated`, ...).

    Raises:
        ValueError: An option is unknown or out of range, or the model has no full-attention layer.
    """

    methods = frozenset({"kivi"})

    def __init__(
        self,
        config: PreTrainedConfig,
        bits: int | None = None,
        key_bits: int | None = None,
        value_bits: int | None = None,
        group_size: int = 32,
        sink_tokens: int = 0,
        recent_tokens: int = 128,
        **options: Any,
    ) -> None:
        sides = bits_of_sides(bits, key_bits, value_bits, default=2)
        options["group_size"] = group_size
        compression = config_from_options("kivi", sides, options, sink_tokens=sink_tokens, recent_tokens=recent_tokens)
        super().__init__(config, compression)


def _default_values(config: PreTrainedConfig) -> dict[str, Any]:
    """KIVI at 2 bits in groups of 32 channels, or 16 if 32 does not divide the head dimension; else TurboQuant."""
    decoder, _ = decoder_layers(config)
    groups = [size for size in (32, 16) if head_dim_of(decoder) % size == 0]
    return {"method": "kivi", "bits": 2, "group_size": groups[0]} if groups else {"method": "turboquant", "bits": 2}


class QJLCache(CompressedCache):
    """Cache with keys compressed by QJL, and values by KIVI's per-token groups as in QJL's paper.

    Args:
        config: the model's config.
        sketch_ratio: sketch rows per channel of the keys, that is code bits per number; 2 by default.
        sketch_dim: number of rows, a multiple of 8; replaces `sketch_ratio`.
        values: method and options of the values; by default KIVI at 2 bits in the paper's groups of 32 channels, in
            groups of 16 if 32 does not divide the head dimension, or TurboQuant at 2 bits if 16 does not either.
            Options without a method change that default.
        sink_tokens: first tokens kept in full precision.
        recent_tokens: last tokens kept in full precision.
        options: further options of `QJLOptions`, or of `CompressionConfig` (`layers`, `seed`, ...).

    Raises:
        ValueError: An option is unknown or out of range, or the model has no full-attention layer.
    """

    methods = frozenset({"qjl"})

    def __init__(
        self,
        config: PreTrainedConfig,
        sketch_ratio: float | None = None,
        sketch_dim: int | None = None,
        values: Mapping[str, Any] | str | None = None,
        sink_tokens: int = 16,
        recent_tokens: int = 64,
        **options: Any,
    ) -> None:
        value_side = {"method": values} if isinstance(values, str) else dict(values or {})
        value_side = value_side if "method" in value_side else _default_values(config) | value_side
        keys = {name: options.pop(name) for name in QJLOptions.model_fields if name in options}
        sizes = {"sketch_ratio": sketch_ratio, "sketch_dim": sketch_dim}
        keys |= {name: number for name, number in sizes.items() if number is not None}
        sides = {"keys": keys, "values": value_side}
        compression = config_from_options("qjl", sides, options, sink_tokens=sink_tokens, recent_tokens=recent_tokens)
        super().__init__(config, compression)


class CommVQCache(CompressedCache):
    """Cache compressed by CommVQ with codebooks of the model: `CommVQCache(model.config, codebooks=path)`.

    For batches with left padding call `enable_fused_attention(model)` or `register_position_hooks(model)` once, so that
    rows keep their sinks and keys are encoded at their actual positions.

    Args:
        config: the model's config.
        codebooks: file that `kvcache-compress calibrate --method commvq` wrote for this model.
        bits: code bits per number, at most as many as in the file, by default those of its calibration; `key_bits` and
            `value_bits` override it for one side.
        sink_tokens: first tokens kept in full precision.
        recent_tokens: last tokens kept in full precision.
        options: further options of `CommVQOptions`, for both sides, or of `CompressionConfig` (`layers`, ...).

    Raises:
        ValueError: The codebooks are missing, damaged or of another model, or an option is unknown or out of range.
    """

    methods = frozenset({"commvq"})

    def __init__(
        self,
        config: PreTrainedConfig,
        codebooks: str | PathLike[str] | None = None,
        bits: float | None = None,
        key_bits: float | None = None,
        value_bits: float | None = None,
        sink_tokens: int = 16,
        recent_tokens: int = 64,
        **options: Any,
    ) -> None:
        sides = bits_of_sides(bits, key_bits, value_bits, default=None)
        options["codebooks"] = None if codebooks is None else str(codebooks)
        compression = config_from_options(
            "commvq", sides, options, sink_tokens=sink_tokens, recent_tokens=recent_tokens
        )
        super().__init__(config, compression)


class SpectralCache(CompressedCache):
    """Cache with spectral keys, and values by TurboQuant: `SpectralCache(model.config, bits=2)`.

    Call `enable_fused_attention(model)` once: statistics of the first prompt need its queries, and keys of batches with
    left padding their actual positions.

    Args:
        config: the model's config.
        statistics: `"prefill"`, to measure them on the first prompt, or the file that `kvcache-compress calibrate
            --method spectral` wrote for this model.
        bits: code bits per number of the keys, 0.5 to 6 (see `SpectralOptions`), and of the values, to the next half.
        values: method and options of the values; options without a method change those of TurboQuant.
        sink_tokens: first tokens kept in full precision.
        recent_tokens: last tokens kept in full precision.
        options: further options of `SpectralOptions`, or of `CompressionConfig` (`layers`, `backend`, ...).

    Raises:
        ValueError: The statistics are missing, damaged or of another model, or an option is unknown or out of range.
    """

    methods = frozenset({"spectral"})

    def __init__(
        self,
        config: PreTrainedConfig,
        statistics: str | PathLike[str] | None = "prefill",
        bits: float = 2,
        values: Mapping[str, Any] | str | None = None,
        sink_tokens: int = 16,
        recent_tokens: int = 64,
        **options: Any,
    ) -> None:
        if not (values is None or isinstance(values, (str, Mapping))):
            raise ValueError(f"values={quoted(values)}: allowed a method's name or its options")
        keys = {name: options.pop(name) for name in SpectralOptions.model_fields if name in options}
        keys |= {"bits": bits, "statistics": None if statistics is None else str(statistics)}
        checked: Any = SideConfig.of({"method": "spectral", **keys}).options()
        value_side = {"method": values} if isinstance(values, str) else dict(values or {})
        if "method" not in value_side:
            value_side = {"method": "turboquant", "bits": max(1.0, math.ceil(2 * checked.bits) / 2)} | value_side
        sides = {"keys": keys, "values": value_side}
        compression = config_from_options(
            "spectral", sides, options, sink_tokens=sink_tokens, recent_tokens=recent_tokens
        )
        super().__init__(config, compression)


def config_from_options(
    method: str, sides: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any], **fields: Any
) -> CompressionConfig:
    """Build the config of a cache class: options that are no fields of `CompressionConfig` go to both sides.

    Raises:
        ValueError: An option is unknown, out of range or has no effect, or names a side or method.
    """
    own = {name: value for name, value in options.items() if name in CompressionConfig.model_fields}
    both = {name: value for name, value in options.items() if name not in own}
    if clash := options.keys() & {"keys", "values", "method"}:
        raise ValueError(f"{sorted(clash)[0]!r} is no option here: use CompressedCache for other methods or sides")
    built = {side: SideConfig.of({"method": method, **both, **given}) for side, given in sides.items()}
    idle = {side: side_config.idle().keys() for side, side_config in built.items()}
    # An option of both sides is refused only if it has no effect on either; the side that cannot use it drops it.
    spared = both.keys() - set.intersection(*map(set, idle.values()))
    built = {side: chosen.without(idle[side] & spared) for side, chosen in built.items()}
    return CompressionConfig.of({**built, **own, **fields})


def bits_of_sides(
    bits: float | None, key_bits: float | None, value_bits: float | None, default: float | None
) -> dict[str, dict[str, Any]]:
    """Options of each side from `bits`, which `key_bits` and `value_bits` override; `default` applies without any.

    Raises:
        ValueError: All three are given, so that `bits` would have no effect.
    """
    if None not in (bits, key_bits, value_bits):
        raise ValueError(f"bits={quoted(bits)} beside key_bits and value_bits: allowed beside one of them at most")
    common = default if bits is None else bits
    own = {"keys": key_bits, "values": value_bits}
    return {side: {"bits": common if one is None else one} for side, one in own.items()}
