"""Read NVIDIA's machine code: its loops, the pipe of each instruction, and how long a warp takes alone.

`cuobjdump` prints each instruction with its 128 bits. The upper ones hold what the compiler tells the hardware: clocks
until the warp's next instruction (for latencies that are fixed), and six barriers for latencies that are not, set by
one instruction and waited for by another (Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via
Microbenchmarking", section 2.1; unchanged since). So the time of a warp that has its processor to itself can be read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PIPES = {
    "alu": (
        "BMSK F2FP FMNMX FSEL FSETP HMNMX2 HSETP2 I2FP IABS IADD3 ICMP IMNMX ISETP LEA LOP LOP3 MOV P2R PLOP3 PRMT R2P "
        "SEL SGXT SHF SHL SHR VABSDIFF VIADD VIADDMNMX VIMNMX"
    ),
    "fma": "FADD FFMA FMUL HADD2 HFMA2 HMUL2",
    "imad": "IMAD IDP",
    "tensor": "BMMA DMMA HMMA IMMA QMMA",
    "special": "BREV F2F F2I FLO FRND I2F MUFU POPC",
    "memory": "ATOM ATOMG ATOMS LD LDG LDGSTS LDL LDS LDSM MATCH MOVM RED REDUX SHFL ST STG STL STS",
}
"""Pipes by what they execute, by the opcode's first part; all else is `other` (branches, barriers, uniform registers).

After the table of arithmetic throughput in NVIDIA's CUDA C++ Programming Guide: of 32-bit integer, logic, compare,
minimum, shift, byte-permute and select instructions a processor of compute capability 9.0 starts 64 lanes per clock, of
floating-point ones 128, of special functions 16, of shuffles 32. Integer products take half of the floating-point pipe.
"""
PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes.split()}
VARIABLE = {"LDS": 29, "LDSM": 33, "SHFL": 23, "MUFU": 18, "REDUX": 23, "LDC": 29}
"""Clocks until the result of an instruction with a barrier is there, about; 20 for all others but reads of memory.

