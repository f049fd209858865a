"""Inline assembly inside Triton's interpreter: runs the PTX of the kernels' fast path without a GPU.

A register is a uint32 array, one entry per thread. Constants have a single entry.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from .program import split, vector
from .races import WARP
from .scalar import operation
from .warp import shuffle

Register = npt.NDArray[np.uint32]


_lane_registers: list[Register] = []
"""Registers that differ by lane of a warp where Triton assumes a single number, which is an index into this list."""


def create_inline_asm(
    _builder: Any, text: str, _constraints: str, handles: list[Any], types: list[Any], _pure: bool, pack: int
) -> Any:
    """Add inline assembly to Triton's interpreter, for 32-bit elements and for pairs of 16-bit or 32-bit neighbours."""
    registers: list[Register] = []
    for handle in handles:
        words = np.ascontiguousarray(handle.data).reshape(-1).view(np.uint32)
        whole = pack == 1 or handle.data.itemsize == 2
        registers += [words] if whole else list(np.ascontiguousarray(words.reshape(-1, 2).T))
    first = len(types)
    outputs = run(text, {f"${first + i}": register for i, register in enumerate(registers)}, first)
    if "%laneid" in text:
        _lane_registers.extend(outputs)
        outputs = [np.full(1, len(_lane_registers) - 1, np.uint32)]
    views = {tl.float16: np.float16, tl.int16: np.int16, tl.int32: np.int32}
    results = [
        TensorHandle(output.view(views[kind.scalar]).reshape(handles[0].data.shape), kind.scalar)
        for output, kind in zip(outputs, types, strict=True)
    ]
    return SimpleNamespace(get_result=results.__getitem__)


def run(text: str, operands: dict[str, Register], outputs: int) -> list[Register]:
    """Run `text` with `operands` (`$8`, ...) and return `$0` to `$(outputs - 1)`."""
    registers = operands | {"%laneid": np.arange(WARP, dtype=np.uint32)}

    def value(name: str) -> Register:
        if name.startswith("{"):
            low, high = map(value, vector(name))
            return low | high << np.uint32(16)
        return registers[name] if name in registers else np.array([int(name, 0)], np.uint32)

    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        op, _, rest = line.strip().partition(" ")
        if op in ("", ".reg"):
            continue
        target, *sources = split(rest)
        result = _result(op, [value(name) for name in sources])
        if target.startswith("{"):
            low, high = vector(target)
            registers |= {low: result & np.uint32(0xFFFF), high: result >> np.uint32(16)}
        else:
            registers[target] = result
    return [registers[f"${i}"] for i in range(outputs)]


def _result(op: str, sources: list[Register]) -> Register:
    if op == "shfl.sync.idx.b32":
        return _shuffled(*sources)
    what = operation(op)
    numbers = [kind.numbers(x) for kind, x in zip(what.sources, sources, strict=True)]
    return what.target.words(what.function(*numbers), 4)


def _shuffled(table: Register, lane: Register, control: Register, _members: Register) -> Register:
    """Values of other lanes: `table` holds each thread's index of a lane register."""
    own = np.arange(len(table)) % WARP
    return np.stack(_lane_registers)[table, shuffle("idx", own, lane, control, len(table))]
