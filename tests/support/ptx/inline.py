"""Interpreter for the few PTX instructions of the kernels' fast path, to run them without a GPU.

Semantics as in NVIDIA's PTX ISA (sections on `prmt`, `lop3`, `shl`, `shr`, `shf`, `shfl` and half precision
arithmetic). A register is a uint32 array, one entry per thread.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

Register = npt.NDArray[np.uint32]
OPERAND = r"\{[^}]*\}|[^,\s]+"


def held(tile: torch.Tensor, keys: bool) -> list[Register]:
    """Registers in which a thread holds elements A and B of each pair of an integer tile `[tokens, words]`.

    32-bit words have a register each, and two 16-bit words share one. Pairs are two words of a token for keys, and two
    tokens of a word for values.
    """
    a, b = (tile if keys else tile.T).reshape(-1, 2).to(torch.int64).numpy().T
    if tile.dtype == torch.int16:
        return [((a & 0xFFFF) | (b & 0xFFFF) << 16).astype(np.uint32)]
    return [part.astype(np.uint64).astype(np.uint32) for part in (a & 0xFFFFFFFF, b & 0xFFFFFFFF)]


def constants(words: list[int], size: int) -> list[Register]:
    """Words that all elements share, as registers of pairs."""
    return [np.full(size, word & 0xFFFFFFFF, np.uint32) for word in words for _ in range(2)]


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
        registers += [words] if whole else list(words.reshape(-1, 2).T)
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
    """Runs `text` with `operands` (`$8`, ...) and returns `$0` to `$(outputs - 1)`."""
    registers = dict(operands, **{"%laneid": np.arange(32, dtype=np.uint32)})
    size = len(next(iter(operands.values())))

    def value(name: str) -> Register:
        if name.startswith("{"):
            low, high = map(value, re.findall(OPERAND, name[1:-1]))
            return low | high << np.uint32(16)
        if name in registers:
            return registers[name]
        return np.full(size, int(name, 0), np.uint32)

    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        operation, _, rest = line.strip().partition(" ")
        target, *sources = re.findall(OPERAND, rest)
        result = INSTRUCTIONS[operation](*map(value, sources))
        if target.startswith("{"):
            low, high = re.findall(OPERAND, target[1:-1])
            registers |= {low: result & np.uint32(0xFFFF), high: result >> np.uint32(16)}
        else:
            registers[target] = result
    return [registers[f"${i}"] for i in range(outputs)]


def _prmt(a: Register, b: Register, selectors: Register) -> Register:
    table = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for i in range(4):
        nibble = selectors >> np.uint32(4 * i) & np.uint32(15)
        byte = (table >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8) & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte & 128, 255, 0).astype(np.uint32)
        result |= np.where(nibble & 8, sign, byte).astype(np.uint32) << np.uint32(8 * i)
    return result


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    result = np.zeros_like(a)
    for i in range(8):
        term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        result |= np.where(table >> np.uint32(i) & np.uint32(1), term, np.uint32(0))
    return result


def _halves(a: Register) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(a).view(np.float16).reshape(-1, 2)


def _packed(halves: npt.NDArray[np.float64]) -> Register:
    return np.ascontiguousarray(halves.astype(np.float16)).view(np.uint32).reshape(-1)


def _shfl(table: Register, lane: Register, control: Register, _members: Register) -> Register:
    """Interpret `shfl`: `table` holds each thread's index of a lane register; 32 consecutive threads are a warp."""
    own = np.arange(len(table), dtype=np.uint32) % np.uint32(32)
    segment = control >> np.uint32(8)
    assert np.all(control & np.uint32(31) == 31), "nothing clamped"
    lane = (own & segment) | (lane & ~segment & np.uint32(31))
    return np.stack(_lane_registers)[table, lane]


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "setp.ne.u32": lambda a, b: a != b,
    "selp.b32": lambda a, b, chosen: np.where(chosen, a, b),
    "shfl.sync.idx.b32": _shfl,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "sub.u32": lambda a, b: a - b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shf.r.wrap.b32": lambda a, b, c: ((a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)) >> (c & 31)).astype(
        np.uint32
    ),
    "shf.l.wrap.b32": lambda a, b, shift: b << shift | a >> np.uint32(32) - shift,
    "neg.f16x2": lambda a: a ^ np.uint32(0x80008000),
    "add.rn.f16x2": lambda a, b: _packed(_halves(a).astype(np.float64) + _halves(b)),
    "add.sat.f16x2": lambda a, b: _packed((_halves(a).astype(np.float64) + _halves(b)).clip(0, 1)),
    "mul.rn.f16x2": lambda a, b: _packed(_halves(a).astype(np.float64) * _halves(b)),
    "fma.rn.f16x2": lambda a, b, c: _packed(_halves(a).astype(np.float64) * _halves(b) + _halves(c)),
}
