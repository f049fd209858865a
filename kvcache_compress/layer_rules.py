"""Choice of methods by layer: the method of a side with its options, and rules for single layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from .codec import Codec, MethodOptions, RopeUse, Side
from .messages import explain, quoted, unknown_key
from .options import MOST_TOKENS, StrictOptions, python_number
from .registry import get_method

Tokens: TypeAlias = Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class SideConfig(StrictOptions):
    """A method and its options, for keys or for values: `{method: turboquant, bits: 4}`."""

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
        """The side with these options, `method` among them; raises `ValueError` with one line."""
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            raise ValueError(explain(error, "", {"": cls})) from None

    def codec(self) -> type[Codec]:
        return get_method(self.method)

    def options(self) -> MethodOptions:
        model = self.codec().Options
        given = dict(self.model_extra or {})
        for name in given:
            if name not in model.model_fields:
                raise ValueError(unknown_key(name, f"for {self.method}", model.model_fields))
        try:
            return model(**given)
        except ValidationError as error:
            raise ValueError(explain(error, "", {"": model}, f" for {self.method}")) from None

    def idle(self) -> dict[str, str]:
        """Options given here that have no effect beside the others, each with what they need."""
        given = self.model_extra or {}
        return {name: need for name, need in self.options().idle().items() if given.get(name) is not None}

    def without(self, names: Collection[str]) -> SideConfig:
        """A copy without some options."""
        return SideConfig.of({name: value for name, value in self.model_dump().items() if name not in names})

    def merged(self, other: SideConfig | None) -> SideConfig:
        """`other` over this: its options where the method is the same, else `other` alone.

        Of this side's own options those are left out that have no effect beside the other's.
        """
        if other is None or other.method != self.method:
            return other or self
        both = SideConfig.of({**self.model_dump(), **other.model_dump()})
        return both.without(both.idle().keys() - other.model_fields_set)


class LayerRule(StrictOptions):
    """Overrides the defaults for some layers.

    `match` names them: numbers (negative ones count from the end), ranges such as `"2-5"`, a share of the layers such
    as `"first 47%"`, or layer types.
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
            raise ValueError("a rule has either 'method', for both sides, or 'keys' and 'values'")
        if self.method is not None:
            SideConfig(method=self.method)
        if all(value is None for name, value in self if name != "match"):
            raise ValueError(f"match={quoted(self.match)}: a rule needs 'method', 'keys', 'values' or a window")
        return self

    def layers(self, layer_types: Sequence[str]) -> set[int]:
        """Indices of the matched layers; raises `ValueError` for layers that do not exist."""
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
                there = ", ".join(sorted(set(layer_types)))
                raise ValueError(f"match={quoted(item)}: this model has no such layer type; it has {there}")
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
