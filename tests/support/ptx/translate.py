"""Turn a program into functions: one per instruction, which read and write the registers of all threads."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import numpy as np

from . import warp
from .machine import DONE, Machine, Mask, Step
from .memory import LOCAL, SLOT_BITS
from .program import BARRIERS, BRANCHES, Instruction, NotEmulatedError, Program
from .scalar import B32, B64, PREDICATE, UNSIGNED, Array, Type, as_bits, operation, type_of

Reader = Callable[[Machine], Array]
Writer = Callable[[Machine, Mask, Array], None]
Block = tuple[list[Step], Callable[[Machine], Any]]
SPECIAL = re.compile(r"%(n?tid|n?ctaid)\.[xyz]|%laneid")


def translate(program: Program) -> list[Block]:
    """Steps of each block, and the function that says where each thread goes next.

    Raises:
        NotEmulatedError: an instruction is not known.
    """
    translator = Translator(program)
    blocks = []
    for place, block in enumerate(program.blocks):
        following = place + 1 if place + 1 < len(program.blocks) else DONE
        last = block[-1] if block and block[-1].op in BRANCHES else None
        steps = [translator.step(instruction) for instruction in (block[:-1] if last else block)]
        blocks.append((steps, translator.end(last, following)))
    return blocks


class Translator:
    """Translate the instructions of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parameters = program.offsets
        self.has_warpgroups = any(instruction.op.startswith("wgmma") for instruction in program.instructions)

    def end(self, branch: Instruction | None, following: int) -> Callable[[Machine], Any]:
        if branch is None:
            return lambda machine: following
        target = DONE if branch.op == "ret" else self.program.labels[branch.operands[0]]
        if branch.guard is None:
            return lambda machine: target
        guard = self._guard(branch)
        return lambda machine: np.where(guard(machine), target, following)

    def _guard(self, instruction: Instruction) -> Reader:
        assert instruction.guard is not None
        number = self.program.registers[instruction.guard][0]
        if instruction.negated:
            return lambda machine: ~machine.registers[number]
        return lambda machine: machine.registers[number]

    def step(self, instruction: Instruction) -> Step:
        """A function that runs the instruction, for the threads whose guard lets it run."""
        name = instruction.op.partition(".")[0]
        make = getattr(self, f"_{name}", self._scalar)
        try:
            step: Step = make(instruction)
        except (KeyError, ValueError, IndexError) as error:
            raise NotEmulatedError(str(instruction)) from error
        if instruction.guard is not None:
            step = _guarded(step, self._guard(instruction))
        if self.has_warpgroups and name != "wgmma":
            step = self._watched(step, instruction)
        return step

    def _watched(self, step: Step, instruction: Instruction) -> Step:
        """Tell the warpgroups which registers an instruction uses."""
        stores = instruction.op.startswith(("st.", "stmatrix", "cp.", "bar", "fence"))
        first, rest = instruction.operands[:1], instruction.operands[1:]
        reads, writes = self._numbers((*first, *rest) if stores else rest), self._numbers(() if stores else first)

        def watched(machine: Machine, mask: Mask) -> None:
            machine.warpgroups.touch(reads, writes, mask, instruction.number)
            step(machine, mask)

        return watched

    def _numbers(self, operands: tuple[str, ...]) -> frozenset[int]:
        names = re.findall(r"[%$\w]+", " ".join(operands))
        return frozenset(self.program.registers[name][0] for name in names if name in self.program.registers)

    def read(self, operand: str, kind: Type) -> Reader:
        """Function that returns an operand's numbers: `[threads]`, or `[1]` of a constant."""
        if operand in self.program.registers:
            number, size = self.program.registers[operand]
            if size == kind.bytes and kind.kind in ("b", "u", "pred"):
                return lambda machine: machine.registers[number]
            return lambda machine: kind.numbers(machine.registers[number])
        if SPECIAL.fullmatch(operand):
            return lambda machine: kind.numbers(machine.special[operand])
        if operand.startswith("{"):
            parts = vector(operand)
            size = kind.bytes // len(parts)
            readers = [self.read(part, Type("b", size)) for part in parts]
            return lambda machine: kind.numbers(_joined([read(machine) for read in readers], size))
        constant = kind.numbers(self._constant(operand, kind))
        return lambda machine: constant

    def _constant(self, operand: str, kind: Type) -> Array:
        if kind == PREDICATE:
            return np.array([int(operand, 0) != 0])
        unsigned = UNSIGNED[kind.bytes]
        if operand.startswith(("0f", "0d")):
            return np.array([int(operand[2:], 16)], unsigned)
        names = {"global_smem": 0, self.program.local_name: LOCAL} | self.parameters
        number = names[operand] if operand in names else int(operand.rstrip("U"), 0)
        return np.array([number & 2 ** (8 * kind.bytes) - 1], unsigned)

    def write(self, operand: str, kind: Type) -> Writer:
        """Function that writes numbers into a register."""
        if operand == "_":
            return lambda machine, mask, numbers: None
        number, size = self.program.registers[operand]
        if size == kind.bytes and kind.kind in ("b", "u", "pred"):
            return lambda machine, mask, numbers: machine.write(number, numbers, mask)
        return lambda machine, mask, numbers: machine.write(number, kind.words(numbers, size), mask)

    def address(self, operand: str) -> Reader:
        """Address `[base]`, `[base+offset]` or `[constant]`."""
        base, _, offset = operand[1:-1].partition("+")
        base, shift = base.strip(), int(offset or "0", 0)
        kind = B64 if self.program.registers.get(base, (0, 4))[1] == 8 else B32
        read = self.read(base, kind)
        if not shift:
            return read
        return lambda machine: read(machine) + UNSIGNED[kind.bytes](shift & 2 ** (8 * kind.bytes) - 1)

    def readers(self, operand: str, kind: Type) -> list[Reader]:
        return [self.read(part, kind) for part in vector(operand)]

    def writers(self, operand: str, kind: Type) -> list[Writer]:
        return [self.write(part, kind) for part in vector(operand)]

    def _scalar(self, instruction: Instruction) -> Step:
        what = operation(instruction.op)
        target, *sources = instruction.operands
        function, kinds = what.function, what.sources
        if instruction.op.startswith(("min.", "max.")) and len(sources) == 3:
            function, kinds = (lambda x, y, z: what.function(what.function(x, y), z)), (*kinds, kinds[0])
        write = self.write(target, what.target)
        reads = [self.read(*pair) for pair in zip(sources, kinds, strict=True)]

        def step(machine: Machine, mask: Mask) -> None:
            write(machine, mask, function(*[read(machine) for read in reads]))

        return step

    def _mov(self, instruction: Instruction) -> Step:
        target, source = instruction.operands
        if not target.startswith("{"):
            return self._scalar(instruction)
        kind = as_bits(type_of(instruction.op.rpartition(".")[2]))
        size = kind.bytes // len(vector(target))
        writers, read = self.writers(target, Type("b", size)), self.read(source, kind)

        def step(machine: Machine, mask: Mask) -> None:
            words = np.broadcast_to(read(machine), machine.threads)
            for i, write in enumerate(writers):
                write(machine, mask, (words >> UNSIGNED[kind.bytes](8 * size * i)).astype(UNSIGNED[size]))

        return step

    def _cvta(self, instruction: Instruction) -> Step:
        if "local" not in instruction.op:
            raise NotEmulatedError(str(instruction))
        write, read = self.write(instruction.operands[0], B64), self.read(instruction.operands[1], B64)
        return lambda machine, mask: write(machine, mask, read(machine) | np.uint64(LOCAL))

    def _ld(self, instruction: Instruction) -> Step:
        kind = type_of(instruction.op.rpartition(".")[2])
        target, source = instruction.operands
        if ".param" in instruction.op:
            return self._parameter(target, source, kind)
        writers, address, space = self.writers(target, _loaded(kind)), self.address(source), _space(instruction.op)

        def step(machine: Machine, mask: Mask) -> None:
            threads = machine.active(mask)
            if len(threads):
                at = np.broadcast_to(address(machine), machine.threads)[threads]
                loaded = space(machine, at).load(at, kind.size, len(writers), threads, instruction.number)
                for write, words in zip(writers, loaded, strict=True):
                    write(machine, mask, _loaded(kind).numbers(machine.spread(words, threads)))

        return step

    def _parameter(self, target: str, source: str, kind: Type) -> Step:
        write, address = self.write(target, kind), self.address(source)

        def step(machine: Machine, mask: Mask) -> None:
            at = address(machine).astype(np.int64)[:, None] + np.arange(kind.size)
            write(machine, mask, kind.numbers(machine.parameters[at].view(UNSIGNED[kind.size]).reshape(-1)))

        return step

    def _st(self, instruction: Instruction) -> Step:
        kind = Type("b", type_of(instruction.op.rpartition(".")[2]).size)
        target, source = instruction.operands
        readers, address, space = self.readers(source, kind), self.address(target), _space(instruction.op)

        def step(machine: Machine, mask: Mask) -> None:
            threads = machine.active(mask)
            if len(threads):
                at = np.broadcast_to(address(machine), machine.threads)[threads]
                values = [np.broadcast_to(read(machine), machine.threads)[threads] for read in readers]
                space(machine, at).store(at, kind.size, values, threads, instruction.number)

        return step

    def _cp(self, instruction: Instruction) -> Step:
        """`cp.async`, and waiting for it."""
        if "commit_group" in instruction.op:
            return lambda machine, mask: machine.shared.commit(machine.active(mask))
        if "wait_group" in instruction.op:
            left = int(instruction.operands[0], 0)
            return lambda machine, mask: machine.shared.wait(left, machine.active(mask))
        if not instruction.op.startswith(("cp.async.ca.", "cp.async.cg.")):
            raise NotEmulatedError(str(instruction))
        to, source, size, *given = instruction.operands
        to_address, source_address, bytes_ = self.address(to), self.address(source), int(size, 0)
        count = self.read(given[0] if given else size, B32)

        def step(machine: Machine, mask: Mask) -> None:
            threads = machine.active(mask)
            if len(threads):
                ends, begins, counts = (
                    np.broadcast_to(read(machine), machine.threads)[threads]
                    for read in (to_address, source_address, count)
                )
                machine.shared.copy(ends, begins, bytes_, counts, threads, instruction.number)

        return step

    def _shfl(self, instruction: Instruction) -> Step:
        mode = instruction.op.split(".")[2]
        target, *sources = instruction.operands
        if "|" in target or mode not in ("bfly", "idx"):
            raise NotEmulatedError(str(instruction))
        write, reads = self.write(target, B32), [self.read(source, B32) for source in sources[:3]]

        def step(machine: Machine, mask: Mask) -> None:
            machine.whole_warps(mask, instruction.number)
            x, lanes, control = (read(machine) for read in reads)
            write(machine, mask, warp.shuffle(mode, x, lanes, control, machine.threads))

        return step

    def _redux(self, instruction: Instruction) -> Step:
        _, _, op, kind = instruction.op.split(".")
        write, read = self.write(instruction.operands[0], B32), self.read(instruction.operands[1], B32)

        def step(machine: Machine, mask: Mask) -> None:
            machine.whole_warps(mask, instruction.number)
            write(machine, mask, warp.reduce(op, kind, np.broadcast_to(read(machine), machine.threads)))

        return step

    def _ldmatrix(self, instruction: Instruction) -> Step:
        target, source = instruction.operands
        writers, address, turned = self.writers(target, B32), self.address(source), ".trans" in instruction.op

        def step(machine: Machine, mask: Mask) -> None:
            machine.whole_warps(mask, instruction.number)
            threads = machine.active(mask)
            tiles = warp.load_tiles(machine, address(machine), len(writers), turned, threads, instruction.number)
            for write, words in zip(writers, tiles, strict=True):
                write(machine, mask, words)

        return step

    def _stmatrix(self, instruction: Instruction) -> Step:
        target, source = instruction.operands
        readers, address, turned = self.readers(source, B32), self.address(target), ".trans" in instruction.op

        def step(machine: Machine, mask: Mask) -> None:
            machine.whole_warps(mask, instruction.number)
            tiles = [np.broadcast_to(read(machine), machine.threads) for read in readers]
            warp.store_tiles(machine, address(machine), tiles, turned, machine.active(mask), instruction.number)

        return step

    def _mma(self, instruction: Instruction) -> Step:
        target, *sources = instruction.operands
        writers, readers = self.writers(target, B32), [self.readers(source, B32) for source in sources]

        def step(machine: Machine, mask: Mask) -> None:
            machine.whole_warps(mask, instruction.number)
            operands = (_all(machine, part) for part in readers)
            for write, words in zip(writers, warp.multiply(instruction.op, *operands), strict=True):
                write(machine, mask, words)

        return step

    def _wgmma(self, instruction: Instruction) -> Step:
        kind = instruction.op.split(".")[1]
        if kind == "fence":
            return lambda machine, mask: machine.warpgroups.fence(mask)
        if kind == "commit_group":
            return lambda machine, mask: machine.warpgroups.commit(mask)
        if kind == "wait_group":
            left = int(instruction.operands[0], 0)
            return lambda machine, mask: machine.warpgroups.wait(left, mask)
        result, left_operand, right, keep, *options = instruction.operands
        in_registers = left_operand.startswith("{")
        writers, befores = self.writers(result, B32), self.readers(result, B32)
        lefts = self.readers(left_operand, B32 if in_registers else B64)
        descriptor, keeps = self.read(right, B64), self.read(keep, PREDICATE)
        registers = self._numbers((result,)), self._numbers((left_operand,) if in_registers else ())
        numbers = [int(option, 0) for option in options]

        def step(machine: Machine, mask: Mask) -> None:
            machine.whole_warps(mask, instruction.number)
            left = _all(machine, lefts)
            after = machine.warpgroups.multiply(
                instruction.op, _all(machine, befores), left if in_registers else left[0], descriptor(machine),
                keeps(machine), numbers, registers, mask, instruction.number,
            )  # fmt: skip
            for write, words in zip(writers, after, strict=True):
                write(machine, mask, words)

        return step

    def _bar(self, instruction: Instruction) -> Step:
        if instruction.op == "bar.warp.sync":
            return lambda machine, mask: machine.warp_barrier(mask, instruction.number)
        if instruction.op not in BARRIERS or instruction.operands != ("0",):
            raise NotEmulatedError(str(instruction))
        return lambda machine, mask: machine.barrier(mask, instruction.number)

    _barrier = _bar

    def _elect(self, instruction: Instruction) -> Step:
        """`elect.sync`: the first lane, of a whole warp."""
        target, members = instruction.operands
        lane, chosen = target.split("|")
        write_lane, write_chosen = self.write(lane, B32), self.write(chosen, PREDICATE)
        if members != "-1":
            raise NotEmulatedError(str(instruction))

        def step(machine: Machine, mask: Mask) -> None:
            machine.whole_warps(mask, instruction.number)
            write_lane(machine, mask, np.zeros(1, np.uint32))
            write_chosen(machine, mask, machine.special["%laneid"] == 0)

        return step

    def _mbarrier(self, instruction: Instruction) -> Step:
        parts, operands = instruction.op.split("."), instruction.operands
        if parts[1:3] == ["try_wait", "parity"]:
            reads = [self.address(operands[1]), self.read(operands[2], B32)]
            return _of_threads(instruction, "mbarriers.test", reads, writers=[self.write(operands[0], PREDICATE)])
        count = {"init": operands[-1], "inval": "0"}[parts[1]]
        return _of_threads(instruction, "mbarriers.set", [self.address(operands[0])], int(count, 0))

    def _tcgen05(self, instruction: Instruction) -> Step:
        name, *parts = instruction.op.split(".")[1:]
        operands = instruction.operands
        if name == "relinquish_alloc_permit":
            return lambda machine, mask: None
        if name in ("wait::ld", "wait::st"):
            return _of_threads(instruction, f"tensor_memory.{name[-2:]}.wait", [])
        if name in ("ld", "st") and parts[-1] == "b32" and len(parts) == 5:
            registers = operands[0 if name == "ld" else -1]
            at, *split = operands[1:] if name == "ld" else operands[:-1]
            given = parts[2], int(split[0], 0) if split else 0
            if name == "ld":
                writers = self.writers(registers, B32)
                return _of_threads(
                    instruction, "tensor_memory.load", [self.address(at)], *given, len(writers), writers=writers
                )
            return _of_threads(
                instruction, "tensor_memory.store", [self.address(at), *self.readers(registers, B32)], *given
            )
        if parts[0] != "cta_group::1":
            raise NotEmulatedError(str(instruction))
        if name == "commit":
            return _of_threads(instruction, "mbarriers.commit", [self.address(operands[0])])
        if name == "mma":
            result, left, right, shape, keep = operands
            return _of_threads(
                instruction, "tensor_memory.multiply",
                [
                    self.address(result), self.address(left) if left.startswith("[") else self.read(left, B64),
                    self.read(right, B64), self.read(shape, B32), self.read(keep, PREDICATE),
                ],
                parts[1].removeprefix("kind::"),
            )  # fmt: skip
        method = {"alloc": "allocate", "dealloc": "free"}[name]
        read = self.address(operands[0]) if name == "alloc" else self.read(operands[0], B32)
        return _of_threads(instruction, f"tensor_memory.{method}", [read], int(operands[1], 0))

    def _fence(self, instruction: Instruction) -> Step:
        if not instruction.op.startswith("fence.proxy.async"):
            raise NotEmulatedError(str(instruction))
        return lambda machine, mask: machine.shared.fence(machine.active(mask))


