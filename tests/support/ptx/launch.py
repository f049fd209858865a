"""Stand in for a GPU: Triton compiles for it, and what it would launch there runs in the emulator."""

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine_code import TARGETS
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

from kvcache_compress.backends import triton as backend

from .counts import Meter
from .machine import Machine
from .memory import Storages
from .program import Program, parse
from .translate import Block, translate

_FORMATS = {"fp32": "<f", "i64": "<q", "i32": "<i", "i16": "<h", "i8": "<b", "u1": "<B", "i1": "<B"}


@dataclass(frozen=True)
class Launched:
    """One launch: its kernel, and what was noticed and counted in it."""

    name: str
    grid: tuple[int, int, int]
    program: Program
    findings: Counter[tuple[str, int]]
    executed: Any
    meter: Meter | None

    def report(self) -> list[str]:
        """The findings, a line each."""
        instructions = self.program.instructions
        return [
            f"{self.name}: {kind} ({count} times), {instructions[number]}"
            for (kind, number), count in self.findings.items()
        ]


class Emulator:
    """A driver for Triton.

    Attributes:
        launches: what has run since it was cleared.
        edit: changes the PTX of a kernel, given its name, before it runs: to plant faults.
        counting: whether memory accesses are measured, too.
    """

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.launches: list[Launched] = []
        self.edit: Callable[[str, str], str] | None = None
        self.counting = False
        self.storages = Storages()
        self.utils = self
        emulator = self

        class Launcher(_Launcher):
            def __init__(self, source: Any, metadata: Any) -> None:
                super().__init__(emulator, source, metadata)

        self.launcher_cls = Launcher

    def install(self) -> None:
        """Become Triton's active driver."""
        driver.set_active(self)
        original = torch.Tensor.data_ptr

        def data_ptr(tensor: torch.Tensor) -> int:
            self.storages.add(tensor)
            return original(tensor)

        torch.Tensor.data_ptr = data_ptr

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, hash(code), 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 166912 if self.target.arch == 80 else 232448}

    def unload_module(self, module: int) -> None:
        pass


def emulate(target: str) -> Emulator:
    """Run all launches of this process as compiled for `target`, such as `sm_90`, over tensors of the CPU."""
    emulator = Emulator(TARGETS[target])
    emulator.install()
    backend.interpreting = lambda: True  # so that tensors of the CPU take kernels
    return emulator


class _Launcher:
    """Launches one compiled kernel, with tensors or with addresses."""

    def __init__(self, emulator: Emulator, source: Any, metadata: Any) -> None:
        self.emulator, self.name, self.shared = emulator, metadata.name, metadata.shared
        self.kinds = tuple(source.signature.values())
        path = get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ptx")
        assert path is not None
        self.ptx = Path(path).read_text(encoding="utf-8")

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *given: Any) -> None:
        # Packed metadata, launch metadata and two hooks come before the kernel's own arguments.
        if x * y * z:
            self._run((x, y, z), list(_flat(self.kinds, given[4:])))

    def _run(self, grid: tuple[int, int, int], pairs: list[tuple[str, Any]]) -> None:
        emulator = self.emulator
        ptx = emulator.edit(self.name, self.ptx) if emulator.edit else self.ptx
        program, blocks = _translated(ptx)
        storages = [emulator.storages.of(value) if kind.startswith("*") else None for kind, value in pairs]
        machine = Machine(
            program, grid, self.shared, [storage for storage in storages if storage is not None],
            Meter(program) if emulator.counting else None,
        )  # fmt: skip
        held = bytearray(program.parameter_bytes)  # zeros are left for scratch memory, which no kernel asks for
        for (kind, value), storage, name in zip(pairs, storages, program.offsets, strict=False):
            if storage is not None:
                value = machine.memory.address(_pointer(value), storage)
            struct.pack_into(_FORMATS.get(kind, "<Q"), held, program.offsets[name], value)
        machine.parameters = np.frombuffer(held, np.uint8)
        emulator.launches.append(Launched(self.name, grid, program, machine.findings, machine.executed, machine.meter))
        machine.run(blocks)


def _flat(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Types and values that a kernel takes: members of tuples one by one, and no constants."""
    if isinstance(kind, tuple):
        for parts in zip(kind, value, strict=True):
            yield from _flat(*parts)
    elif kind != "constexpr":
        yield kind, value


def _pointer(value: torch.Tensor | int) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


@cache
def _translated(ptx: str) -> tuple[Program, list[Block]]:
    program = parse(ptx)
    return program, translate(program)
