"""Turn a program into functions: one per instruction, which read and write the registers of all threads."""

import functools
import re
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import numpy as np

from . import warp
from .machine import DONE, Machine, Mask, Step
from .memory import LOCAL
from .program import BARRIER, BRANCHES, Instruction, NotEmulatedError, Program, vector
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
        number = self.program.registers[instruction.guard or ""][0]
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
        starts = [UNSIGNED[kind.bytes](8 * size * i) for i in range(len(vector(target)))]
        return _of_threads(
            instruction, lambda machine, threads, x, number: [(x >> start).astype(UNSIGNED[size]) for start in starts],
            [self.read(source, kind)], writers=self.writers(target, Type("b", size)),
        )  # fmt: skip

    def _cvta(self, instruction: Instruction) -> Step:
        if "local" not in instruction.op:
            raise NotEmulatedError(str(instruction))
        write, read = self.write(instruction.operands[0], B64), self.read(instruction.operands[1], B64)
        return lambda machine, mask: write(machine, mask, read(machine) | np.uint64(LOCAL))

    def _ld(self, instruction: Instruction) -> Step:
        kind = type_of(instruction.op.rpartition(".")[2])
        target, address = instruction.operands[0], self.address(instruction.operands[1])
        if ".param" not in instruction.op:
            writers = self.writers(target, Type("u", kind.size))
            function = f"{_space(instruction.op)}.load"
            return _of_threads(instruction, function, [address], kind.size, len(writers), writers=writers)
        write = self.write(target, kind)

        def step(machine: Machine, mask: Mask) -> None:
            at = address(machine).astype(np.int64)[:, None] + np.arange(kind.size)
            write(machine, mask, kind.numbers(machine.parameters[at].view(UNSIGNED[kind.size]).reshape(-1)))

        return step

    def _st(self, instruction: Instruction) -> Step:
        kind = Type("b", type_of(instruction.op.rpartition(".")[2]).size)
        target, source = instruction.operands
        operands = [self.address(target), self.readers(source, kind)]
        return _of_threads(instruction, f"{_space(instruction.op)}.store", operands, kind.size)

    def _cp(self, instruction: Instruction) -> Step:
        """`cp.async`, and waiting for it."""
        if "commit_group" in instruction.op:
            return _of_threads(instruction, "shared.commit", [])
        if "wait_group" in instruction.op:
            return _of_threads(instruction, "shared.wait", [], int(instruction.operands[0], 0))
        if not instruction.op.startswith(("cp.async.ca.", "cp.async.cg.")):
            raise NotEmulatedError(str(instruction))
        to, source, size, *given = instruction.operands
        operands = [self.address(to), self.address(source), self.read(given[0] if given else size, B32)]
        return _of_threads(instruction, "shared.copy", operands, int(size, 0))

    def _shfl(self, instruction: Instruction) -> Step:
        mode = instruction.op.split(".")[2]
        target, *sources = instruction.operands
        if "|" in target or mode not in ("bfly", "idx"):
            raise NotEmulatedError(str(instruction))

        return _of_threads(
            instruction,
            lambda machine, threads, *given, number: [warp.shuffle(mode, *given, len(threads))],
            [self.read(source, B32) for source in sources[:3]], writers=[self.write(target, B32)],
        )  # fmt: skip

    def _redux(self, instruction: Instruction) -> Step:
        _, _, op, kind = instruction.op.split(".")
        target, source, _ = instruction.operands

        return _of_threads(
            instruction, lambda machine, threads, x, number: [warp.reduce(op, kind, x)], [self.read(source, B32)],
            writers=[self.write(target, B32)],
        )  # fmt: skip

    def _ldmatrix(self, instruction: Instruction) -> Step:
        target, source = instruction.operands
        writers, turned = self.writers(target, B32), ".trans" in instruction.op
        return _of_threads(
            instruction, warp.load_tiles, [self.address(source)], len(writers), turned, writers=writers
        )  # fmt: skip

    def _stmatrix(self, instruction: Instruction) -> Step:
        target, source = instruction.operands
        operands = [self.address(target), self.readers(source, B32)]
        return _of_threads(instruction, warp.store_tiles, operands, ".trans" in instruction.op)

    def _mma(self, instruction: Instruction) -> Step:
        target, *sources = instruction.operands

        return _of_threads(
            instruction, lambda machine, threads, *tiles, number: warp.multiply(instruction.op, *tiles),
            [self.readers(source, B32) for source in sources], writers=self.writers(target, B32),
        )  # fmt: skip

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
            machine.whole_warps(mask, instruction)
            before, left = (_given(machine, each, slice(None)) for each in (befores, lefts))
            after = machine.warpgroups.multiply(
                instruction.op, before, left if in_registers else left[0], descriptor(machine),
                keeps(machine), numbers, registers, mask, instruction.number,
            )  # fmt: skip
            for write, words in zip(writers, after, strict=True):
                write(machine, mask, words)

        return step

    def _bar(self, instruction: Instruction) -> Step:
        if instruction.op == "bar.warp.sync":
            return lambda machine, mask: machine.warp_barrier(mask, instruction)
        if instruction.op != BARRIER or instruction.operands != ("0",):
            raise NotEmulatedError(str(instruction))
        return lambda machine, mask: machine.barrier(mask, instruction.number)

    def _fence(self, instruction: Instruction) -> Step:
        if not instruction.op.startswith("fence.proxy.async"):
            raise NotEmulatedError(str(instruction))
        return _of_threads(instruction, "shared.fence", [])


def _of_threads(
    instruction: Instruction, function: str | Callable[..., Any], readers: list[Any], *constants: Any,
    writers: Iterable[Writer] = (),
) -> Step:  # fmt: skip
    """A step that calls a function with the threads that run, their operands, and constants.

    function: the name of a machine part's method, or a function of the machine. It returns what is written.
    readers: of each operand, or a list of them for an operand of several registers.
    """
    whole_warps = ".sync" in instruction.op

    def step(machine: Machine, mask: Mask) -> None:
        if whole_warps:
            machine.whole_warps(mask, instruction)
        threads = machine.active(mask)
        if len(threads):
            call = attrgetter(function)(machine) if isinstance(function, str) else functools.partial(function, machine)
            given = [_given(machine, read, threads) for read in readers]
            found = call(threads, *given, *constants, number=instruction.number)
            for write, words in zip(writers, found or (), strict=True):
                write(machine, mask, machine.spread(words, threads))

    return step


def _given(machine: Machine, read: Any, threads: Array | slice) -> Any:
    if isinstance(read, list):
        return [_given(machine, one, threads) for one in read]
    return np.broadcast_to(read(machine), machine.threads)[threads]


def _guarded(step: Step, guard: Reader) -> Step:
    def guarded(machine: Machine, mask: Mask) -> None:
        allowed = guard(machine)
        step(machine, allowed if mask is None else mask & allowed)

    return guarded


def _joined(words: list[Array], size: int) -> Array:
    """Registers side by side in a wider one, the first lowest."""
    wide = UNSIGNED[size * len(words)]
    return functools.reduce(np.bitwise_or, (word.astype(wide) << wide(8 * size * i) for i, word in enumerate(words)))


def _space(op: str) -> str:
    """The memory that an instruction uses; a generic address says itself which."""
    parts = op.split(".")
    spaces = {"memory": "global", "shared": "shared", "local": "local"}
    return next((name for name, space in spaces.items() if any(x.startswith(space) for x in parts)), "generic")
