"""Which method compresses which layer: options, per-layer rules, presets and YAML files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .backend import BackendChoice
from .codec import Codec, MethodOptions, RopeUse, Side
from .registry import get_method


class SideConfig(BaseModel):
    """A method and its options, for keys or for values: `{method: turboquant, bits: 4}`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    method: str

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"method": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_options(self) -> SideConfig:
        self.options()
        return self

    def codec(self) -> type[Codec]:
        return get_method(self.method)

    def options(self) -> MethodOptions:
        model = self.codec().Options
        given = dict(self.model_extra or {})
        for name in given:
            if name not in model.model_fields:
                raise ValueError(_unknown(name, f"for {self.method}", model.model_fields))
        try:
            return model(**given)
        except ValidationError as error:
            raise ValueError(_explain(error)) from None

    def merged(self, other: SideConfig | None) -> SideConfig:
        """`other` over this: its options where the method is the same, else `other` alone."""
        if other is None or other.method != self.method:
            return other or self
        return SideConfig(**{**self.model_dump(), **other.model_dump()})


class LayerRule(BaseModel):
    """Overrides the defaults for some layers.

    `match` names them: numbers (negative ones count from the end), ranges such as `"2-5"`, a share of the layers such
    as `"first 47%"`, or layer types.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: list[int | str] = Field(min_length=1)
    method: str | None = None
    keys: SideConfig | None = None
    values: SideConfig | None = None
    sink_tokens: int | None = Field(None, ge=0)
    recent_tokens: int | None = Field(None, ge=0)

    @field_validator("match", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]

    @model_validator(mode="after")
    def _method_or_sides(self) -> LayerRule:
        if self.method is not None and (self.keys is not None or self.values is not None):
            raise ValueError("a rule has either 'method', for both sides, or 'keys' and 'values'")
        if self.method is not None:
            SideConfig(method=self.method)
        return self

    def layers(self, layer_types: Sequence[str]) -> set[int]:
        """Indices of the matched layers; raises `ValueError` for layers that do not exist."""
        found: set[int] = set()
        count = len(layer_types)
        for item in self.match:
            span = re.fullmatch(r"(\d+)-(\d+)", item) if isinstance(item, str) else None
            share = re.fullmatch(r"first (\d+)%", item) if isinstance(item, str) else None
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
                there = ", ".join(sorted(set(layer_types)))
                raise ValueError(f"match={item!r}: this model has no such layer type; it has {there}")
            if not wanted or wanted[0] < -count or wanted[-1] >= count:
                raise ValueError(f"match={item!r}: this model has layers 0 to {count - 1}")
            found |= {index % count for index in wanted}
        return found


@dataclass(frozen=True)
class LayerPlan:
    """What one layer does."""

    keys: SideConfig
    values: SideConfig
    sink_tokens: int
    recent_tokens: int

    def side(self, side: Side) -> SideConfig:
        return self.keys if side == "keys" else self.values

    def rope_use(self, side: Side) -> RopeUse:
        config = self.side(side)
        return config.codec().rope_use(config.options(), side)

    @property
    def compresses(self) -> bool:
        return (self.keys.method, self.values.method) != ("none", "none")


class CompressionConfig(BaseModel):
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

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: SideConfig
    values: SideConfig
    sink_tokens: int = Field(16, ge=0)
    recent_tokens: int = Field(64, ge=0)
    quantize_generated: bool = True
    backend: BackendChoice = "auto"
    seed: int = Field(0, ge=0, lt=2**31)
    max_cache_len: int | None = Field(None, ge=1)
    offloading: bool = False
    layers: list[LayerRule] = []

    @model_validator(mode="after")
    def _check_fixed(self) -> CompressionConfig:
        if self.max_cache_len is not None and not self.quantize_generated:
            raise ValueError("quantize_generated=False with max_cache_len: allowed True, for dense tokens have no end")
        if self.max_cache_len is not None and self.offloading:
            raise ValueError("offloading=True with max_cache_len: allowed False, for fixed buffers stay where they are")
        return self

    def plan(self, layer_types: Sequence[str]) -> list[LayerPlan]:
        """One plan per layer of a model with these layer types.

        Raises:
            ValueError: for a rule that matches no layer of the model, or two rules for one layer.
        """
        default = LayerPlan(self.keys, self.values, self.sink_tokens, self.recent_tokens)
        plans = [default] * len(layer_types)
        ruled: dict[int, int] = {}
        for number, rule in enumerate(self.layers):
            for index in sorted(rule.layers(layer_types)):
                if index in ruled:
                    raise ValueError(f"layers: rules {ruled[index]} and {number} both match layer {index}")
                ruled[index] = number
                both = None if rule.method is None else SideConfig(method=rule.method)
                plans[index] = LayerPlan(
                    keys=self.keys.merged(rule.keys or both),
                    values=self.values.merged(rule.values or both),
                    sink_tokens=self.sink_tokens if rule.sink_tokens is None else rule.sink_tokens,
                    recent_tokens=self.recent_tokens if rule.recent_tokens is None else rule.recent_tokens,
                )
        return plans

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
        raise ValueError(f"config={source!r}: allowed a preset's name, a path, a dictionary or a CompressionConfig")
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or _is_file(path):
        if not _is_file(path):
            raise ValueError(f"config file {str(path)!r} does not exist")
        text, name = path.read_text(encoding="utf-8"), str(path)
    else:
        name = str(source)
        if name not in preset_names():
            near = difflib.get_close_matches(name, preset_names(), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"unknown preset {name!r}: {hint}there are {', '.join(preset_names())}")
        text = (_presets() / f"{name}.yaml").read_text(encoding="utf-8")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: not YAML: {error}") from None
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
    built = {side: {"method": method, **both, **given} for side, given in sides.items()}
    return _build({**built, **own, **fields}, None)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _presets() -> Any:
    return files("kvcache_compress.configs")


def _build(data: Mapping[str, Any], source: str | None) -> CompressionConfig:
    try:
        return CompressionConfig.model_validate(dict(data))
    except ValidationError as error:
        prefix = f"{source}: " if source else ""
        raise ValueError(prefix + _explain(error)) from None


def _explain(error: ValidationError) -> str:
    """Pydantic's complaints as sentences without its headings and links."""
    lines = []
    for issue in error.errors():
        place = ".".join(str(part) for part in issue["loc"] if part != "function-after")
        if issue["type"] == "extra_forbidden":
            model = LayerRule if place.startswith("layers") else CompressionConfig
            lines.append(_unknown(place, "in the config", model.model_fields))
        elif issue["type"] == "value_error":
            lines.append(str(issue["ctx"]["error"]))
        else:
            lines.append(f"{place}={issue['input']!r}: {issue['msg'][0].lower()}{issue['msg'][1:]}")
    return "; ".join(dict.fromkeys(lines))


def _unknown(name: str, where: str, known: Mapping[str, Any]) -> str:
    return f"unknown key {name!r} {where}: allowed {', '.join(known)}"
