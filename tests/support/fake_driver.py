"""Driver of a fake GPU: Triton compiles for it, and launches are recorded instead of run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


@dataclass(frozen=True)
class Launched:
    """One launch: the kernel's name, its machine code, the grid and all arguments, constants too."""

    name: str
    code: int
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


LAUNCHES: list[Launched] = []


class _Utils:
    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, hash(code), 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def unload_module(self, module: int) -> None:
        pass


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
        # Packed metadata, launch metadata and two hooks come before the kernel's own.
        LAUNCHES.append(Launched(self.name, function, (x, y, z), arguments[4:]))


class _Driver:
    utils, launcher_cls = _Utils(), _Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def use_fake_driver() -> None:
    driver.set_active(_Driver())


def launches_of(call: Any) -> list[Launched]:
    """Launches that `call()` makes."""
    LAUNCHES.clear()
    call()
    return LAUNCHES.copy()
