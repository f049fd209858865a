"""`wgmma`: products that four warps start, and that their tensor cores finish later.

A result is computed at once, but nobody may touch its registers, or overwrite what it is computed from, before the
warpgroup has waited for it; and tensor cores see registers and shared memory only after the fences that PTX asks for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import warp
from .program import NotEmulatedError
from .scalar import Array, type_of

if TYPE_CHECKING:
    from .machine import Machine

THREADS = 128
SWIZZLED_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}
SWIZZLES = {16: 0, 32: 1, 64: 3, 128: 7}


@dataclass
class _Product:
    """A product under way: its registers, the warpgroups that wait for it, and what they read of shared memory.

    reads: for each warpgroup, bytes and size.
    """

    results: frozenset[int]
    operands: frozenset[int]
    groups: set[int]
    batches: Array
    reads: dict[int, list[tuple[Array, int]]]


class Warpgroups:
    """Products under way, and registers that changed since the last fence, by warpgroup."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        count = machine.threads // THREADS
        self.products: list[_Product] = []
        self.changed: list[set[int]] = [set() for _ in range(count)]
        self.committed = np.zeros(count, np.int64)

    def running(self, mask: Array | None) -> list[int]:
        """Warpgroups with threads that run."""
        if mask is None:
            return list(range(len(self.changed)))
        return np.flatnonzero(mask.reshape(-1, THREADS).any(1)).tolist()

    def touch(self, reads: frozenset[int], writes: frozenset[int], mask: Array | None, number: int) -> None:
        """Another instruction reads and writes these registers."""
        running = self.running(mask)
        for product in self.products:
            if not product.groups.isdisjoint(running):
                early, changed = product.results & (reads | writes), product.operands & writes
                self.machine.find("a product's registers are used before it was waited for", len(early), number)
                self.machine.find("a product's operands change before it was waited for", len(changed), number)
        for group in running:
            self.changed[group] |= writes

    def fence(self, mask: Array | None) -> None:
        for group in self.running(mask):
            self.changed[group].clear()

    def commit(self, mask: Array | None) -> None:
        self.committed[self.running(mask)] += 1

    def wait(self, left: int, mask: Array | None) -> None:
        """Wait until at most `left` batches of products are under way."""
        for product in self.products:
            for group in product.groups.intersection(self.running(mask)):
                if product.batches[group] < self.committed[group] - left:
                    product.groups.remove(group)
                    for at, size in product.reads[group]:
                        self.machine.shared.stop_reading(at, size, group * THREADS)
        self.products = [product for product in self.products if product.groups]
        for product in self.products:  # which may read the same bytes
            for group in product.groups:
                for at, size in product.reads[group]:
                    self.machine.shared.being_read[self.machine.shared.accesses.places(at, size)] = True

    def multiply(
        self, op: str, results: list[Array], left: list[Array] | Array, right: Array, keep: Array, options: list[int],
        registers: tuple[frozenset[int], frozenset[int]], mask: Array | None, number: int,
    ) -> list[Array]:  # fmt: skip
        """Results, where they are to be kept, plus the product of two tiles.

        left: registers, or descriptors of a tile in shared memory, as those in `right`.
        options: factors of both operands, then for each one in shared memory 1 if it is stored column by column.
        registers: numbers of the results' and of the left operand's.
        """
        kind = op.rpartition(".")[2]
        shape = re.search(r"m64n(\d+)k(\d+)", op)
        if shape is None or kind not in ("f16", "bf16", "tf32") or options[:2] != [1, 1]:
            raise NotEmulatedError(op)
        columns, depth = int(shape[1]), int(shape[2])
        running, used = self.running(mask), registers[0] | registers[1]
        early = sum(len(product.results & registers[1]) for product in self.products if product.groups & set(running))
        self.machine.find("a product's registers are used before it was waited for", early, number)
        unseen = sum(len(used & self.changed[group]) for group in running)
        self.machine.find("tensor cores read registers that no fence shows them", unseen, number)
        product = _Product(*registers, set(running), self.committed.copy(), {group: [] for group in running})
        self.products.append(product)
        turned = options[2:]
        b = self._shared_tile(right, depth, columns, kind, bool(turned and turned[-1]), product, number)
        if isinstance(left, list):
            a = warp.left_tile(left, kind)
        else:
            rows = self._shared_tile(left, depth, 64, kind, bool(turned and turned[0]), product, number)
            a = rows.transpose(0, 2, 1).reshape(-1, 16, depth)
        return warp.accumulate(results, a @ np.repeat(b, 4, 0), keep)

    def _shared_tile(
        self, descriptors: Array, depth: int, width: int, kind: str, turned: bool, product: _Product, number: int
    ) -> Array:
        """Tile `[warpgroups, depth, width]` that lies where each running warpgroup's descriptor says."""
        size = 4 if kind == "tf32" else 2
        each = np.broadcast_to(descriptors, self.machine.threads).reshape(-1, THREADS)
        tile = np.zeros((len(each), depth, width))
        for group, reads in product.reads.items():
            self.machine.find("a descriptor differs within a warpgroup", np.sum(each[group] != each[group, 0]), number)
            descriptor = int(each[group, 0])
            at = addresses(descriptor, SWIZZLED_BYTES[descriptor >> 62], depth, width, size, turned).reshape(-1)
            threads = np.full(at.size, group * THREADS)
            words, places = self.machine.shared.load_by_tensor_cores(at, size, threads, number)
            reads.append((places, size))
            numbers = warp.as_tf32(words) if kind == "tf32" else type_of(kind).numbers(words)
            tile[group] = numbers.reshape(depth, width)
        return tile


def addresses(descriptor: int, swizzled: int, depth: int, width: int, size: int, turned: bool) -> Array:
    """Where the numbers `[depth, width]` of a tile lie (PTX ISA, matrix descriptors and canonical layouts).

    swizzled: bytes within which the descriptor's swizzle permutes 16 at a time; 16 for none.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 49 & 7 and swizzled != 16:
        raise NotEmulatedError("a matrix descriptor with a base offset")
    k, n = np.arange(depth)[:, None], np.arange(width)[None, :]
    row, byte = (k, n * size) if turned else (n, k * size)
    if swizzled == 16:  # cores of 8 rows of 16 bytes; stored by columns, the two steps change roles
        across, along = (stride, leading) if turned else (leading, stride)
        offset = row % 8 * 16 + row // 8 * along + byte // 16 * across + byte % 16
    else:
        offset = row % 8 * swizzled + row // 8 * stride + byte % swizzled
        offset = offset + (byte // swizzled * leading if turned else byte // swizzled * swizzled)
    at = start + offset
    return np.asarray(at ^ (at >> 7 & SWIZZLES[swizzled]) << 4)
