"""Instructions by class, for counts of a launch."""

from __future__ import annotations

import re

_ARITHMETIC = "abs add div fma mad max min mul neg rem set setp sub"
CLASSES = {
    "tensor": "mma wgmma",
    "float": _ARITHMETIC,
    "integer": _ARITHMETIC,
    "bits": "and bfe cvta lop3 mov not or popc prmt selp shf shl shr xor",
    "convert": "cvt",
    "special": "ex2 sqrt",
    "shuffle": "redux shfl",
    "shared": "ldmatrix stmatrix",
    "global": "cp ld st",
    "control": "bar bra fence ret",
}
"""Classes of instructions, and the first part of their opcodes. Moves are bits; copies to shared memory are global."""
_CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes.split()}


def class_of(op: str) -> str:
    """The class of an instruction, such as `float` for `fma.rn.f32`.

    Raises:
        KeyError: it is in no class.
    """
    first, *parts = op.split(".")
    found = _CLASS_OF[first]
    if found == "integer" and any(re.match(r"b?f\d", part) for part in parts):
        return "float"
    if {"fence", "commit_group", "wait_group"} & set(parts):
        return "control"
    if found == "global":
        return {"shared": "shared", "param": "bits"}.get(parts[0], found)
    return found
