"""Who used memory last, so that two accesses that nothing orders are found.

Threads of a warp are ordered by `bar.warp.sync`, warps of a program by barriers, and programs of a grid by nothing.
"""

from collections.abc import Iterator

import numpy as np

from .scalar import Array

WARP = 32
NOBODY, SEVERAL = 0, -1


class Clock:
    """Counts of the barriers of its program and of its warp that each thread has passed."""

    def __init__(self, threads: int) -> None:
        self.program = np.zeros(threads, np.int32)
        self.warp = np.zeros(threads, np.int32)


class _Last:
    """The last access of one kind to each granule: thread, warp and program, counted from 1, and the clock then."""

    def __init__(self, granules: int) -> None:
        self.thread, self.warp, self.program, self.at_program, self.at_warp = (
            np.zeros(granules, np.int32) for _ in range(5)
        )

    def set(self, places: Array, threads: Array, warps: Array, programs: Array, clock: Clock) -> None:
        self.thread[places], self.warp[places], self.program[places] = threads + 1, warps, programs
        self.at_program[places], self.at_warp[places] = clock.program[threads], clock.warp[threads]

    def add(self, places: Array, threads: Array, warps: Array, programs: Array, clock: Clock) -> None:
        """Like `set`, but keeps in mind accesses since the last barrier by others."""
        later = self.at_program[places] != clock.program[threads]
        thread, warp, program = self.thread[places], self.warp[places], self.program[places]
        merged = (
            _merged(np.where(later, NOBODY, thread), threads + 1),
            _merged(np.where(later, NOBODY, warp), warps),
            _merged(program, programs),
        )
        self.set(places, threads, warps, programs, clock)
        for field, values in zip((self.thread, self.warp, self.program), merged, strict=True):
            field[places] = values
            twice = field[places] != values  # several threads of this instruction
            field[places[twice]] = SEVERAL


def _merged(before: Array, now: Array) -> Array:
    return np.where((before == NOBODY) | (before == now), now, SEVERAL)


class Accesses:
    """Reads and writes of a memory.

    Attributes:
        granule: bytes that are told apart.
        across: whether programs share the memory. If they do, the order within a warp is not looked at: Triton relies
            on a warp's loads and stores of global memory being done in turn.
    """

    def __init__(self, size: int, granule: int, program_threads: int, clock: Clock, across: bool) -> None:
        self.granule, self.program_threads, self.clock, self.across = granule, program_threads, clock, across
        self.reads, self.writes = _Last(-(-size // granule)), _Last(-(-size // granule))

    def read(self, at: Array, size: int, threads: Array) -> Iterator[tuple[str, int]]:
        """Records that `threads` read `size` bytes from `at` on; returns kinds of conflicts and how often each is."""
        given = self._granules(at, size, threads)
        yield from self._conflicts("read after write", self.writes, *given)
        self.reads.add(*given, self.clock)

    def write(self, at: Array, size: int, threads: Array) -> Iterator[tuple[str, int]]:
        """Likewise for a write."""
        given = self._granules(at, size, threads)
        yield from self._conflicts("write after write", self.writes, *given)
        yield from self._conflicts("write after read", self.reads, *given)
        self.writes.set(*given, self.clock)
        places, _, _, programs = given
        if count := int((self.writes.program[places] != programs).sum()):
            yield "race: write by several programs at once", count

    def check(self, at: Array, size: int, threads: Array) -> Iterator[tuple[str, int]]:
        """Likewise for what tensor cores do, but records nothing: others wait for them, and not at barriers."""
        yield from self._conflicts("read after write", self.writes, *self._granules(at, size, threads))

    def wrote(self, at: Array, size: int, threads: Array) -> None:
        """Records a write that was checked when it began."""
        self.writes.set(*self._granules(at, size, threads), self.clock)

    def has_read(self, at: Array, size: int, threads: Array) -> None:
        """Records a read that was checked when it began."""
        self.reads.add(*self._granules(at, size, threads), self.clock)

    def places(self, at: Array, size: int) -> Array:
        """Granules of each access, `[accesses, granules]`."""
        return np.asarray(at[:, None] // self.granule + np.arange(max(1, size // self.granule)))

    def _granules(self, at: Array, size: int, threads: Array) -> tuple[Array, Array, Array, Array]:
        places = self.places(at, size)
        owners = np.repeat(threads.astype(np.int32), places.shape[1])
        return places.reshape(-1), owners, owners // WARP + 1, owners // self.program_threads + 1

    def _conflicts(
        self, kind: str, last: _Last, places: Array, threads: Array, warps: Array, programs: Array
    ) -> Iterator[tuple[str, int]]:
        thread, warp = last.thread[places], last.warp[places]
        there = thread != NOBODY
        found = {"by another warp": (warp != warps) & (last.at_program[places] == self.clock.program[threads])}
        if self.across:
            alien = last.program[places] != programs
            found = {"by another warp": found["by another warp"] & ~alien, "by another program": alien}
        else:
            same = (warp == warps) & (thread != threads + 1)
            found["by another thread of the warp"] = same & (last.at_warp[places] == self.clock.warp[threads])
        for who, where in found.items():
            if count := int((there & where).sum()):
                yield f"race: {kind} {who}", count
