"""Configuration of a cache: its options, per-layer rules, presets and YAML files."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from os.path import isdir, isfile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.codecs.base import SIDES, Codec, CodecContext, MethodOptions, RopeUse, Side
from kvcache_compress.codecs.layout import Field as StoredField
from kvcache_compress.codecs.layout import group_tokens
from kvcache_compress.files.text import parse_yaml, read_yaml
from kvcache_compress.modeling.rope import RopeLayout
from kvcache_compress.validation import (
    MOST_TOKENS,
    AnyList,
    Seed,
    StrictOptions,
    explain,
    python_number,
    quoted,
    unknown_key,
)

from . import methods as methods  # importing it registers them
from .methods.registry import get_method as get_method
from .methods.registry import method_names as method_names
from .methods.registry import register_method as register_method

BUDGETS = {
    "best-4bit": "spectral-4bit",
    "best-3bit": "spectral-3bit",
    "best-2bit": "spectral-2bit",
    "best-1.6bit": "spectral-k1.25v2",
}
"""Aliases for the preset with the least measured loss at a bit budget that needs no calibrated file. An alias moves
when a better preset is measured (docs/results.md)."""
Tokens: TypeAlias = Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class SideConfig(StrictOptions):
    """Method and options of one side: `{method: turboquant, bits: 4}`."""

    model_config = ConfigDict(extra="allow")

    method: str

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: python_number(option) for name, option in value.items()}
        return {"method": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_options(self) -> SideConfig:
        self.options()
        return self

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SideConfig:
        """Build from a dictionary with `method` and its options; wrong ones raise a one-line `ValueError`."""
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            raise ValueError(explain(error, "", {"": cls})) from None

    def codec(self) -> type[Codec]:
        return get_method(self.method)

    def options(self) -> MethodOptions:
        model = self.codec().Options
        inputs = dict(self.model_extra or {})
        for name in inputs:
            if name not in model.model_fields:
                raise ValueError(unknown_key(name, f"for {self.method}", model.model_fields))
        try:
            return model(**inputs)
        except ValidationError as error:
            raise ValueError(explain(error, "", {"": model}, f" for {self.method}")) from None

    def idle(self) -> dict[str, str]:
        """Options set here that have no effect in this combination, each with the setting that would give it one."""
        inputs = self.model_extra or {}
        return {name: need for name, need in self.options().idle().items() if inputs.get(name) is not None}

    def without(self, names: Collection[str]) -> SideConfig:
        return SideConfig.of({name: value for name, value in self.model_dump().items() if name not in names})

    def merged(self, other: SideConfig | None) -> SideConfig:
        """Override these options by those of `other`; a different method replaces all options.

        Inherited options that lose their effect through the override are dropped.
        """
        if other is None or other.method != self.method:
            return other or self
        both = SideConfig.of({**self.model_dump(), **other.model_dump()})
        return both.without(both.idle().keys() - other.model_fields_set)


class LayerRule(StrictOptions):
    """Rule that overrides the defaults for some layers.

    Attributes:
        match: the layers: numbers (negative ones count from the end), ranges such as `"2-5"`, a share such as `"first
            47%"`, or layer types.
        method: one method for both sides.
        keys: method and options of the keys.
        values: method and options of the values.
        sink_tokens: number of first tokens kept in full precision.
        recent_tokens: number of last tokens kept in full precision.
    """

    match: list[int | str] = Field(min_length=1)
    method: str | None = None
    keys: SideConfig | None = None
    values: SideConfig | None = None
    sink_tokens: Tokens | None = None
    recent_tokens: Tokens | None = None

    @field_validator("match", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]

    @model_validator(mode="after")
    def _method_or_sides(self) -> LayerRule:
        if self.method is not None and (self.keys is not None or self.values is not None):
            raise ValueError("a rule needs 'method' for both sides, or 'keys' and 'values'; drop one of them")
        if self.method is not None:
            SideConfig(method=self.method)
        if all(value is None for name, value in self if name != "match"):
            raise ValueError(
                f"match={quoted(self.match)}: the rule changes nothing; add method, keys, values, sink_tokens or "
                "recent_tokens"
            )
        return self

    def layers(self, layer_types: Sequence[str]) -> set[int]:
        """Indices of the layers that the rule matches in a model with these layer types."""
        found: set[int] = set()
        count = len(layer_types)
        for item in self.match:
            span = re.fullmatch(r"(\d{1,9})-(\d{1,9})", item) if isinstance(item, str) else None
            share = re.fullmatch(r"first (\d{1,9})%", item) if isinstance(item, str) else None
            if share:
                found |= set(range(min(count, round(count * int(share[1]) / 100))))
                continue
            if isinstance(item, int):
                wanted = range(item, item + 1)
            elif span:
                wanted = range(int(span[1]), int(span[2]) + 1)
            elif item in layer_types:
                found |= {index for index, kind in enumerate(layer_types) if kind == item}
                continue
            else:
                present = ", ".join(sorted(set(layer_types)))
                raise ValueError(f"match={quoted(item)}: this model has no such layer type; it has {present}")
            if not wanted or wanted[0] < -count or wanted[-1] >= count:
                raise ValueError(f"match={item!r}: this model has layers 0 to {count - 1} only")
            found |= {index % count for index in wanted}
        return found


@dataclass(frozen=True)
class LayerPlan:
    """Methods and windows of one layer after all rules are applied."""

    keys: SideConfig
    values: SideConfig
    sink_tokens: int
    recent_tokens: int

    def side(self, side: Side) -> SideConfig:
        return self.keys if side == "keys" else self.values

    def layout(self, side: Side, head_dim: int) -> tuple[StoredField, ...]:
        """Stored fields of one side; see `Codec.layout`."""
        config = self.side(side)
        return config.codec().layout(config.options(), side, head_dim)

    def rope_use(self, side: Side) -> RopeUse:
        config = self.side(side)
        return config.codec().rope_use(config.options(), side)

    def rope_groups(self, head_dim: int) -> tuple[int, int] | None:
        """First token and size of the groups whose first token's cos and sin a codec needs, or None."""
        sizes = {group_tokens(self.layout(side, head_dim)) for side in SIDES if self.rope_use(side) == "factors"}
        if len(sizes) > 1:
            raise ValueError(
                f"{self.keys.method} for keys and {self.values.method} for values need RoPE factors of groups of "
                f"{' and '.join(map(str, sorted(sizes)))} tokens, but a cache stores only one group size; change the "
                "method of one side"
            )
        return (self.sink_tokens, sizes.pop()) if sizes else None

    def codecs(
        self, inputs: Mapping[Side, torch.Tensor], layer: int, seed: int, rope: RopeLayout | None
    ) -> dict[Side, Codec]:
        """New codecs for keys and values like `inputs`, `[B, H, T, D]`."""
        found: dict[Side, Codec] = {}
        for side, x in inputs.items():
            context = CodecContext(
                side=side, head_dim=x.shape[-1], heads=x.shape[1], layer=layer, seed=seed,
                sink_tokens=self.sink_tokens, dtype=x.dtype, device=x.device, rope=rope,
            )  # fmt: skip
            found[side] = self.side(side).codec()(self.side(side).options(), context)
        return found

    @property
    def compresses(self) -> bool:
        return (self.keys.method, self.values.method) != ("none", "none")


