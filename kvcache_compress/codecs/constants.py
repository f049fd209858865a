"""Make codecs' constants on the CPU, so that their numbers do not depend on PyTorch's default device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def on_cpu(make: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function so that the tensors it makes are on the CPU unless it names another device."""

    @wraps(make)
    def made(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        with torch.device("cpu"):
            return make(*arguments, **named)

    return made
