"""Caches of one method each, such as `TurboQuantCache`, over `CompressedCache`."""

import inspect
import math
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from kvcache_compress.config import CompressionConfig, SideConfig, get_method
from kvcache_compress.modeling.decoder import decoder_layers, head_dim_of
from kvcache_compress.validation import quoted

from .compressed_cache import CompressedCache

_SHARED = """
Options of every cache.

sink_tokens, recent_tokens: first and last tokens kept in full precision.
options: fields of `CompressionConfig` (`layers`, `backend`, `seed`, `max_cache_len`, ...).

Raises:
    ValueError: An option is unknown or out of range, a file does not fit the model, or the model has no full-attention
        layer.
"""


class MethodCache(CompressedCache):
    """Base of caches of one method; its docstring lists the options of the method.

    names: the method, or several of which the option `variant` chooses.
    defaults: defaults other than the method's; a class whose users may choose the values' method has `values` here.
    """

    names: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls) -> None:
        cls.methods = frozenset(cls.names)
        texts = [cls.__doc__, *(get_method(name).Options.__doc__ for name in cls.names), _SHARED]
        cls.__doc__ = "\n\n".join(inspect.cleandoc(text or "") for text in texts)

    def __init__(self, config: PreTrainedConfig, **options: Any) -> None:
        if clash := options.keys() & ({"keys", "values", "method"} - self.defaults.keys()):
            raise ValueError(
                f"{min(clash)!r} is not an option of {type(self).__name__}; use CompressedCache to choose both sides"
            )
        given = {name: fspath(x) if isinstance(x, PathLike) else x for name, x in options.items() if x is not None}
        if {"bits", "key_bits", "value_bits"} <= given.keys():
            raise ValueError(
                f"bits={quoted(given['bits'])} has no effect when key_bits and value_bits are both set; drop one of "
                "the three"
            )
        chosen = {**self.defaults, **given}
        values = chosen.pop("values", None)
        fields = {name: chosen.pop(name) for name in CompressionConfig.model_fields if name in chosen}
        super().__init__(config, CompressionConfig.of({**self._sides(config, chosen, values), **fields}))

    def _sides(self, config: PreTrainedConfig, options: dict[str, Any], values: Any) -> dict[str, SideConfig]:
        """Config of each side from the method's options, and from what is said of the values."""
        method = self._method(options)
        default = self._default_values(config, method, options)
        if values is None and default is None:
            return _both_sides(method, options)
        if not (values is None or isinstance(values, (str, Mapping))):
            raise ValueError(f"values={quoted(values)}: must be a method's name or its options")
        named = {"method": values} if isinstance(values, str) else dict(values or {})
        if "method" not in named:
            named = (default or {"method": method}) | named
        return {"keys": SideConfig.of({"method": method, **options}), "values": SideConfig.of(named)}

    def _method(self, options: dict[str, Any]) -> str:
        """Name of the method; removes from the options what chooses it."""
        return self.names[0]

    def _default_values(self, config: PreTrainedConfig, method: str, options: Mapping[str, Any]) -> Any:
        """Method and options of the values where a user says nothing of them; None: as keys."""
        return None


def _both_sides(method: str, options: dict[str, Any]) -> dict[str, SideConfig]:
    """Config of two sides with the same options, but for `key_bits`, `value_bits` and `center`, which is for keys."""
    bits = {"keys": options.pop("key_bits", None), "values": options.pop("value_bits", None)}
    own: dict[str, dict[str, Any]] = {side: {} if one is None else {"bits": one} for side, one in bits.items()}
    own["keys"] |= {"center": options.pop("center")} if "center" in options else {}
    sides = {side: SideConfig.of({"method": method, **options, **given}) for side, given in own.items()}
    idle = {side: config.idle().keys() for side, config in sides.items()}
    # An option of both sides is refused only if it has no effect on either; the side that cannot use it drops it.
    spared = options.keys() - set.intersection(*map(set, idle.values()))
    return {side: config.without(idle[side] & spared) for side, config in sides.items()}


class TurboQuantCache(MethodCache):
    """Cache compressed by TurboQuant: `model.generate(..., past_key_values=TurboQuantCache(model.config, bits=4))`.

    Args:
        config: the model's config.
        bits: bits per number, 1 to 6 in steps of 0.5; `key_bits` and `value_bits` override it for one side.
        options: other options of the method, for both sides (`center`: keys only).
    """

    names = ("turboquant",)
    defaults: ClassVar = {"bits": 4}


