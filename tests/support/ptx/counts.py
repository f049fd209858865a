"""Counts of a launch: instructions by class, global-memory sectors, shared-memory wavefronts."""

import re
from collections import Counter

import numpy as np

from .program import Program
from .races import WARP
from .scalar import Array

SECTOR = 32
BANKS, BANK_BYTES = 32, 4
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


class Meter:
    """Memory accesses of a launch, by the number of the instruction.

    Attributes:
        requests: accesses of a warp to global memory.
        touched, needed: sectors of 32 bytes that they touch, and that would hold as many bytes.
        turns, least: shared-memory wavefronts, and how many there would be without bank conflicts.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.requests: Counter[int] = Counter()
        self.touched: Counter[int] = Counter()
        self.needed: Counter[int] = Counter()
        self.turns: Counter[int] = Counter()
        self.least: Counter[int] = Counter()

    def sectors(self, number: int, addresses: Array, size: int, threads: Array) -> None:
        bytes_ = size * _different(threads, addresses)
        self.requests[number] += len(bytes_)
        self.touched[number] += int(_different(threads, addresses // np.uint64(SECTOR)).sum())
        self.needed[number] += int((-(-bytes_ // SECTOR)).sum())

    def wavefronts(self, number: int, addresses: Array, size: int, threads: Array) -> None:
        """Accesses of 8 or 16 bytes are done by half or by quarter of a warp."""
        words = max(1, size // BANK_BYTES)
        turn = threads.astype(np.int64) * words // WARP  # numbers each share of a warp that is served at once
        places = addresses.astype(np.int64)[:, None] // BANK_BYTES + np.arange(words)
        pairs = np.unique(np.stack([np.repeat(turn, words), places.reshape(-1)]), axis=1)
        banks, counts = np.unique(pairs[0] * BANKS + pairs[1] % BANKS, return_counts=True)
        shares, inverse = np.unique(banks // BANKS, return_inverse=True)
        longest = np.zeros(len(shares), np.int64)
        np.maximum.at(longest, inverse, counts)
        self.turns[number] += int(longest.sum())
        self.least[number] += len(shares)


def _different(threads: Array, addresses: Array) -> Array:
    """Number of different addresses of each warp."""
    pairs = np.unique(np.stack([(threads // WARP).astype(np.uint64), addresses]), axis=1)
    return np.unique(pairs[0], return_counts=True)[1]
