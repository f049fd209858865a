"""`tcgen05`: products that one thread starts, in a memory of their own, and mbarriers that say when they are done.

A result is computed at once. But each thread counts which of its program's products it knows to be done: because it
waited for an mbarrier, or met a thread at a barrier that had. It must neither use the result of a later product nor
overwrite what that reads.

PTX asks to wait for a load from tensor memory before its registers are used. Triton's code does not always, so this is
not checked; a GPU keeps track of these registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import warp
from .memory import FaultError
from .program import NotEmulatedError
from .races import WARP, Accesses
from .scalar import Array, type_of
from .warpgroup import addresses

if TYPE_CHECKING:
    from .machine import Machine

LANES, FIRST = 128, 64
"""Lanes of tensor memory, and the first column given to a program: not 0, so that a forgotten base shows."""
SWIZZLED_BYTES = {0: 16, 2: 128, 4: 64, 6: 32}
NUMBERS = {("f16", 0): "f16", ("f16", 1): "bf16", ("tf32", 2): "tf32"}
KNOWN_BITS = 0x1F7F9FB0
"""Of an instruction descriptor: sizes, types and transposition, but not sparse or negated tiles, or shifts."""


class _Unwaited:
    """Loads, or stores, of tensor memory: who did the last of each cell, and how often it had waited before that."""

    def __init__(self, cells: int, threads: int) -> None:
        self.thread, self.since = np.zeros(cells, np.int32), np.zeros(cells, np.int32)
        self.waits = np.zeros(threads, np.int32)

    def add(self, threads: Array, cells: Array) -> None:
        self.thread[cells], self.since[cells] = threads[:, None] + 1, self.waits[threads][:, None]

    def wait(self, threads: Array, number: int) -> None:
        self.waits[threads] += 1

    def count(self, cells: Array) -> int:
        thread = self.thread[cells]
        return int(np.sum((thread > 0) & (self.waits[thread - 1] == self.since[cells])))


class TensorMemory:
    """Tensor memory of every program: cells of 32 bits, column after column.

    Attributes:
        columns, used: how many columns the kernel asks for, and how many each program has now.
        started: products of each program.
        result_of, read_by: numbers of the last products that wrote each cell, and that read it as operand A.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        asked = [i.operands[1] for i in machine.program.instructions if i.op.startswith("tcgen05.alloc")]
        self.columns = sum(int(count, 0) for count in asked)
        cells = machine.programs * self.columns * LANES
        self.used, self.started = np.zeros((2, machine.programs), np.int32)
        self.data, self.written = np.zeros(cells, np.uint32), np.zeros(cells, bool)
        self.accesses = Accesses(cells, 1, machine.program.threads, machine.clock, across=False)
        self.result_of, self.read_by = np.zeros((2, cells), np.int32)
        self.ld, self.st = (_Unwaited(cells, machine.threads) for _ in range(2))

    def _programs(self, threads: Array) -> Array:
        return np.asarray(threads // self.machine.program.threads)

    def allocate(self, threads: Array, at: Array, count: int, number: int) -> None:
        """Give columns to programs, and write into shared memory where these begin."""
        first = threads % WARP == 0
        programs = self._programs(threads[first])
        base = (FIRST + self.used[programs]).astype(np.uint32)
        self.used[programs] += count
        self.machine.shared.store(threads[first], at[first], [base], 4, number)

    def free(self, threads: Array, at: Array, count: int, number: int) -> None:
        first = threads % WARP == 0
        cells = self._cells(threads[first], at[first], *_tile(np.arange(LANES), count), number)
        self._overwrite(threads[first], cells, number)
        self.written[cells] = False
        self.used[self._programs(threads[first])] -= count

    def _cells(self, threads: Array, at: Array, lanes: Array, columns: Array, number: int) -> Array:
        """Cells at these lanes and columns from each thread's address on, `[threads, cells]`."""
        address, programs = at.astype(np.int64)[:, None], self._programs(threads)[:, None]
        lane, column = (address >> 16) + lanes, (address & 0xFFFF) - FIRST + columns
        outside = (lane >= LANES) | (column < 0) | (column >= self.used[programs])
        if outside.any():
            instruction = self.machine.program.instructions[number]
            raise FaultError(f"access outside tensor memory: {outside.sum()} cells, {instruction}")
        return np.asarray((programs * self.columns + column) * LANES + lane)

    def _of_warps(self, threads: Array, at: Array, shape: str, split: int, count: int, number: int) -> Array:
        """Cells `[threads, count]` of a load or store (PTX ISA, data movement shapes)."""
        lane, register = (threads % WARP)[:, None], np.arange(count)
        if shape == "32x32b":
            lanes, columns = lane, register
        elif shape == "16x32bx2":  # half a warp each, `split` columns apart
            lanes, columns = lane % 16, register + lane // 16 * split
        elif shape == "16x256b":
            lanes = lane // 4 + register // 2 % 2 * 8
            columns = lane % 4 * 2 + register % 2 + register // 4 * 8
        else:
            raise NotEmulatedError(str(self.machine.program.instructions[number]))
        self.machine.find("threads of a warp name different cells", np.sum(at != at[::WARP].repeat(WARP)), number)
        alien = at.astype(np.int64) >> 21 != threads // WARP % 4
        self.machine.find("a warp uses lanes of tensor memory that are not its own", np.sum(alien), number)
        return self._cells(threads, at, lanes, columns, number)

    def load(self, threads: Array, at: Array, shape: str, split: int, count: int, number: int) -> list[Array]:
        cells = self._of_warps(threads, at, shape, split, count, number)
        self.machine.find_all(self.accesses.read(cells.reshape(-1), 1, threads.repeat(count)), number)
        self._use(threads, cells, number)
        self.ld.add(threads, cells)
        return list(self.data[cells].T)

    def store(self, threads: Array, at: Array, values: list[Array], shape: str, split: int, number: int) -> None:
        cells = self._of_warps(threads, at, shape, split, len(values), number)
        self._overwrite(threads, cells, number)
        self.st.add(threads, cells)
        self.data[cells], self.written[cells] = np.stack(values, 1), True

    def _use(self, threads: Array, cells: Array, number: int) -> None:
        early = self.result_of[cells] > self.machine.clock.products[threads][:, None]
        self.machine.find("a product is used before it was waited for", np.sum(early), number)
        self._check_written(cells, number)

    def _check_written(self, cells: Array, number: int) -> None:
        self.machine.find("uninitialised tensor memory is read", np.sum(~self.written[cells]), number)
        self.machine.find("a store to tensor memory was not waited for", self.st.count(cells), number)

    def _overwrite(self, threads: Array, cells: Array, number: int) -> None:
        self.machine.find_all(self.accesses.write(cells.reshape(-1), 1, threads.repeat(cells.shape[1])), number)
        last = np.maximum(self.result_of[cells], self.read_by[cells])
        early = last > self.machine.clock.products[threads][:, None]
        self.machine.find("what tensor cores use is overwritten", np.sum(early), number)
        self.machine.find("a load from tensor memory was not waited for", self.ld.count(cells), number)

    def multiply(
        self, threads: Array, result: Array, left: Array, right: Array, shape: Array, keep: Array, kind: str,
        number: int,
    ) -> None:  # fmt: skip
        """The result, where it is to be kept, plus the product of two tiles.

        left: address in tensor memory, of 32 bits, or descriptor of a tile in shared memory, as that in `right`.
        shape: instruction descriptor: sizes and types of the tiles, and which are stored column by column.
        """
        bits = int(shape[0])
        numbers, others = (NUMBERS.get((kind, bits >> shift & 7)) for shift in (7, 10))
        m, n, depth = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8, 8 if kind == "tf32" else 16
        known = bits & ~KNOWN_BITS == 0 and bits >> 4 & 3 == 1 and m in (64, 128) and (shape == bits).all()
        if not known or numbers is None or numbers != others:
            raise NotEmulatedError(f"descriptor {bits:#x}, {self.machine.program.instructions[number]}")
        programs = self._programs(threads)
        self.machine.find("several threads start a product", len(threads) - len(np.unique(programs)), number)
        self.started[programs] += 1
        lanes = np.arange(m) + (np.arange(m) // 16 * 16 if m == 64 else 0)  # 64 rows: half of each warp's lanes
        cells = self._cells(threads, result, *_tile(lanes, n), number)
        self.machine.find_all(self.accesses.check(cells.reshape(-1), 1, threads.repeat(m * n), True), number)
        self.machine.find("a load from tensor memory was not waited for", self.ld.count(cells), number)
        self._check_written(cells[keep], number)
        if left.itemsize == 4:
            a = self._left_tile(threads, left, lanes, numbers, number)
            self.machine.find("tiles lie in different lanes", np.sum((result ^ left) >> np.uint32(16) != 0), number)
        else:
            a = self._shared_tile(threads, left, depth, m, numbers, bool(bits >> 15 & 1), number).transpose(0, 2, 1)
        b = self._shared_tile(threads, right, depth, n, numbers, bool(bits >> 16 & 1), number)
        before = np.where(keep[:, None], self.data[cells].view(np.float32), np.float32(0))
        after = (before + (a @ b).reshape(before.shape)).astype(np.float32)
        self.data[cells], self.written[cells] = after.view(np.uint32), True
        self.result_of[cells] = self.started[programs][:, None]

    def _left_tile(self, threads: Array, at: Array, lanes: Array, kind: str, number: int) -> Array:
        """Operand A `[threads, lanes, depth]` in tensor memory."""
        cells = self._cells(threads, at, *_tile(lanes, 8), number)
        self.machine.find_all(self.accesses.check(cells.reshape(-1), 1, threads.repeat(cells.shape[1])), number)
        self._use(threads, cells, number)
        self.read_by[cells] = self.started[self._programs(threads)][:, None]
        return _numbers(self.data[cells], kind).reshape(len(threads), len(lanes), -1)

    def _shared_tile(
        self, threads: Array, descriptors: Array, depth: int, width: int, kind: str, turned: bool, number: int
    ) -> Array:
        """Tile `[threads, depth, width]` that lies where each thread's descriptor says."""
        size, count = 4 if kind == "tf32" else 2, depth * width
        at = np.empty((len(threads), count), np.int64)
        for descriptor in np.unique(descriptors).tolist():
            swizzled = SWIZZLED_BYTES.get(descriptor >> 61)
            if swizzled is None or descriptor >> 46 & 7 != 1 or descriptor >> 52 & 1:
                raise NotEmulatedError(f"descriptor {descriptor:#x}, {self.machine.program.instructions[number]}")
            places = addresses(descriptor, swizzled, depth, width, size, turned)
            at[descriptors == descriptor] = places.reshape(-1)
        products = self.started[self._programs(threads)].repeat(count)
        load = self.machine.shared.load_by_tensor_cores
        words, _ = load(at.reshape(-1), size, threads.repeat(count), products, number)
        return _numbers(words, kind).reshape(len(threads), depth, width)


def _tile(lanes: Array, columns: int) -> tuple[Array, Array]:
    """Lane and column of each cell of a tile."""
    return lanes.repeat(columns), np.tile(np.arange(columns), len(lanes))


def _numbers(words: Array, kind: str) -> Array:
    return (warp.as_tf32(words) if kind == "tf32" else type_of(kind).numbers(words.view(np.uint16))).astype(np.float64)


class Mbarriers:
    """The mbarriers of all programs, by where they lie in shared memory.

    Attributes:
        count, lacking: arrivals that complete a phase, and how many of them the present one lacks.
        phase: how many phases are complete.
        products: how many products of the program are done when these are.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.count, self.lacking, self.phase, self.products = np.zeros((4, len(machine.shared.data) // 8), np.int32)

    def _places(self, threads: Array, at: Array, number: int) -> Array:
        places = self.machine.shared.locate(at, 8, threads, number)
        self.machine.find_all(self.machine.shared.accesses.read(places, 8, threads), number)
        return places // 8

    def set(self, threads: Array, at: Array, count: int, number: int) -> None:
        """Make them, or end them by a count of 0."""
        places = self.machine.shared.locate(at, 8, threads, number)
        self.machine.find_all(self.machine.shared.accesses.write(places, 8, threads), number)
        places //= 8
        if count:
            self.machine.find("an mbarrier is made where there is one", np.sum(self.count[places] > 0), number)
        self.count[places] = self.lacking[places] = count
        self.phase[places] = self.products[places] = 0

    def commit(self, threads: Array, at: Array, number: int) -> None:
        """Arrive when all products started before are done, which is now."""
        places = self._places(threads, at, number)
        self.machine.find("an mbarrier is used that does not exist", np.sum(self.count[places] == 0), number)
        self.lacking[places] -= 1
        full = places[self.lacking[places] == 0]
        self.lacking[full] = self.count[full]
        self.phase[full] += 1
        self.products[places] = self.machine.tensor_memory.started[threads // self.machine.program.threads]
        self.machine.stalled[:] = False

    def test(self, threads: Array, at: Array, parity: Array, number: int) -> list[Array]:
        """Whether the phase of a parity is complete; if not, the thread waits until others arrive."""
        places = self._places(threads, at, number)
        done = self.phase[places] & 1 != parity
        known = self.machine.clock.products
        known[threads[done]] = np.maximum(known[threads[done]], self.products[places[done]])
        self.machine.stalled[threads[~done]] = True
        return [done]