Shared memory as measured on Hopper by Luo et al. (2024), "Benchmarking and Dissecting the Nvidia Hopper GPU
Architecture via Microbenchmarking"; the rest are assumptions of the same order.
"""
_NO_BARRIER = 7


class Instruction(NamedTuple):
    """Address, text, opcode, clocks until the next one, the barriers that it sets by result and by reads, and waits."""

    at: int
    text: str
    opcode: str
    stall: int
    sets: int
    frees: int
    waits: int

    @property
    def pipe(self) -> str:
        return PIPE_OF.get(self.opcode.partition(".")[0], "other")

    @property
    def weight(self) -> int:
        """1, or the number of 4-byte words per lane of a wide access to shared memory, which takes as many turns."""
        width = re.match(r"(?:LDS|STS)\.(?:U\.)?(64|128)", self.opcode)
        return int(width[1]) // 32 if width else 1


@dataclass(frozen=True)
class Loop:
    """Code that a warp executes per iteration of a loop.

    The longest run that a conditional branch can skip is left out, in the loop and in each one inside it: in the
    attention kernel, the rescaling of the sums when a larger logit arrives, which few tiles of a sequence trigger.

    Attributes:
        parts: straight code and the loops inside it, in turns; straight code first and last.
    """

    parts: tuple[tuple[Instruction, ...], ...]

    @property
    def instructions(self) -> int:
        """Instructions of one iteration, without those of the loops inside."""
        return sum(map(len, self.parts[::2]))

    @property
    def inner(self) -> tuple[int, ...]:
        """Instructions of one iteration of each loop inside."""
        return tuple(map(len, self.parts[1::2]))

    def path(self, turns: Sequence[int] = ()) -> list[Instruction]:
        """Instructions of one iteration in which each loop inside makes so many `turns`."""
        counts = [count for turn in (*turns, 0) for count in (1, turn)][: len(self.parts)]
        return [line for part, count in zip(self.parts, counts, strict=True) for _ in range(count) for line in part]


def pipes(path: Iterable[Instruction]) -> dict[str, int]:
    """Instructions of a path by pipe; wide accesses to shared memory count as often as they take turns."""
    counts: Counter[str] = Counter()
    for line in path:
        counts[line.pipe] += line.weight
    return {pipe: counts[pipe] for pipe in (*PIPES, "other")}


def clocks(path: Sequence[Instruction], latency: int, turns: int = 4) -> int:
    """Clocks of one iteration of a loop in a warp that shares its processor with no other.

    latency: clocks until a read of memory is there. The iteration before is under way: what it read ahead has come.
    """
    now, ends = 0, [0]
    barriers = [0] * 8
    copies: list[int] = []
    groups: list[int] = []
    for _ in range(turns):
        for line in path:
            for barrier in range(6):
                if line.waits >> barrier & 1:
                    now = max(now, barriers[barrier])
            opcode = line.opcode.partition(".")[0]
            if opcode == "DEPBAR" and (left := re.search(r"SB0, 0x([0-9a-f]+)", line.text)):
                done = groups[: len(groups) - int(left[1], 16)]
                now = max([now, *done])
            elif opcode == "LDGSTS":
                copies.append(now + latency)
            elif opcode == "LDGDEPBAR":
                groups.append(max([now, *copies]))
                copies = []
            if line.sets != _NO_BARRIER:
                delay = latency if opcode in ("LDG", "LD", "LDL") else VARIABLE.get(opcode, 20)
                barriers[line.sets] = max(barriers[line.sets], now + delay)
            if line.frees != _NO_BARRIER:
                barriers[line.frees] = max(barriers[line.frees], now + 12)
            now += max(line.stall, 1)
        ends.append(now)
    return ends[-1] - ends[-2]


def read(sass: str) -> list[Instruction]:
    """Instructions of a listing by `cuobjdump --dump-sass`."""
    code = []
    lines = sass.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        match = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line)
        bits = re.search(r"/\* 0x([0-9a-f]{16}) \*/", following)
        if match and bits:
            control = int(bits[1], 16) >> 41
            opcode = re.sub(r"^@!?U?P\w+\s+", "", match[2]).split()[0]
            fields = control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
            code.append(Instruction(int(match[1], 16), match[2], opcode, *fields))
    return code


def loops(code: list[Instruction]) -> tuple[Loop, ...]:
    """Outermost loops of a kernel."""
    targets = {line.at: int(jump[1], 16) for line in code if (jump := re.search(r"BRA.*?0x([0-9a-f]+)", line.text))}
    backward = {(to, at) for at, to in targets.items() if to < at}
    found = []
    for outer in sorted(backward):
        if any(_within(outer, other) for other in backward):
            continue
        inside = sorted(loop for loop in backward if _within(loop, outer))
        innermost = [loop for loop in inside if not any(_within(other, loop) for other in inside)]
        skipped = [
            _longest(
                [
                    (line.at, targets[line.at])
                    for line in code
                    if line.text.startswith("@")
                    and start <= line.at < targets.get(line.at, 0) <= stop
                    and not any(
                        _within(loop, (line.at, targets[line.at])) or start < loop[0] <= line.at <= loop[1]
                        for loop in inside
                    )
                ]
            )
            for start, stop in (outer, *innermost)
        ]
        parts: list[list[Instruction]] = [[]]
        for (start, stop), (low, high) in zip(innermost, skipped[1:], strict=True):
            parts += [[line for line in code if start <= line.at <= stop and not low < line.at < high], []]
        low, high = skipped[0]
        for line in code:
            ahead = sum(stop < line.at for _, stop in innermost)
            within = any(start <= line.at <= stop for start, stop in innermost)
            if outer[0] <= line.at <= outer[1] and not low < line.at < high and not within:
                parts[2 * ahead].append(line)
        found.append(Loop(tuple(map(tuple, parts))))
    return tuple(found)


def _longest(jumps: list[tuple[int, int]]) -> tuple[int, int]:
    return max(jumps, key=lambda jump: jump[1] - jump[0], default=(0, 0))


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]
