"""What a kernel asks of a GPU: instructions by pipe, sectors of global memory, turns of shared memory."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .program import Program
from .races import WARP
from .scalar import Array

SECTOR = 32
BANKS, BANK_BYTES = 32, 4


class Meter:
    """Memory accesses of a launch, by the number of the instruction.

    Attributes:
        asked: bytes that threads asked for in global memory.
        requests, touched: warps that asked, and sectors of 32 bytes that each of them touched, summed.
        turns, least: turns of shared memory, and how many they would be if no two threads met in a bank.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.asked: Counter[int] = Counter()
        self.requests: Counter[int] = Counter()
        self.touched: Counter[int] = Counter()
        self.turns: Counter[int] = Counter()
        self.least: Counter[int] = Counter()

    def sectors(self, number: int, addresses: Array, size: int, threads: Array) -> None:
        warps = threads // WARP
        first = addresses // np.uint64(SECTOR)
        self.asked[number] += len(threads) * size
        self.requests[number] += len(np.unique(warps))
        self.touched[number] += len(np.unique(np.stack([warps.astype(np.uint64), first]), axis=1).T)

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
