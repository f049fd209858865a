"""Caches to measure: what a spec is, and the specs of the full cache and of this package's caches."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_compress import CompressedCache, load_config
from kvcache_compress.config import CompressionConfig
from kvcache_compress.methods.spectral.codec import TEXT


@dataclass(frozen=True)
class Measured:
    """Size of a filled cache. Dense numbers count as 16 bits, whatever dtype the model ran in.

    Attributes:
        packed_tokens: packed tokens per sequence, in the layer that has most.
        packed_bits: bits per packed number (one coordinate of one key or value): codes, scales, zero points, norms,
            padding. 16 if nothing is packed.
        all_bits: bits per number of the whole cache, with everything that it keeps.
        total_bytes: bytes of the whole cache.
    """

    packed_tokens: int
    packed_bits: float
    all_bits: float
    total_bytes: int


@dataclass(frozen=True)
class CacheSpec:
    """A cache to measure: how to make it, and how to measure its size.

    Attributes:
        name: name in tables; unique within one run.
        make: builds an empty cache for a model.
        measure: measures a filled cache.
        lossless: True for a cache that compresses nothing on purpose. Any other cache that packs nothing is an error.
        description: what defines the cache, as plain JSON without paths. Results of equal descriptions are comparable.
    """

    name: str
    make: Callable[[PreTrainedModel], Cache]
    measure: Callable[[Cache], Measured]
    lossless: bool = False
    description: dict[str, Any] = field(default_factory=dict)


def full_cache() -> CacheSpec:
    """Spec of the uncompressed cache, against which all others are measured."""
    description = {"class": "DynamicCache"}
    return CacheSpec("full", lambda model: DynamicCache(config=model.config), _measure_full, True, description)


def preset_cache(preset: str | dict[str, Any] | CompressionConfig, *, name: str | None = None) -> CacheSpec:
    """Spec of a `CompressedCache`; its name in tables is by default `preset`, which then is a string."""
    config = preset if isinstance(preset, CompressionConfig) else load_config(preset)
    about = _without_paths(config.model_dump(mode="json"))
    return CacheSpec(
        name or str(preset), lambda model: CompressedCache(model.config, config), _measure_ours, description=about
    )


def _without_paths(config: Any) -> Any:
    """The config, with files of calibration replaced by their names and digests."""
    if isinstance(config, dict):
        named = {key: _without_paths(value) for key, value in config.items() if value is not None}
        for name in {"codebooks", "statistics"} & named.keys():
            if name == "statistics" and named[name] == TEXT:
                continue
            path = Path(named[name])
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None
            named[name] = {"file": path.name, "sha256": digest}
        return named
    return [_without_paths(item) for item in config] if isinstance(config, list) else config


def _measure_ours(cache: Cache) -> Measured:
    report = cache.memory_report()
    return Measured(
        packed_tokens=report.packed_tokens,
        packed_bits=report.packed_bits_per_number if report.packed_numbers else 16.0,
        all_bits=report.bits_per_number,
        total_bytes=report.total_bytes_at_16,
    )


def _measure_full(cache: Cache) -> Measured:
    # Layers without keys and values, such as linear attention's, hold a state that no cache compresses.
    kept = (getattr(layer, side, None) for layer in cache.layers for side in ("keys", "values"))
    numbers = sum(x.numel() for x in kept if isinstance(x, torch.Tensor))
    return Measured(packed_tokens=0, packed_bits=16.0, all_bits=16.0, total_bytes=2 * numbers)
