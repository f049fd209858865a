"""Run a program: all threads of a grid at once, first the blocks that lead to others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from .memory import FaultError, GenericMemory, GlobalMemory, LocalMemory, SharedMemory
from .program import BARRIER, Instruction, Program
from .races import WARP, Clock
from .scalar import UNSIGNED, Array
from .warpgroup import Warpgroups

if TYPE_CHECKING:
    from .counts import Meter

Mask: TypeAlias = "Array | None"
"""Threads that run an instruction; None for all."""
Step: TypeAlias = Callable[["Machine", Mask], None]
DONE = 2**31 - 1
MAX_BLOCKS = 10_000_000
POISON = {0: False, 2: 0x7FCD, 4: 0x7FC0DEAD, 8: 0x7FF8DEADDEADBEEF}
"""Value of a register before its first write, by its bytes."""
_STORES = ("st", "stmatrix", "cp")


class Machine:
    """A launch: registers, memories, and what was noticed.

    Attributes:
        threads, programs: of the whole grid.
        registers: unsigned integers `[threads]` by number; predicates are bool.
        parameters: the bytes of the arguments.
        findings: how often each kind of fault was noticed, by the number of the instruction.
        executed: warps that ran each instruction.
    """

    def __init__(
        self, program: Program, grid: tuple[int, int, int], shared_bytes: int, storages: list[torch.UntypedStorage],
        meter: Meter | None = None,
    ) -> None:  # fmt: skip
        self.program, self.grid, self.meter = program, grid, meter
        self.programs = grid[0] * grid[1] * grid[2]
        self.threads = self.programs * program.threads
        self.clock = Clock(self.threads)
        self.findings: Counter[tuple[str, int]] = Counter()
        self.executed = np.zeros(len(program.instructions), np.int64)
        global_granule, shared_granule = granules(program)
        self.memory = GlobalMemory(self, storages, global_granule)
        self.shared = SharedMemory(self, shared_bytes, shared_granule)
        self.local = LocalMemory(self.threads, program.local_bytes)
        self.generic = GenericMemory(self)
        self.warpgroups = Warpgroups(self)
        self.order = program.order()
        self.turns = np.full(len(program.blocks) + 1, DONE)
        self.turns[self.order] = np.arange(len(self.order))
        self.special = self._special()
        self.registers: list[Array] = [
            np.full(self.threads, POISON[size], UNSIGNED.get(size, np.bool_)) for _, size in program.registers.values()
        ]
        self.at = np.zeros(self.threads, np.int32)
        self.parameters = np.zeros(0, np.uint8)

    def _special(self) -> dict[str, Array]:
        """Registers that hold where a thread is."""
        program, thread = np.divmod(np.arange(self.threads, dtype=np.uint32), np.uint32(self.program.threads))
        x, y, z = self.grid
        zero = np.zeros_like(thread)
        found = {
            "%tid.x": thread, "%tid.y": zero, "%tid.z": zero, "%laneid": thread % np.uint32(WARP),
            "%ctaid.x": program % x, "%ctaid.y": program // x % y, "%ctaid.z": program // (x * y),
            "%nctaid.x": zero + x, "%nctaid.y": zero + y, "%nctaid.z": zero + z, "%ntid.x": zero + self.program.threads,
        }  # fmt: skip
        return {name: value.astype(np.uint32) for name, value in found.items()}

    def find(self, kind: str, count: Any, number: int) -> None:
        """Record that `count` threads of an instruction did something wrong."""
        if count:
            self.findings[kind, number] += int(count)

    def find_all(self, found: Iterable[tuple[str, int]], number: int) -> None:
        for kind, count in found:
            self.find(kind, count, number)

    def active(self, mask: Mask) -> Array:
        """Numbers of the threads that run."""
        return np.arange(self.threads) if mask is None else np.flatnonzero(mask)

    def spread(self, values: Array, threads: Array) -> Array:
        """Values of some threads as those of all, with zeros for the others."""
        if len(threads) == self.threads:
            return values
        found = np.zeros(self.threads, values.dtype)
        found[threads] = values
        return found

    def write(self, register: int, words: Array, mask: Mask) -> None:
        if mask is not None:
            words = np.where(mask, words, self.registers[register])
        elif words.shape != (self.threads,):
            words = np.full(self.threads, words)
        self.registers[register] = words

    def whole_warps(self, mask: Mask, instruction: Instruction) -> None:
        """Check that no warp runs an instruction in part that all its threads must run."""
        if mask is not None and (mask.reshape(-1, WARP).any(1) != mask.reshape(-1, WARP).all(1)).any():
            raise FaultError(f"part of a warp runs what all its threads must, {instruction}")

    def barrier(self, mask: Mask, number: int) -> None:
        alive = (self.at != DONE).reshape(self.programs, -1)
        here = alive if mask is None else mask.reshape(self.programs, -1)
        some = here.any(1)
        self.find("part of a program reaches a barrier", np.sum(some & (here != alive).any(1)), number)
        threads = np.repeat(some, self.program.threads)
        self.clock.program[threads] += 1
        self.clock.warp[threads] += 1

    def warp_barrier(self, mask: Mask, instruction: Instruction) -> None:
        self.whole_warps(mask, instruction)
        self.clock.warp[self.active(mask)] += 1

    def _next(self) -> tuple[int, Array]:
        """The first block with threads that can go on, and these: at a barrier they wait for their whole program."""
        turns = self.turns[np.minimum(self.at, len(self.turns) - 1)]
        first = turn = int(turns.min())
        while turn != DONE:
            here, place = turns == turn, self.order[turn]
            block = self.program.blocks[place]
            if block and block[0].op == BARRIER:
                elsewhere = (self.at != place) & (self.at != DONE)
                here &= ~np.repeat(elsewhere.reshape(self.programs, -1).any(1), self.program.threads)
            if here.any():
                return place, here
            turns[turns == turn] = DONE
            turn = int(turns.min())
        place = DONE if first == DONE else self.order[first]
        return place, self.at == place

    def run(self, blocks: list[tuple[list[Step], Callable[[Machine], Any]]]) -> None:
        """Run the translated blocks until all threads are done."""
        firsts = [(block[0].number, block[-1].number + 1) if block else (0, 0) for block in self.program.blocks]
        with np.errstate(all="ignore"):
            for _ in range(MAX_BLOCKS):
                place, here = self._next()
                if place == DONE:
                    break
                mask = None if here.all() else here
                steps, following = blocks[place]
                for step in steps:
                    step(self, mask)
                warps = self.threads // WARP if mask is None else int(mask.reshape(-1, WARP).any(1).sum())
                first, end = firsts[place]
                self.executed[first:end] += warps
                self.at = np.where(here, following(self), self.at).astype(np.int32)
            else:
                raise FaultError(f"{self.program.name} does not end")
        if self.shared.groups:
            self.find("a copy is never waited for", len(self.shared.groups), self.program.instructions[-1].number)
        self.memory.write_back()


def granules(program: Program) -> tuple[int, int]:
    """Bytes of global and of shared memory that need not be told apart: the narrowest store's."""
    sizes = {"global": [8], "shared": [4]}
    for instruction in program.instructions:
        name, *parts = instruction.op.split(".")
        for space, found in sizes.items():
            if name in _STORES and any(part.startswith(space) for part in parts):
                found.append(2 if name == "stmatrix" else 4 if name == "cp" else int(parts[-1][1:]) // 8)
    return min(sizes["global"]), min(sizes["shared"])