class CompressionConfig(StrictOptions):
    """Configuration of a compressed cache.

    Attributes:
        keys: method and options of the keys.
        values: method and options of the values.
        sink_tokens: number of first tokens kept in full precision.
        recent_tokens: number of last tokens kept in full precision. Tokens are packed 32 at a time (or in a method's
            larger groups), so up to 31 more stay dense.
        quantize_generated: if False, decode steps pack nothing. A later prompt of more than 16 tokens still packs the
            tokens before it, except in assisted decoding, where it may be a draft.
        backend: `auto` (Triton on GPUs, C++ on CPUs, else torch), `triton`, `cpp` or `torch`.
        seed: seed of all random rotations and sketches.
        max_cache_len: static capacity in tokens. Buffers are allocated at once and shapes stay fixed (CUDA graphs).
        bits_by_layer: `auto` lets layers, keys and values share the bits that are set here; the first prompt shows
            which need more. By default each has its own. A static cache ignores it.
        offloading: keep layers on the CPU while others run, as `transformers.DynamicCache(offloading=True)` does.
        layers: rules that override these options for some layers.
    """

    keys: SideConfig
    values: SideConfig
    sink_tokens: Tokens = 16
    recent_tokens: Tokens = 64
    quantize_generated: bool = True
    backend: str = "auto"
    seed: Seed = 0
    max_cache_len: int | None = Field(None, ge=1, le=MOST_TOKENS)
    bits_by_layer: Literal["auto"] | None = None
    offloading: bool = False
    layers: AnyList[LayerRule] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_backend(self) -> CompressionConfig:
        if self.backend not in ("auto", *BACKENDS):
            *names, last = ("auto", *BACKENDS)
            choices = f"{', '.join(map(repr, names))} or {last!r}"
            raise ValueError(f"backend={quoted(self.backend)}: must be {choices}")
        return self

    @model_validator(mode="after")
    def _check_static(self) -> CompressionConfig:
        if self.max_cache_len is not None and not self.quantize_generated:
            raise ValueError(
                "quantize_generated must be True with max_cache_len: the dense window of a static cache cannot grow"
            )
        if self.max_cache_len is not None and self.offloading:
            raise ValueError(
                "offloading must be False with max_cache_len: the buffers of a static cache cannot be moved"
            )
        return self

    @model_validator(mode="after")
    def _check_idle(self) -> CompressionConfig:
        """Refuse options that would have no effect."""
        plans = {"": self._default} | {f"layers.{i}.": self._ruled(rule) for i, rule in enumerate(self.layers)}
        for place, plan in plans.items():
            for side, chosen in (("keys", plan.keys), ("values", plan.values)):
                for name, need in chosen.idle().items():
                    value = quoted((chosen.model_extra or {})[name])
                    raise ValueError(
                        f"{place}{side}.{name}={value} for {chosen.method}: has an effect only with {need}"
                    )
        for number, rule in enumerate(self.layers):
            for name in ("sink_tokens", "recent_tokens"):
                if getattr(rule, name) is not None and not plans[f"layers.{number}."].compresses:
                    raise ValueError(
                        f"layers.{number}.{name}={getattr(rule, name)}: has an effect only where keys or values are "
                        "compressed"
                    )
        return self

    @classmethod
    def of(cls, fields: Mapping[str, Any], source: str | None = None) -> CompressionConfig:
        """Build a config from a dictionary; wrong fields raise a one-line `ValueError` that starts with `source`."""
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            problems = explain(error, "in the config", {"": cls, "layers": LayerRule})
            raise ValueError(f"{source}: {problems}" if source else problems) from None

    def changed(self, **fields: Any) -> CompressionConfig:
        """Copy the config with other values, which are validated like those of a file."""
        return CompressionConfig.of({**vars(self), **fields})

    def plan(self, layer_types: Sequence[str]) -> list[LayerPlan]:
        """Plan of each layer of a model with these layer types."""
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

    def with_files(self, **files: str | Path | None) -> CompressionConfig:
        """Copy the config with files (`codebooks`, `statistics`) for the methods that need one and name none."""

        def filled(side: SideConfig | None) -> SideConfig | None:
            if side is None:
                return side
            known = side.codec().Options.model_fields
            needed = {name: str(path) for name, path in files.items() if path is not None and name in known}
            return SideConfig(**{**needed, **side.model_dump()}) if needed else side

        rules = [
            rule.model_copy(update={"keys": filled(rule.keys), "values": filled(rule.values)}) for rule in self.layers
        ]
        return self.model_copy(update={"keys": filled(self.keys), "values": filled(self.values), "layers": rules})


