"""Packages that only some functions need, imported when they are needed."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, purpose: str, package: str, extra: str = "eval") -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: name of the module.
        purpose: what needs it, in the plural.
        package: name by which it is installed.
        extra: extra of this package that installs it.

    Raises:
        ImportError: the package is missing; with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{purpose} need {package}: pip install "kvcache-compress[{extra}]" ({error})') from error