def _of_threads(
    instruction: Instruction, method: str, readers: list[Reader], *constants: Any, writers: Iterable[Writer] = ()
) -> Step:
    """A step that calls a method of a part of the machine: with the threads that run, their operands, and constants."""
    aligned = ".aligned" in instruction.op

    def step(machine: Machine, mask: Mask) -> None:
        if aligned:
            machine.whole_warps(mask, instruction.number)
        threads = machine.active(mask)
        if len(threads):
            given = [np.broadcast_to(read(machine), machine.threads)[threads] for read in readers]
            found = attrgetter(method)(machine)(threads, *given, *constants, number=instruction.number)
            for write, words in zip(writers, found or (), strict=True):
                write(machine, mask, machine.spread(words, threads))

    return step


def _guarded(step: Step, guard: Reader) -> Step:
    def guarded(machine: Machine, mask: Mask) -> None:
        allowed = guard(machine)
        step(machine, allowed if mask is None else mask & allowed)

    return guarded


def _all(machine: Machine, readers: list[Reader]) -> list[Array]:
    return [np.broadcast_to(read(machine), machine.threads) for read in readers]


def _joined(words: list[Array], size: int) -> Array:
    """Registers side by side in a wider one, the first lowest."""
    wide = UNSIGNED[size * len(words)]
    return functools.reduce(np.bitwise_or, (word.astype(wide) << wide(8 * size * i) for i, word in enumerate(words)))


def _loaded(kind: Type) -> Type:
    """Type as which a loaded number is written: narrow signed ones are extended by their sign."""
    return kind if kind.kind == "s" else Type("u", kind.size)


def _space(op: str) -> Callable[[Machine, Array], Any]:
    """The memory that an instruction uses; a generic address says itself which."""
    parts = op.split(".")
    if any(part.startswith("global") for part in parts):
        return lambda machine, at: machine.memory
    if any(part.startswith("shared") for part in parts):
        return lambda machine, at: machine.shared
    if "local" in parts:
        return lambda machine, at: machine.local
    return lambda machine, at: (
        machine.local if (at >> np.uint64(SLOT_BITS) == LOCAL >> SLOT_BITS).all() else machine.memory
    )


def vector(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]