def preset_names() -> list[str]:
    """Names of the package's presets, sorted."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _presets().iterdir() if entry.name.endswith(".yaml"))


def measured_losses() -> dict[str, dict[str, float]]:
    """Measured losses `kl` and `kl_999` of the presets in the comparison by bit budget, in nats per token."""
    return json.loads((_presets() / "measured.json").read_text(encoding="utf-8"))


def load_config(source: str | Path | Mapping[str, Any] | CompressionConfig) -> CompressionConfig:
    """Load a config from a preset's name (or an alias in `BUDGETS`), a YAML file's path or a dictionary.

    A `CompressionConfig` is returned unchanged.

    Raises:
        ValueError: the preset is unknown, the file is missing or malformed, a key is unknown or a value is wrong. The
            message names the source.
    """
    if isinstance(source, CompressionConfig):
        return source
    if isinstance(source, Mapping):
        return CompressionConfig.of(source, "config")
    if not isinstance(source, (str, Path)):
        raise ValueError(
            f"config={quoted(source)}: must be a preset's name, a path, a dictionary or a CompressionConfig"
        )
    path, name = Path(source), str(source)
    if path.suffix in (".yaml", ".yml") or isfile(path) or (name and name not in preset_names() and isdir(path)):
        data = read_yaml(path)
    elif (name := BUDGETS.get(name, name)) in preset_names():
        data = parse_yaml((_presets() / f"{name}.yaml").read_text(encoding="utf-8"), name)
    else:
        known = [*BUDGETS, *preset_names()]
        near = get_close_matches(name[:100].lower(), known, 1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"the presets are {', '.join(known)}"
        raise ValueError(f"unknown preset {quoted(name)}: {hint}")
    if not isinstance(data, dict):
        raise ValueError(f"{name}: must be a mapping with 'keys' and 'values'")
    return CompressionConfig.of(data, name)


def _presets() -> Any:
    return files("kvcache_compress.configs")
