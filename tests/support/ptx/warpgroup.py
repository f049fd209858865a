"""`wgmma`: products that four warps start, and that their tensor cores finish later.

A result is computed at once, but nobody may touch its registers, or overwrite what it is computed from, before the
warpgroup has waited for it; and tensor cores see registers and shared memory only after the fences that PTX asks for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
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


def whole(mask: Array | None, threads: int) -> Array | None:
    """Which warpgroups run, or None if one of them does so in part."""
    groups = np.ones(threads, bool).reshape(-1, THREADS) if mask is None else mask.reshape(-1, THREADS)
    return groups.all(1) if (groups.all(1) == groups.any(1)).all() else None


@dataclass
class _Product:
    """A product under way: its registers, its group, and the shared memory that it reads: bytes, size and thread."""

    results: frozenset[int]
    operands: frozenset[int]
    group: int
    reads: list[tuple[Array, int, int]] = field(default_factory=list)


class Warpgroups:
    """Products under way, and registers that changed since the last fence; all warpgroups run the same code."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.products: list[_Product] = []
        self.changed: set[int] = set()
        self.committed = 0

    def touch(self, reads: frozenset[int], writes: frozenset[int], number: int) -> None:
        """Another instruction reads and writes these registers."""
        for product in self.products:
            early, changed = product.results & (reads | writes), product.operands & writes
            self.machine.find("a product's registers are used before it was waited for", len(early), number)
            self.machine.find("a product's operands change before it was waited for", len(changed), number)
        self.changed |= writes

    def fence(self) -> None:
        self.changed.clear()

    def commit(self) -> None:
        self.committed += 1

    def wait(self, left: int) -> None:
        done = [product for product in self.products if product.group < self.committed - left]
        self.products = [product for product in self.products if product.group >= self.committed - left]
        for at, size, thread in (read for product in done for read in product.reads):
            self.machine.shared.stop_reading(at, size, thread)

    def multiply(
        self, op: str, results: list[Array], left: list[Array] | Array, right: Array, keep: Array, options: list[int],
        registers: tuple[frozenset[int], frozenset[int]], running: Array, number: int,
    ) -> list[Array]:  # fmt: skip
        """The sum of `results` (where kept) and the product of two tiles; the right one, and with a descriptor in
        `left` also that one, lie in shared memory.

        options: factors of both operands, then for each one in shared memory 1 if it is stored column by column.
        registers: numbers of the results' and of the left operand's.
        running: warpgroups that run this; the others' sums are left undefined.
        """
        kind = op.rpartition(".")[2]
        shape = re.search(r"m64n(\d+)k(\d+)", op)
        if shape is None or kind not in ("f16", "bf16", "tf32") or options[:2] != [1, 1]:
            raise NotEmulatedError(op)
        columns, depth = int(shape[1]), int(shape[2])
        unseen = (registers[0] | registers[1]) & self.changed
        self.machine.find("tensor cores read registers that no fence shows them", len(unseen), number)
        product = _Product(*registers, self.committed)
        self.products.append(product)
        turned = options[2:]
        b = self._shared_tile(right, depth, columns, kind, bool(turned and turned[-1]), product, running, number)
        if isinstance(left, list):
            a = warp.left_tile(left, kind)
        else:
            rows = self._shared_tile(left, depth, 64, kind, bool(turned and turned[0]), product, running, number)
            a = rows.transpose(0, 2, 1).reshape(-1, 16, depth)
        return warp.accumulate(results, a @ np.repeat(b, 4, 0), keep)

    def _shared_tile(
        self, descriptors: Array, depth: int, width: int, kind: str, turned: bool, product: _Product, running: Array,
        number: int,
    ) -> Array:  # fmt: skip
        """Tile `[warpgroups, depth, width]` that lies where each warpgroup's descriptor says."""
        size = 4 if kind == "tf32" else 2
        each = np.broadcast_to(descriptors, self.machine.threads).reshape(-1, THREADS)
        differing = running[:, None] & (each != each[:, :1])
        self.machine.find("a descriptor differs within a warpgroup", np.sum(differing), number)
        tile = np.zeros((len(each), depth, width))
        for group in np.flatnonzero(running).tolist():
            at = _addresses(int(each[group, 0]), depth, width, size, turned)
            thread = group * THREADS
            words, places = self.machine.shared.load_by_tensor_cores(at.reshape(-1), size, thread, number)
            product.reads.append((places, size, thread))
            numbers = warp.as_tf32(words) if kind == "tf32" else type_of(kind).numbers(words)
            tile[group] = numbers.reshape(depth, width)
        return tile


def _addresses(descriptor: int, depth: int, width: int, size: int, turned: bool) -> Array:
    """Where the numbers `[depth, width]` of a tile lie (PTX ISA, matrix descriptors and canonical layouts)."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    swizzled = SWIZZLED_BYTES[descriptor >> 62 & 3]
    if descriptor >> 49 & 7 and swizzled != 16:
        raise NotEmulatedError("wgmma with a base offset")
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
