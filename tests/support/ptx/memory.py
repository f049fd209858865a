"""Global, shared and local memory: accesses of the first two are checked, for bounds and for what is not there yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from .races import Accesses
from .scalar import UNSIGNED, Array

if TYPE_CHECKING:
    from .machine import Machine

SLOT_BITS = 40
LOCAL = 0x7FFF << SLOT_BITS
"""First address of local memory in the generic address space."""
_OFFSET = np.uint64((1 << SLOT_BITS) - 1)
_ALIGNMENT = 256


class FaultError(Exception):
    """An access that a GPU could not do, or that leaves its tensor."""


class Storages:
    """Memory of the tensors whose addresses were asked for lately: launches may be given addresses alone."""

    def __init__(self, count: int = 4096) -> None:
        self.count = count
        self.known: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.known.pop(storage.data_ptr(), None)
        self.known[storage.data_ptr()] = storage  # the latest is last
        if len(self.known) > self.count:
            del self.known[next(iter(self.known))]

    def of(self, pointer: torch.Tensor | int) -> torch.UntypedStorage:
        """The storage of a tensor, or the one that an address lies in."""
        if isinstance(pointer, torch.Tensor):
            return pointer.untyped_storage()
        for storage in reversed(self.known.values()):
            if storage.data_ptr() <= pointer <= storage.data_ptr() + storage.nbytes():
                return storage
        raise FaultError(f"no tensor lies at address {pointer:#x}")


class GlobalMemory:
    """The storages that a launch got, each in a slot of addresses of its own: an access beyond one meets no other."""

    def __init__(self, machine: Machine, storages: list[torch.UntypedStorage], granule: int) -> None:
        self.machine = machine
        self.storages = list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())
        self.low, self.high, self.start = [0], [0], [0]
        total = 0
        for storage in self.storages:
            base = storage.data_ptr() % _ALIGNMENT
            self.low.append(base)
            self.high.append(base + storage.nbytes())
            self.start.append(total)
            total += -(-self.high[-1] // _ALIGNMENT) * _ALIGNMENT
        self.lows, self.highs, self.starts = (np.array(x, np.int64) for x in (self.low, self.high, self.start))
        self.data = np.zeros(max(total, _ALIGNMENT), np.uint8)
        for own, bytes_ in self._pairs():
            own[:] = bytes_
        self.accesses = Accesses(len(self.data), granule, machine.program.threads, machine.clock, across=True)

    def _pairs(self) -> list[tuple[Array, Array]]:
        return [
            (self.data[start + low : start + high], torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
            for storage, start, low, high in zip(
                self.storages, self.start[1:], self.low[1:], self.high[1:], strict=True
            )
        ]

    def address(self, pointer: int, storage: torch.UntypedStorage) -> int:
        """The kernel's address of what lies at `pointer` in a storage; 0 for an empty tensor."""
        for slot, known in enumerate(self.storages, 1):
            if pointer and known.data_ptr() == storage.data_ptr():
                return (slot << SLOT_BITS) + self.low[slot] + pointer - storage.data_ptr()
        return 0

    def write_back(self) -> None:
        for own, bytes_ in self._pairs():
            bytes_[:] = own

    def locate(self, addresses: Array, size: int, number: int) -> Array:
        """Bytes of `data` at which accesses of `size` bytes begin."""
        slots = (addresses >> np.uint64(SLOT_BITS)).astype(np.int64)
        offsets = (addresses & _OFFSET).astype(np.int64)
        known = (slots > 0) & (slots < len(self.starts))
        slots = np.where(known, slots, 0)
        outside = ~known | (offsets < self.lows[slots]) | (offsets + size > self.highs[slots])
        instruction = self.machine.program.instructions[number]
        if (addresses & np.uint64(size - 1)).any():
            raise FaultError(f"misaligned access of {size} bytes, {instruction}")
        if outside.any():
            lane = np.flatnonzero(outside)[0]
            slot = slots[lane]
            raise FaultError(
                f"access outside its tensor: {size} bytes at {offsets[lane] - self.lows[slot]} of "
                f"{self.highs[slot] - self.lows[slot]}, by {outside.sum()} threads, {instruction}"
            )
        return np.asarray(self.starts[slots] + offsets)

    def bytes_at(self, addresses: Array, size: int, threads: Array, number: int) -> Array:
        """Bytes `[threads, size]` that a copy reads; `size` may be less than a copy's, which is aligned."""
        at = self._read(addresses, size, threads, number)
        return np.asarray(self.data[at[:, None] + np.arange(size)])

    def _read(self, addresses: Array, size: int, threads: Array, number: int) -> Array:
        at = self.locate(addresses, size, number)
        self.machine.find_all(self.accesses.read(at, size, threads), number)
        if self.machine.meter:
            self.machine.meter.sectors(number, addresses, size, threads)
        return at

    def load(self, threads: Array, addresses: Array, size: int, count: int, number: int) -> list[Array]:
        at = self._read(addresses, size * count, threads, number)
        words = self.data.view(UNSIGNED[size])
        return [words[at // size + i] for i in range(count)]

    def store(self, threads: Array, addresses: Array, values: list[Array], size: int, number: int) -> None:
        at = self.locate(addresses, size * len(values), number)
        self.machine.find_all(self.accesses.write(at, size * len(values), threads), number)
        if self.machine.meter:
            self.machine.meter.sectors(number, addresses, size * len(values), threads)
        _store(self.machine, self.data, at, size, values, number)


def _store(machine: Machine, data: Array, at: Array, size: int, values: list[Array], number: int) -> None:
    words = data.view(UNSIGNED[size])
    for i, value in enumerate(values):
        words[at // size + i] = value
        machine.find("replicas differ", np.sum(words[at // size + i] != value), number)


class SharedMemory:
    """Shared memory of every program, one after another.

    `cp.async` fills bytes that are pending until its thread has waited; then they count as written. Tensor cores that
    read it by themselves (`wgmma`) see what threads wrote only after a fence.
    """

    def __init__(self, machine: Machine, size: int, granule: int) -> None:
        self.machine, self.limit = machine, size
        self.size = -(-max(size, 1) // 128) * 128
        total = machine.programs * self.size
        self.data = np.full(total, 0xA5, np.uint8)
        self.accesses = Accesses(total, granule, machine.program.threads, machine.clock, across=False)
        self.written, self.pending = (np.zeros(total // granule, bool) for _ in range(2))
        self.being_read = np.zeros(total // granule, bool)
        self.groups: list[tuple[Array, Array, int, Array]] = []
        """Copies under way: threads, where they go, bytes of each, and the threads' groups."""
        self.committed = np.zeros(machine.threads, np.int32)
        self.fences = np.zeros(machine.threads, np.int32)
        self.fenced_at = np.full(machine.threads, -1, np.int32)
        self.fences_at_write = np.zeros(total // granule, np.int32)

    def locate(self, addresses: Array, size: int, threads: Array, number: int) -> Array:
        """Bytes of `data` at which accesses begin."""
        at = addresses.astype(np.int64)
        if (at + size > self.limit).any() or (at % size).any():
            kind = "outside shared memory" if (at + size > self.limit).any() else "misaligned"
            instruction = self.machine.program.instructions[number]
            raise FaultError(f"access {kind}: {size} bytes at {at.max()} of {self.limit}, {instruction}")
        return at + threads // self.machine.program.threads * self.size

    def load(self, threads: Array, addresses: Array, size: int, count: int, number: int) -> list[Array]:
        at = self.locate(addresses, size * count, threads, number)
        self.machine.find_all(self.accesses.read(at, size * count, threads), number)
        if self.machine.meter:
            self.machine.meter.wavefronts(number, addresses, size * count, threads)
        self._check_written(self.accesses.places(at, size * count), number)
        words = self.data.view(UNSIGNED[size])
        return [words[at // size + i] for i in range(count)]

    def _check_written(self, places: Array, number: int) -> None:
        self.machine.find("uninitialised shared memory is read", np.sum(~self.written[places]), number)
        self.machine.find("a copy is read before it was waited for", np.sum(self.pending[places]), number)

    def store(self, threads: Array, addresses: Array, values: list[Array], size: int, number: int) -> None:
        at = self.locate(addresses, size * len(values), threads, number)
        if self.machine.meter:
            self.machine.meter.wavefronts(number, addresses, size * len(values), threads)
        self._write(at, size * len(values), threads, number)
        _store(self.machine, self.data, at, size, values, number)

    def _write(self, at: Array, size: int, threads: Array, number: int) -> Array:
        self.machine.find_all(self.accesses.write(at, size, threads), number)
        places = self.accesses.places(at, size)
        self.machine.find("a copy under way is overwritten", np.sum(self.pending[places]), number)
        self.machine.find("what tensor cores are reading is overwritten", np.sum(self.being_read[places]), number)
        self.written[places] = True
        self.fences_at_write[places] = self.fences[threads][:, None]
        return places

    def copy(self, threads: Array, to: Array, source: Array, given: Array, size: int, number: int) -> None:
        """`cp.async`: `given` bytes from global memory, then zeros up to `size`."""
        data = np.zeros((len(threads), size), np.uint8)
        if (source[given > 0] & np.uint64(size - 1)).any():
            raise FaultError(f"misaligned copy of {size} bytes, {self.machine.program.instructions[number]}")
        for count in np.unique(given[given > 0]):
            chosen = given == count
            data[chosen, :count] = self.machine.memory.bytes_at(source[chosen], int(count), threads[chosen], number)
        at = self.locate(to, size, threads, number)
        if self.machine.meter:
            self.machine.meter.wavefronts(number, to, size, threads)
        self.pending[self._write(at, size, threads, number)] = True
        self.data[at[:, None] + np.arange(size)] = data
        self.groups.append((threads, at, size, self.committed[threads]))

    def commit(self, threads: Array, number: int) -> None:
        self.committed[threads] += 1

    def wait(self, threads: Array, left: int, number: int) -> None:
        """Wait until at most `left` of a thread's groups are under way."""
        waiting = np.zeros(self.machine.threads, bool)
        waiting[threads] = True
        kept = []
        for owners, at, size, groups in self.groups:
            done = waiting[owners] & (groups < self.committed[owners] - left)
            if done.any():
                places = self.accesses.places(at[done], size)
                self.pending[places] = False
                self.accesses.wrote(at[done], size, owners[done])
                self.fences_at_write[places] = self.fences[owners[done]][:, None]
            if not done.all():
                kept.append((owners[~done], at[~done], size, groups[~done]))
        self.groups = kept

    def fence(self, threads: Array, number: int) -> None:
        """`fence.proxy.async`: tensor cores see what these threads wrote, and what they saw others write."""
        self.fences[threads] += 1
        self.fenced_at[threads] = self.machine.clock.program[threads]

    def load_by_tensor_cores(self, addresses: Array, size: int, threads: Array, number: int) -> tuple[Array, Array]:
        """Return the numbers that tensor cores read at these addresses, and their places in memory."""
        at = self.locate(addresses, size, threads, number)
        self.machine.find_all(self.accesses.check(at, size, threads), number)
        places = self.accesses.places(at, size)
        self._check_written(places, number)
        last = self.accesses.writes
        seen = (self.fences[last.thread[places] - 1] > self.fences_at_write[places]) | (
            self.fenced_at[threads][:, None] > last.at_program[places]
        )
        self.machine.find("tensor cores read what no fence shows them", np.sum(~seen), number)
        self.being_read[places] = True
        return self.data.view(UNSIGNED[size])[at // size], at

    def stop_reading(self, at: Array, size: int, thread: int) -> None:
        """A warpgroup's tensor cores are done with what they read at these bytes."""
        self.being_read[self.accesses.places(at, size)] = False
        self.accesses.has_read(at, size, np.full(len(at), thread))


class LocalMemory:
    """Each thread's own memory."""

    def __init__(self, threads: int, size: int) -> None:
        self.data = np.zeros((threads, max(8, size)), np.uint8)

    def load(self, threads: Array, addresses: Array, size: int, count: int, number: int) -> list[Array]:
        at = (addresses & _OFFSET).astype(np.int64)[:, None] + np.arange(size)
        return [self.data[threads[:, None], at + i * size].view(UNSIGNED[size]).reshape(-1) for i in range(count)]

    def store(self, threads: Array, addresses: Array, values: list[Array], size: int, number: int) -> None:
        at = (addresses & _OFFSET).astype(np.int64)[:, None] + np.arange(size)
        for i, value in enumerate(values):
            self.data[threads[:, None], at + i * size] = np.ascontiguousarray(value).view(np.uint8).reshape(-1, size)


class GenericMemory:
    """Memory behind generic addresses: local if the address is there, else global."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def _of(self, addresses: Array) -> GlobalMemory | LocalMemory:
        is_local = (addresses >> np.uint64(SLOT_BITS) == LOCAL >> SLOT_BITS).all()
        return self.machine.local if is_local else self.machine.memory

    def load(self, threads: Array, addresses: Array, size: int, count: int, number: int) -> list[Array]:
        return self._of(addresses).load(threads, addresses, size, count, number)

    def store(self, threads: Array, addresses: Array, values: list[Array], size: int, number: int) -> None:
        self._of(addresses).store(threads, addresses, values, size, number)
