"""The config of a cache: its fields, presets and YAML files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from .backend import BackendChoice
from .layer_rules import LayerPlan, LayerRule, SideConfig, Tokens
from .messages import explain, quoted, suggestion
from .options import MOST_TOKENS, AnyList, Seed, StrictOptions
from .text_files import is_file, is_folder, parse_yaml, read_yaml


class CompressionConfig(StrictOptions):
    """Everything that describes a compressed cache.

    keys, values: the method of each side.
    sink_tokens, recent_tokens: first and last tokens kept in full precision. Tokens are packed 32 at a time (or in a
        method's larger groups), so that up to 31 others wait as well.
    quantize_generated: whether decode steps pack tokens; if not, only prompts do, and what was generated before them.
    backend: `auto` (Triton on GPUs, C++ on CPUs, else torch), `triton`, `cpp` or `torch`.
    seed: of every random rotation and sketch.
    max_cache_len: room for so many tokens is made at once and never more, so that shapes do not change (CUDA graphs).
    offloading: whether layers wait on the CPU while others work, as with `transformers.DynamicCache(offloading=True)`.
    layers: rules that override the above for some layers.
    """

    keys: SideConfig
    values: SideConfig
    sink_tokens: Tokens = 16
    recent_tokens: Tokens = 64
    quantize_generated: bool = True
    backend: BackendChoice = "auto"
    seed: Seed = 0
    max_cache_len: int | None = Field(None, ge=1, le=MOST_TOKENS)
    offloading: bool = False
    layers: AnyList[LayerRule] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_fixed(self) -> CompressionConfig:
        if self.max_cache_len is not None and not self.quantize_generated:
            raise ValueError("quantize_generated=False with max_cache_len: allowed True, for dense tokens have no end")
        if self.max_cache_len is not None and self.offloading:
            raise ValueError("offloading=True with max_cache_len: allowed False, for fixed buffers stay where they are")
        return self

    @model_validator(mode="after")
    def _check_idle(self) -> CompressionConfig:
        """Refuses what would be ignored without a word."""
        plans = {"": self._default} | {f"layers.{i}.": self._ruled(rule) for i, rule in enumerate(self.layers)}
        for place, plan in plans.items():
            for side, chosen in (("keys", plan.keys), ("values", plan.values)):
                for name, need in chosen.idle().items():
                    given = quoted((chosen.model_extra or {})[name])
                    raise ValueError(f"{place}{side}.{name}={given} for {chosen.method}: allowed only with {need}")
        for number, rule in enumerate(self.layers):
            for name in ("sink_tokens", "recent_tokens"):
                if getattr(rule, name) is not None and not plans[f"layers.{number}."].compresses:
                    raise ValueError(f"layers.{number}.{name}: allowed only where keys or values are compressed")
        return self

    def changed(self, **fields: Any) -> CompressionConfig:
        """A copy with other values, which are checked as those of a file are."""
        return _build({**vars(self), **fields}, None)

    def plan(self, layer_types: Sequence[str]) -> list[LayerPlan]:
        """One plan per layer of a model with these layer types.

        Raises:
            ValueError: for a rule that matches no layer of the model, or two rules for one layer.
        """
        plans = [self._default] * len(layer_types)
        ruled: dict[int, int] = {}
        for number, rule in enumerate(self.layers):
            for index in sorted(rule.layers(layer_types)):
                if index in ruled:
                    raise ValueError(f"layers: rules {ruled[index]} and {number} both match layer {index}")
                ruled[index] = number
                plans[index] = self._ruled(rule)
        return plans

    @property
    def _default(self) -> LayerPlan:
        return LayerPlan(self.keys, self.values, self.sink_tokens, self.recent_tokens)

    def _ruled(self, rule: LayerRule) -> LayerPlan:
        both = None if rule.method is None else SideConfig(method=rule.method)
        return LayerPlan(
            keys=self.keys.merged(rule.keys or both),
            values=self.values.merged(rule.values or both),
            sink_tokens=self.sink_tokens if rule.sink_tokens is None else rule.sink_tokens,
            recent_tokens=self.recent_tokens if rule.recent_tokens is None else rule.recent_tokens,
        )

    def with_codebooks(self, path: str | Path) -> CompressionConfig:
        """A copy whose learned methods take their codebooks from this file, where the config names none."""

        def filled(side: SideConfig | None) -> SideConfig | None:
            if side is None or "codebooks" not in side.codec().Options.model_fields:
                return side
            return SideConfig(**{"codebooks": str(path), **side.model_dump()})

        rules = [
            rule.model_copy(update={"keys": filled(rule.keys), "values": filled(rule.values)}) for rule in self.layers
        ]
        return self.model_copy(update={"keys": filled(self.keys), "values": filled(self.values), "layers": rules})

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False)


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _presets().iterdir() if entry.name.endswith(".yaml"))


def load_config(source: str | Path | Mapping[str, Any] | CompressionConfig) -> CompressionConfig:
    """A config from a preset's name, the path of a YAML file, a dictionary, or itself.

    Raises:
        ValueError: unknown preset, missing or malformed file, unknown key or wrong value; the message names the source.
    """
    if isinstance(source, CompressionConfig):
        return source
    if isinstance(source, Mapping):
        return _build(source, "config")
    if not isinstance(source, (str, Path)):
        raise ValueError(
            f"config={quoted(source)}: allowed a preset's name, a path, a dictionary or a CompressionConfig"
        )
    path, name = Path(source), str(source)
    if path.suffix in (".yaml", ".yml") or is_file(path) or (name and name not in preset_names() and is_folder(path)):
        data = read_yaml(path)
    elif name in preset_names():
        data = parse_yaml((_presets() / f"{name}.yaml").read_text(encoding="utf-8"), name)
    else:
        raise ValueError(f"unknown preset {quoted(name)}: {suggestion(name, preset_names())}")
    if not isinstance(data, dict):
        raise ValueError(f"{name}: a mapping is needed at the top, with 'keys' and 'values'")
    return _build(data, name)


def config_from_options(
    method: str, sides: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any], **fields: Any
) -> CompressionConfig:
    """The config behind a method's own cache class: `options` go to it where it has them, else to both sides."""
    own = {name: value for name, value in options.items() if name in CompressionConfig.model_fields}
    both = {name: value for name, value in options.items() if name not in own}
    if clash := options.keys() & {"keys", "values", "method"}:
        raise ValueError(
            f"{sorted(clash)[0]!r} is no option here: use CompressedCache.from_config for other methods or sides"
        )
    built = {side: SideConfig.of({"method": method, **both, **given}) for side, given in sides.items()}
    idle = {side: side_config.idle().keys() for side, side_config in built.items()}
    # What one side can use is no mistake, though the other cannot.
    spared = both.keys() - set.intersection(*map(set, idle.values()))
    built = {side: chosen.without(idle[side] & spared) for side, chosen in built.items()}
    return _build({**built, **own, **fields}, None)


def bits_of_sides(
    bits: float | None, key_bits: float | None, value_bits: float | None, default: float | None
) -> dict[str, dict[str, Any]]:
    """The option `bits` of both sides, of which each can have its own.

    Raises:
        ValueError: `bits` given although both sides have their own.
    """
    if None not in (bits, key_bits, value_bits):
        raise ValueError(f"bits={quoted(bits)} beside key_bits and value_bits: allowed beside one of them at most")
    common = default if bits is None else bits
    own = {"keys": key_bits, "values": value_bits}
    return {side: {"bits": common if one is None else one} for side, one in own.items()}


def _presets() -> Any:
    return files("kvcache_compress.configs")


def _build(data: Mapping[str, Any], source: str | None) -> CompressionConfig:
    try:
        return CompressionConfig.model_validate(dict(data))
    except ValidationError as error:
        problems = explain(error, "in the config", {"": CompressionConfig, "layers": LayerRule})
        raise ValueError(f"{source}: {problems}" if source else problems) from None