class KIVICache(MethodCache):
    """Cache compressed by KIVI, by default with the paper's window of 128 recent tokens and no sinks.

    Args:
        config: the model's config.
        bits: code bits per number, 1 to 6 (the paper's are 2 and 4), by default 2; `key_bits` and `value_bits` override
            it for one side.
        group_size: tokens (keys) or channels (values) that share a scale and a zero point, by default 32.
    """

    names = ("kivi",)
    defaults: ClassVar = {"bits": 2, "sink_tokens": 0, "recent_tokens": 128}


class CommVQCache(MethodCache):
    """Cache compressed by CommVQ with codebooks of the model: `CommVQCache(model.config, codebooks=path)`.

    For batches with left padding call `enable_fused_attention(model)` or `register_position_hooks(model)` once, so that
    rows keep their sinks and keys are encoded at their actual positions.

    Args:
        config: the model's config.
        codebooks: file that `kvcache-compress calibrate --method commvq` wrote for this model.
        bits: code bits per number, at most as many as in the file, by default those of its calibration; `key_bits` and
            `value_bits` override it for one side.
        options: other options of the method, for both sides.
    """

    names = ("commvq",)
    defaults: ClassVar = {}


class QJLCache(MethodCache):
    """Cache with keys compressed by QJL, and values by KIVI's per-token groups as in QJL's paper.

    Args:
        config: the model's config.
        sketch_ratio: sketch rows per channel of the keys, that is code bits per number; 2 by default.
        values: method and options of the values; by default KIVI at 2 bits in the paper's groups of 32 channels, in
            groups of 16 if 32 does not divide the head dimension, or TurboQuant at 2 bits if 16 does not either.
            Options without a method change that default.
        options: other options of the method.
    """

    names = ("qjl",)
    defaults: ClassVar = {"values": None}

    def _default_values(self, config: PreTrainedConfig, method: str, options: Mapping[str, Any]) -> Any:
        decoder, _ = decoder_layers(config)
        groups = [size for size in (32, 16) if head_dim_of(decoder) % size == 0]
        return {"method": "kivi", "bits": 2, "group_size": groups[0]} if groups else {"method": "turboquant", "bits": 2}


class SpectralCache(MethodCache):
    """Cache with spectral keys, and values by TurboQuant: `SpectralCache(model.config, bits=2)`.

    Call `enable_fused_attention(model)` once: statistics of the first prompt need its queries, and keys of batches with
    left padding their actual positions.

    Args:
        config: the model's config.
        statistics: `"text"`, to measure them on the cached text, or the file that `kvcache-compress calibrate
            --method spectral` wrote for this model.
        bits: code bits per number of the keys, 0.5 to 6 (by default 2), and of the values, to the next half.
        values: method and options of the values; options without a method change those of TurboQuant.
        options: other options of the method.
    """

    names = ("spectral",)
    defaults: ClassVar = {"bits": 2, "values": None}

    def _default_values(self, config: PreTrainedConfig, method: str, options: Mapping[str, Any]) -> Any:
        checked: Any = SideConfig.of({"method": method, **options}).options()
        return {"method": "turboquant", "bits": max(1.0, math.ceil(2 * checked.bits) / 2)}


class PolarQuantCache(MethodCache):
    """Cache compressed by PolarQuant, in one of its two variants.

    Args:
        config: the model's config.
        variant: `recursive` (default), a tree of angles for keys and values (Han et al.), or `rope`, one angle and one
            radius per rotary pair of the keys (Wu et al.).
        values: method of the values, a name or a dictionary such as `{"method": "turboquant", "bits": 3}`. A dictionary
            without a method changes options of the default, which is the keys' method, or for `rope` TurboQuant at 4
            bits.
        options: options of `polarquant_recursive` or `polarquant_rope` (`center`: keys only).
    """

    names = ("polarquant_recursive", "polarquant_rope")
    defaults: ClassVar = {"variant": "recursive", "values": None}

    def _method(self, options: dict[str, Any]) -> str:
        variant = options.pop("variant")
        if variant not in ("recursive", "rope"):
            raise ValueError(f"variant={quoted(variant)} for PolarQuantCache: must be 'recursive' or 'rope'")
        return f"polarquant_{variant}"

    def _default_values(self, config: PreTrainedConfig, method: str, options: Mapping[str, Any]) -> Any:
        return {"method": "turboquant", "bits": 4} if method == "polarquant_rope" else None
