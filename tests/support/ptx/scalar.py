"""What scalar instructions compute: one table of NumPy functions by the first part of the opcode.

Semantics as in NVIDIA's PTX ISA. Registers hold unsigned integers, one per thread; a type says which numbers they are.
Approximate instructions (`ex2`, `div.full`) are exact here, so their last bits differ from a GPU's.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .program import NotEmulatedError

Array: TypeAlias = npt.NDArray[Any]
Numbers: TypeAlias = Callable[..., Array]
"""A function of arrays of numbers."""
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FLOAT: dict[int, Any] = {2: np.float16, 4: np.float32, 8: np.float64}
SMALLEST_NORMAL = np.finfo(np.float32).tiny
_TYPE = re.compile(r"(pred)|(bf|tf|[busf])(\d+)(x2)?")


@dataclass(frozen=True)
class Type:
    """A PTX type: its kind (`pred`, `b`, `u`, `s`, `f`, `bf` or `tf`), and the bytes of one number."""

    kind: str
    size: int
    pair: bool = False

    @property
    def bytes(self) -> int:
        return self.size * (1 + self.pair)

    @property
    def is_float(self) -> bool:
        return self.kind in ("f", "bf")

    def numbers(self, words: Array) -> Array:
        """Numbers in registers: bfloat16 as float32, and pairs as `[threads, 2]`."""
        if self.kind == "pred":
            return words
        if words.itemsize != self.bytes:
            words = words.astype(UNSIGNED[self.bytes])
        if self.kind == "bf":
            found: Array = (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            kinds = {"s": SIGNED, "f": FLOAT}.get(self.kind, UNSIGNED)
            found = words.view(kinds[self.size])
        return found.reshape(-1, 2) if self.pair else found

    def words(self, numbers: Array, size: int) -> Array:
        """Registers of `size` bytes that hold these numbers; narrow signed ones are extended by their sign."""
        if self.kind == "pred":
            return numbers
        if self.kind == "bf":
            held = _to_bfloat16(numbers)
        elif self.kind == "s" and not self.pair:
            held = numbers.astype(SIGNED[size])
        else:
            held = np.ascontiguousarray(numbers)
        words = held.view(UNSIGNED[self.bytes if self.pair else held.itemsize]).reshape(-1)
        return words.astype(UNSIGNED[size], copy=False)


def type_of(name: str) -> Type:
    found = _TYPE.fullmatch(name)
    if found is None:
        raise NotEmulatedError(f"type {name}")
    return Type("pred", 0) if found[1] else Type(found[2], int(found[3]) // 8, bool(found[4]))


B32, B64, U32, PREDICATE = type_of("b32"), type_of("b64"), type_of("u32"), type_of("pred")


@dataclass(frozen=True)
class Operation:
    """A function of numbers, the types of its operands and of its result."""

    function: Numbers
    sources: tuple[Type, ...]
    target: Type


@cache
def operation(op: str) -> Operation:
    """What an opcode computes.

    Raises:
        NotEmulatedError: it is not in the table, or has a modifier that changes it in a way not known here.
    """
    name, *parts = op.split(".")
    make = TABLE.get(name)
    if make is None:
        raise NotEmulatedError(op)
    modifiers = [part for part in parts if not _TYPE.fullmatch(part)]
    kinds = [type_of(part) for part in parts if _TYPE.fullmatch(part)]
    if set(modifiers) - MODIFIERS or (name == "mad" and "hi" in modifiers):
        raise NotEmulatedError(op)
    try:
        found = make(modifiers, *kinds)
    except TypeError as error:  # of more types than the table expects
        raise NotEmulatedError(op) from error
    if "ftz" in modifiers:
        return Operation(_flushed(found.function), found.sources, found.target)
    return found


def _flushed(function: Numbers) -> Numbers:
    def zeroed(x: Array) -> Array:
        return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.zeros_like(x), x), x)

    return lambda *numbers: zeroed(function(*map(zeroed, numbers)))


def _to_bfloat16(numbers: Array) -> Array:
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _same(function: Numbers, count: int) -> Callable[..., Operation]:
    """Operands and result of one type."""
    return lambda modifiers, kind: Operation(function, (kind,) * count, kind)


def _logic(function: Numbers, count: int) -> Callable[..., Operation]:
    """Bits of one type, whatever numbers they are."""
    return lambda modifiers, kind: Operation(function, (as_bits(kind),) * count, as_bits(kind))


def as_bits(kind: Type) -> Type:
    return kind if kind.kind == "pred" else Type("b", kind.bytes)


def _fused(x: Array, y: Array, z: Array) -> Array:
    """`x * y + z`, rounded once."""
    if x.dtype.kind != "f":
        return x * y + z
    if x.dtype == np.float64:
        raise NotEmulatedError("fma.f64")
    exact = x.astype(np.float64) * y.astype(np.float64)  # no bits are lost
    addend = z.astype(np.float64)
    total = exact + addend
    if x.dtype == np.float16:
        return total.astype(np.float16)
    # Rounded to odd where bits are lost, so that rounding to float32 sees on which side of a tie the number lies.
    other = total - exact
    lost = (exact - (total - other)) + (addend - other)
    inexact = (lost != 0) & (total.view(np.int64) & 1 == 0) & np.isfinite(total)
    if inexact.any():
        total = np.where(inexact, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)
    return total.astype(np.float32)


def _extreme(function: Numbers, negative: Numbers) -> Callable[..., Operation]:
    """`min` or `max`: the operand that is a number wins, and -0 lies below +0: `negative` says when it is chosen."""

    def make(modifiers: list[str], kind: Type) -> Operation:
        def chosen(x: Array, y: Array) -> Array:
            found = function(x, y)
            zeros = (found == 0) & (x == y)
            if not kind.is_float or not zeros.any():
                return found
            sign = np.where(negative(np.signbit(x), np.signbit(y)), found.dtype.type(-1), found.dtype.type(1))
            return np.where(zeros, np.copysign(found, sign), found)

        return Operation(chosen, (kind, kind), kind)

    return make


def _multiply(modifiers: list[str], kind: Type) -> Operation:
    if "wide" in modifiers:
        double = Type(kind.kind, 2 * kind.size)
        return Operation(lambda x, y: _as(double, x) * _as(double, y), (kind, kind), double)
    if "hi" in modifiers:
        bits = 8 * kind.size  # Python's own integers hold any product
        wide: Any = object if kind.size == 8 else (SIGNED if kind.kind == "s" else UNSIGNED)[2 * kind.size]
        return Operation(lambda x, y: (x.astype(wide) * y.astype(wide) >> bits).astype(x.dtype), (kind, kind), kind)
    return Operation(lambda x, y: x * y, (kind, kind), kind)


def _multiply_add(modifiers: list[str], kind: Type) -> Operation:
    wide = Type(kind.kind, 2 * kind.size) if "wide" in modifiers else kind
    return Operation(lambda x, y, z: _as(wide, x) * _as(wide, y) + z, (kind, kind, wide), wide)


def _as(kind: Type, numbers: Array) -> Array:
    return numbers.astype((SIGNED if kind.kind == "s" else UNSIGNED)[kind.size])


def _divide(modifiers: list[str], kind: Type) -> Operation:
    function = np.divide if kind.is_float else (lambda x, y: _divided(x, y)[0])
    return Operation(function, (kind, kind), kind)


def _divided(x: Array, y: Array) -> tuple[Array, Array]:
    """Quotient and remainder of integers, towards zero; a divisor of zero counts as one."""
    y = np.where(y == 0, y.dtype.type(1), y)
    quotient = x // y
    remainder = x - quotient * y
    away = (remainder != 0) & ((remainder < 0) != (x < 0))
    return np.where(away, quotient + x.dtype.type(1), quotient), np.where(away, remainder - y, remainder)


def _shift(left: bool) -> Callable[..., Operation]:
    """Shifts beyond the width leave nothing, or copies of the sign."""

    def inner(modifiers: list[str], kind: Type) -> Operation:
        bits = 8 * kind.size

        def shifted(x: Array, by: Array) -> Array:
            count = np.minimum(by, bits - 1).astype(x.dtype)
            found = x << count if left else x >> count
            return found if kind.kind == "s" and not left else np.where(by >= bits, x.dtype.type(0), found)

        return Operation(shifted, (kind, U32), kind)

    return inner


def _funnel(modifiers: list[str], kind: Type) -> Operation:
    left, wraps = "l" in modifiers, "wrap" in modifiers

    def shifted(low: Array, high: Array, by: Array) -> Array:
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        count = (by & np.uint32(31) if wraps else np.minimum(by, np.uint32(32))).astype(np.uint64)
        return (both << count >> np.uint64(32) if left else both >> count).astype(np.uint32)

    return Operation(shifted, (B32, B32, U32), B32)


def _extract(modifiers: list[str], kind: Type) -> Operation:
    """`bfe`: a field of bits, with its sign if the type has one."""

    def extracted(x: Array, start: Array, length: Array) -> Array:
        count = np.minimum(length & np.uint32(255), 8 * kind.size).astype(np.uint64)
        field = x.astype(np.uint64) >> (start & np.uint32(255)).astype(np.uint64)
        field &= (np.uint64(1) << count) - np.uint64(1)
        if kind.kind == "s":
            sign = np.uint64(1) << count - np.uint64(1)
            field = (field ^ sign) - sign
        return field.astype(UNSIGNED[kind.size])

    bits = as_bits(kind)
    return Operation(extracted, (bits, U32, U32), bits)


def _permute(a: Array, b: Array, selectors: Array) -> Array:
    """`prmt`: each nibble of a selector names one of eight bytes, or with its highest bit that byte's sign."""
    a, b = np.broadcast_arrays(a, b)
    table = np.stack([a, b], 1).view(np.uint8)
    places = selectors[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    if len(places) == 1:
        found = table[:, places[0] & 7]
    else:
        if len(table) == 1:
            table = np.broadcast_to(table, (len(places), 8))
        found = np.take_along_axis(table, (places & np.uint32(7)).astype(np.intp), 1)
    signs = (found.view(np.int8) >> 7).view(np.uint8)
    return np.ascontiguousarray(np.where(places & 8, signs, found)).view(np.uint32).reshape(-1)


def _lookup(a: Array, b: Array, c: Array, table: Array) -> Array:
    """`lop3`: any function of three bits, as the table of its eight results."""
    known = int(table[0]) if len(table) == 1 else None
    found = np.zeros(1, np.uint32)
    for i in range(8):
        if known is None or known >> i & 1:
            term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            found = found | (term if known is not None else np.where(table >> np.uint32(i) & 1, term, np.uint32(0)))
    return found


_COMPARISONS: dict[str, Numbers] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _compare(modifiers: list[str], kind: Type) -> Operation:
    """`setp`: a comparison is false for what is not a number; with `u` after its name it is true."""
    (name,) = (part for part in modifiers if part != "ftz")
    if name == "num":
        return Operation(lambda x, y: ~(np.isnan(x) | np.isnan(y)), (kind, kind), PREDICATE)
    unordered = kind.is_float and name.endswith("u")
    function = _COMPARISONS[name[:-1] if unordered else name]

    def compared(x: Array, y: Array) -> Array:
        found = function(x, y)
        if kind.is_float and (unordered or name == "ne"):
            neither = np.isnan(x) | np.isnan(y)
            found = found | neither if unordered else found & ~neither
        return found

    return Operation(compared, (kind, kind), PREDICATE)


def _convert(modifiers: list[str], to: Type, source: Type) -> Operation:
    if to.pair:  # the first operand goes into the upper half
        halves = Type(to.kind, to.size)
        return Operation(
            lambda high, low: np.stack([_float(halves, low), _float(halves, high)], 1), (source, source), to
        )
    if to.kind == "tf":  # rounded to ten bits, ties away from zero
        return Operation(lambda x: (x + np.uint32(0x1000)) & np.uint32(0xFFFFE000), (B32,), B32)
    rounding = next((_ROUNDINGS[part] for part in modifiers if part in _ROUNDINGS), None)
    if to.is_float:
        return Operation(lambda x: _float(to, rounding(x) if rounding else x), (source,), to)
    integer = (SIGNED if to.kind == "s" else UNSIGNED)[to.size]
    if source.is_float:
        limits = np.iinfo(integer)
        if rounding is None or to.size == 8:
            raise NotEmulatedError(f"cvt to {to} from {source}")

        def whole(x: Array) -> Array:
            finite = np.nan_to_num(rounding(x.astype(np.float64)), nan=0.0, posinf=limits.max, neginf=limits.min)
            return finite.clip(limits.min, limits.max).astype(integer)

        return Operation(whole, (source,), to)
    return Operation(lambda x: x.astype(integer), (source,), to)


_ROUNDINGS = {"rpi": np.ceil, "rmi": np.floor, "rzi": np.trunc}


def _float(to: Type, numbers: Array) -> Array:
    """Numbers in the type that holds them here: bfloat16 are rounded when they are written."""
    return numbers.astype(np.float32 if to.kind == "bf" else FLOAT[to.size])


def _select(modifiers: list[str], kind: Type) -> Operation:
    bits = as_bits(kind)
    return Operation(lambda x, y, chosen: np.where(chosen, x, y), (bits, bits, PREDICATE), bits)


TABLE: dict[str, Callable[..., Operation]] = {
    "add": _same(np.add, 2),
    "sub": _same(np.subtract, 2),
    "mul": _multiply,
    "mad": _multiply_add,
    "fma": _same(_fused, 3),
    "div": _divide,
    "rem": lambda modifiers, kind: Operation(lambda x, y: _divided(x, y)[1], (kind, kind), kind),
    "neg": _same(np.negative, 1),
    "abs": _same(np.abs, 1),
    "min": _extreme(np.fmin, np.logical_or),
    "max": _extreme(np.fmax, np.logical_and),
    "ex2": _same(np.exp2, 1),
    "sqrt": _same(np.sqrt, 1),
    "and": _logic(np.bitwise_and, 2),
    "or": _logic(np.bitwise_or, 2),
    "xor": _logic(np.bitwise_xor, 2),
    "not": _logic(np.invert, 1),
    "mov": _logic(lambda x: x, 1),
    "popc": lambda modifiers, kind: Operation(lambda x: np.bitwise_count(x).astype(np.uint32), (as_bits(kind),), U32),
    "shl": _shift(left=True),
    "shr": _shift(left=False),
    "shf": _funnel,
    "bfe": _extract,
    "prmt": lambda modifiers, kind: Operation(_permute, (B32, B32, B32), B32),
    "lop3": lambda modifiers, kind: Operation(_lookup, (B32, B32, B32, B32), B32),
    "setp": _compare,
    "selp": _select,
    "cvt": _convert,
}
"""Functions that return an `Operation`, given the modifiers and the types of an opcode."""
MODIFIERS = frozenset(["approx", "ftz", "full", "hi", "l", "lo", "num", "r", "rn", "rna", "wide", "wrap"])
MODIFIERS |= {*_ROUNDINGS, *_COMPARISONS, *(f"{name}u" for name in _COMPARISONS)}
