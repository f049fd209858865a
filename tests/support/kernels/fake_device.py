"""Fake devices: tensors that report to be on one, compute on the CPU, and cannot be mixed between devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
KIND = "maia"
_COPIES = {torch.Tensor.copy_, torch.Tensor.__setitem__}


class OnDevice(torch.Tensor):
    """CPU tensor that reports to be on `place`."""

    place: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """Mode in which `torch.empty(..., device=...)` makes tensors on fake devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _place(x: torch.Tensor) -> torch.device:
    return x.place if isinstance(x, OnDevice) else CPU


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a change to `value`, or to all items of its lists, tuples and dictionaries."""
    if type(value) in (list, tuple) or type(value).__module__ == "torch.return_types":
        return type(value)(_each(item, change) for item in value)
    if type(value) is dict:
        return {name: _each(item, change) for name, item in value.items()}
    return change(value)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
        return _place(args[0])
    if func is torch.Tensor.__deepcopy__:
        return args[1].setdefault(id(args[0]), args[0].clone())
    tensors: list[torch.Tensor] = []
    devices: list[torch.device] = []

    def plain(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
        elif isinstance(x, torch.device):
            devices.append(x)
            return CPU
        return x

    if func is torch.Tensor.to and args[1:] and isinstance(args[1], str):
        args = (args[0], torch.device(args[1]), *args[2:])
    args, kwargs = _each(args, plain), _each(kwargs, plain)
    with torch._C.DisableTorchFunctionSubclass():
        # As in PyTorch, a single number on the CPU can be mixed with tensors on any device.
        places = {_place(x) for x in tensors if x.dim() or isinstance(x, OnDevice)}
        if len(places) > 1 and func not in _COPIES:
            raise RuntimeError(f"{getattr(func, '__name__', func)}: tensors on {sorted(map(str, places))}")
        place = _place(args[0]) if func in _COPIES else next(iter(places), CPU)
        target = CPU if func is torch.Tensor.cpu else devices[0] if devices else place
        output = func(*args, **kwargs)
        if target != place and any(output is x for x in tensors):
            output = output.clone()

        def put(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or any(x is given for given in tensors):
                return x
            if target == CPU:
                return x.as_subclass(torch.Tensor)
            x = x.as_subclass(OnDevice)
            x.place = target
            return x

        return _each(output, put)


@contextmanager
def fake_devices() -> Iterator[tuple[torch.device, torch.device]]:
    """Provide two fake devices within the block."""
    with _Factories(), torch.no_grad():
        yield torch.device(KIND, 0), torch.device(KIND, 1)
