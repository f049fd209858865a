"""Read the package's own presets where pydantic is not installed, so that the kit runs on a bare Python with torch.

The package's configurations are pydantic models. `provide()` puts a module in pydantic's place that gives them the same
defaults, nested models and validators, but compares no types: enough for the presets, which the tests read both ways
(`tests/benchmarks/test_stand_in.py`), and not for options of users. With pydantic installed nothing is replaced.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

NO_DEFAULT = object()


class FieldInfo:
    """A field's default, as `pydantic.Field` takes it; its constraints are not looked at."""

    def __init__(self, default: Any = NO_DEFAULT, *, default_factory: Any = None, **_: Any) -> None:
        self.make = default_factory or (lambda: default)


class BeforeValidator(typing.NamedTuple):
    """Function that is applied to an input of the annotated type."""

    func: Callable[[Any], Any]


class Info(typing.NamedTuple):
    field_name: str


class BaseModel:
    """Model of annotated fields."""

    __slots__ = ("model_extra", "model_fields_set")

    model_config: ClassVar[dict[str, Any]] = {}
    model_fields: ClassVar[dict[str, FieldInfo]] = {}

    def __init_subclass__(cls) -> None:
        fields = dict(cls.model_fields)
        for name, annotation in inspect.get_annotations(cls).items():
            if "ClassVar" not in annotation and name != "model_config":
                default = cls.__dict__.get(name, NO_DEFAULT)
                fields[name] = default if isinstance(default, FieldInfo) else FieldInfo(default)
        cls.model_fields = fields
        cls.model_config = cls.__mro__[1].model_config | cls.__dict__.get("model_config", {})  # type: ignore[attr-defined]

    def __init__(self, **inputs: Any) -> None:
        cls, hints = type(self), _hints(type(self))
        for validate in _validators(cls, "model", "before"):
            inputs = validate(cls, inputs)
        extra = {name: value for name, value in inputs.items() if name not in cls.model_fields}
        if extra and cls.model_config.get("extra") != "allow":
            raise ValueError(f"unknown keys {', '.join(extra)}: allowed {', '.join(cls.model_fields)}")
        values = {}
        for name, field in cls.model_fields.items():
            if name not in inputs:
                values[name] = field.make()
                if values[name] is NO_DEFAULT:
                    raise ValueError(f"{name}: field required")
                continue
            value = inputs[name]
            for mode in ("before", "after"):
                for validate in _validators(cls, name, mode):
                    takes_info = len(inspect.signature(validate).parameters) == 3
                    value = validate(cls, value, Info(name)) if takes_info else validate(cls, value)
                value = _converted(value, hints[name]) if mode == "before" else value
            values[name] = value
        self.__dict__.update(values | extra)
        self.model_extra, self.model_fields_set = extra, {*inputs}
        for validate in _validators(cls, "model", "after"):
            validate(self)

    @classmethod
    def model_validate(cls, inputs: Any) -> Any:
        """Build a model from a mapping, or from anything that its validators turn into one."""
        for validate in _validators(cls, "model", "before"):
            inputs = validate(cls, inputs)
        return cls(**inputs)

    def model_copy(self, update: Mapping[str, Any]) -> Any:
        """Copy with other values, unchecked."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__ | dict(update))
        made.model_extra, made.model_fields_set = self.model_extra, self.model_fields_set | {*update}
        return made

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """All values, nested models as dictionaries."""
        return {name: _dumped(value) for name, value in self}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        names = [*type(self).model_fields, *self.model_extra]
        return iter([(name, self.__dict__[name]) for name in names])

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and [*self] == [*typing.cast(BaseModel, other)]

    def __hash__(self) -> int:
        return hash((type(self), tuple(self)))


def _dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    return [_dumped(item) for item in value] if isinstance(value, list) else value


@cache
def _hints(model: type) -> dict[str, Any]:
    return typing.get_type_hints(model, include_extras=True)


@cache
def _validators(model: type, what: str, mode: str) -> list[Callable[..., Any]]:
    """A model's functions for a field, or for all of it (`model`), base classes' first."""
    found = []
    for base in reversed(model.__mro__):
        for function in vars(base).values():
            names, when = getattr(function, "validates", ((), ""))
            if when == mode and (what in names or ("*" in names and what != "model")):
                found.append(function)
    return [getattr(function, "__func__", function) for function in found]


def _converted(value: Any, annotation: Any) -> Any:
    """Build nested models, and convert lists to tuples, strings to paths and integers to floats, as declared."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        for item in annotation.__metadata__:
            value = item.func(value) if isinstance(item, BeforeValidator) else value
        return _converted(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return value if value is None else _converted(value, arguments[0])
    if origin is list:
        return [_converted(item, arguments[0]) for item in value]
    if origin is tuple:
        return tuple(value)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return value if isinstance(value, annotation) else annotation.model_validate(value)
    if annotation in (float, Path):
        return annotation(value)
    return value


def _marking(names: tuple[str, ...], mode: str) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        function.validates = (names, mode)
        return function

    return mark


def stand_in() -> types.ModuleType:
    """Module with the names that the package imports from pydantic."""
    module = types.ModuleType("pydantic")
    module.__dict__.update(
        BaseModel=BaseModel, Field=FieldInfo, BeforeValidator=BeforeValidator, ValidationInfo=Info, ConfigDict=dict,
        ValidationError=type("ValidationError", (ValueError,), {}), NonNegativeInt=int,
        field_validator=lambda *names, mode="after": _marking(names, mode),
        model_validator=lambda *, mode: _marking(("model",), mode),
    )  # fmt: skip
    return module


def provide() -> None:
    """Make `import pydantic` find the stand-in, for this process, if pydantic is not installed."""
    if sys.modules.get("pydantic") is None and find_spec("pydantic") is None:
        sys.modules["pydantic"] = stand_in()
