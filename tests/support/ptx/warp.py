"""Instructions of a whole warp: shuffles, reductions, and the tiles of tensor cores, as PTX's figures show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .program import NotEmulatedError
from .races import WARP
from .scalar import Array, type_of

if TYPE_CHECKING:
    from .machine import Machine

LANE = np.arange(WARP)
ROW, PAIR = LANE >> 2, LANE & 3
"""Of a tile of 8 x 8 numbers in 32 bits each: the row and the column of each lane."""


def shuffle(mode: str, x: Array, lanes: Array, control: Array, threads: int) -> Array:
    """`shfl`: the value of another lane, or a lane's own where that lies outside its segment."""
    lanes, control = (np.broadcast_to(a.astype(np.int64), threads).reshape(-1, WARP) for a in (lanes, control))
    segment, clamp = control >> 8 & 31, control & 31
    lanes, last = lanes & 31, LANE & segment | clamp & ~segment
    source = LANE ^ lanes if mode == "bfly" else LANE & segment | lanes & ~segment
    inside = source <= last
    given = np.broadcast_to(x, threads).reshape(-1, WARP)
    return np.take_along_axis(given, np.where(inside, source, LANE), 1).reshape(-1)


def reduce(op: str, kind: str, x: Array) -> Array:
    """`redux`: one number for all lanes; what is not a number loses."""
    numbers = type_of(kind).numbers(x).reshape(-1, WARP)
    functions = {"max": np.fmax, "min": np.fmin, "add": np.add}
    found = functions[op].reduce(numbers, 1, dtype=numbers.dtype)
    return np.repeat(found, WARP).view(np.uint32)


def load_tiles(
    machine: Machine, threads: Array, addresses: Array, count: int, turned: bool, number: int
) -> list[Array]:
    """`ldmatrix`: tiles of 8 x 8 halves, whose rows lie at the addresses of eight lanes each."""
    tiles = []
    for at in _rows(machine, addresses, count, number):
        if turned:
            (halves,) = machine.shared.load(np.tile(threads, 2), _columns(at), 2, 1, number)
            low, high = halves.astype(np.uint32).reshape(2, -1)
            words = low | high << np.uint32(16)
        else:
            (words,) = machine.shared.load(threads, (at[:, ROW] + 4 * PAIR).reshape(-1), 4, 1, number)
        tiles.append(words)
    return tiles


def store_tiles(
    machine: Machine, threads: Array, addresses: Array, tiles: list[Array], turned: bool, number: int
) -> None:
    """`stmatrix`: the reverse of `load_tiles`."""
    for words, at in zip(tiles, _rows(machine, addresses, len(tiles), number), strict=True):
        if turned:
            halves = np.concatenate([words, words >> np.uint32(16)]).astype(np.uint16)
            machine.shared.store(np.tile(threads, 2), _columns(at), [halves], 2, number)
        else:
            machine.shared.store(threads, (at[:, ROW] + 4 * PAIR).reshape(-1), [words], 4, number)


def _rows(machine: Machine, addresses: Array, count: int, number: int) -> Iterator[Array]:
    """Yield the addresses of each tile's eight rows, `[warps, 8]`."""
    for tile in range(count):
        at = addresses.reshape(-1, WARP)[:, 8 * tile : 8 * tile + 8].astype(np.int64)
        machine.find("misaligned rows of a tile", np.sum(at % 16 != 0), number)
        yield at


def _columns(rows: Array) -> Array:
    """Where each lane's first half lies in a tile that is read column by column, then where each second one does."""
    return np.concatenate([(rows[:, 2 * PAIR + i] + 2 * ROW).reshape(-1) for i in range(2)])


def multiply(op: str, a: list[Array], b: list[Array], c: list[Array]) -> list[Array]:
    """`mma`: a 16 x K tile times a K x 8 tile, summed in float64 and rounded once."""
    parts = op.split(".")
    shape, kind = parts[3], parts[7]
    if (shape, kind) not in (("m16n8k16", "f16"), ("m16n8k16", "bf16"), ("m16n8k8", "tf32")):
        raise NotEmulatedError(op)
    return accumulate(c, left_tile(a, kind) @ right_tile(b, kind), None)


def left_tile(registers: list[Array], kind: str) -> Array:
    """Numbers `[warps, 16, K]` of the operand A in registers."""
    numbers = _numbers(registers, kind)
    width = numbers.shape[-1]
    tile = np.empty((len(numbers), 16, 8 * width))
    for part in range(4):
        for i in range(width):
            tile[:, ROW + part % 2 * 8, width * PAIR + part // 2 * 4 * width + i] = numbers[:, :, part, i]
    return tile


def right_tile(registers: list[Array], kind: str) -> Array:
    """Numbers `[warps, K, 8]` of the operand B in registers."""
    numbers = _numbers(registers, kind)
    width = numbers.shape[-1]
    tile = np.empty((len(numbers), 8 * width, 8))
    for part in range(2):
        for i in range(width):
            tile[:, width * PAIR + part * 4 * width + i, ROW] = numbers[:, :, part, i]
    return tile


def _numbers(registers: list[Array], kind: str) -> Array:
    """`[warps, lanes, registers, numbers per register]`."""
    if kind == "tf32":
        each = [as_tf32(x)[:, None] for x in registers]
    else:
        each = [type_of(f"{kind}x2").numbers(x) for x in registers]
    return np.stack(each, 1).reshape(-1, WARP, len(registers), each[0].shape[1]).astype(np.float64)


def as_tf32(words: Array) -> Array:
    """Float32 numbers of which tensor cores read the upper 19 bits."""
    return (words & np.uint32(0xFFFFE000)).view(np.float32)


def accumulate(before: list[Array], product: Array, keep: Array | None) -> list[Array]:
    """Registers of the sum `[warps, 16, N]`, with what was there before, where it is to be kept."""
    after = []
    for number, words in enumerate(before):
        part, i = divmod(number, 2)
        column = 8 * (part // 2) + 2 * PAIR + i
        sums = product[:, ROW + part % 2 * 8, column].reshape(-1)
        addend = np.broadcast_to(words, len(sums)).view(np.float32)
        if keep is not None:
            addend = np.where(keep, addend, np.float32(0))
        after.append((addend + sums).astype(np.float32).view(np.uint32))
    return after
