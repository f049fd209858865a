"""Registry of compression methods: codec classes by name."""

from typing import TypeVar

from kvcache_compress.codecs.base import Codec
from kvcache_compress.validation import quoted

_CODECS: dict[str, type[Codec]] = {}
C = TypeVar("C", bound=type[Codec])


def register_method(codec: C) -> C:
    """Class decorator that registers a codec class under its `name`, which configs then use.

    Raises:
        ValueError: the name has characters other than lower-case letters, digits and underscores, or another class has
            registered it.
    """
    name = getattr(codec, "name", "")
    if not name or not name.replace("_", "").isalnum() or name != name.lower():
        raise ValueError(f"name={name!r} of {codec.__name__}: must consist of lower-case letters, digits and _")
    if name in _CODECS and _CODECS[name] is not codec:
        raise ValueError(f"method {name!r} is already registered by {_CODECS[name].__name__}")
    _CODECS[name] = codec
    return codec


def get_method(name: str) -> type[Codec]:
    """Return the codec class of a method; an unknown name raises a `ValueError` that lists the registered ones."""
    if name not in _CODECS:
        raise ValueError(f"unknown method {quoted(name)}: the methods are {', '.join(method_names())}")
    return _CODECS[name]


def method_names() -> list[str]:
    """Names of all registered methods, sorted."""
    return sorted(_CODECS)
