"""Read the PTX of one kernel: its parameters, registers and blocks of instructions, each with its line in Triton."""

import re
from dataclasses import dataclass, field

Registers = dict[str, tuple[int, int]]
"""Number and bytes of each register by name; predicates have no bytes."""
REGISTER_BYTES = {"pred": 0, "b16": 2, "b32": 4, "b64": 8, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "f32": 4, "f64": 8}
BARRIER, BRANCHES = "bar.sync", ("bra", "bra.uni", "ret")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_LOCAL = re.compile(r"\.local\s+\.align\s+\d+\s+\.b8\s+(\S+)\[(\d+)\]")
_INSTRUCTION = re.compile(r"(?:@(!?)(\S+)\s+)?([\w.:]+)\s*(.*)", re.S)
_LABEL = re.compile(r"([$\w]+):(?!:)")


class NotEmulatedError(Exception):
    """An instruction, or a form of one, that the emulator does not know."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        number: its place in the program.
        op: opcode with all modifiers, such as `ld.global.v4.b32`.
        operands: as written, with unique names of registers.
        guard, negated: predicate that lets it run, and whether it is inverted.
        line, text, source: line and text in the PTX, and `file:line:column` in Triton.
    """

    number: int
    op: str
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    line: int
    text: str
    source: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.source}: {' '.join(self.text.split())[:120]}"


@dataclass
class Program:
    """A kernel's PTX, read; a block ends with a branch, or before a label or a barrier."""

    name: str
    threads: int
    parameters: list[tuple[str, int]]
    """Names and bytes."""
    registers: Registers = field(default_factory=dict)
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    labels: dict[str, int] = field(default_factory=dict)
    """Block that begins at each label."""
    local_bytes: int = 0
    local_name: str = ""

    @property
    def instructions(self) -> list[Instruction]:
        return [instruction for block in self.blocks for instruction in block]

    def order(self) -> list[int]:
        """Blocks in the order in which they run: but for loops, all that lead to a block come before it."""
        found: list[int] = []
        seen: set[int] = set()
        stack = [(0, False)]
        while stack:
            place, left = stack.pop()
            if left:
                found.append(place)
            elif place not in seen:
                seen.add(place)
                stack.append((place, True))
                stack += [(following, False) for following in sorted(self._following(place))]
        return found[::-1]

    def _following(self, place: int) -> set[int]:
        following = {place + 1} if place + 1 < len(self.blocks) else set()
        last = self.blocks[place][-1] if self.blocks[place] else None
        if last is None or last.op not in BRANCHES:
            return following
        target = set() if last.op == "ret" else {self.labels[last.operands[0]]}
        return target if last.guard is None else target | following

    offsets: dict[str, int] = field(init=False)
    """Byte at which each parameter begins."""
    parameter_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        at, self.offsets = 0, {}
        for name, size in self.parameters:
            self.offsets[name] = at = -(-at // size) * size
            at += size
        self.parameter_bytes = at


def parse(ptx: str) -> Program:
    """Read the only kernel of a PTX text."""
    lines = ptx.splitlines()
    entry = next(i for i, line in enumerate(lines) if ".entry" in line)
    first = next(i for i in range(entry, len(lines)) if lines[i].startswith("{"))
    last = next(i for i in range(len(lines) - 1, entry, -1) if lines[i].startswith("}"))
    head = "\n".join(lines[entry:first])
    reader = _Reader(
        Program(
            re.search(r"\.entry\s+(\w+)", head)[1],
            int(re.search(r"\.reqntid\s+(\d+)", head)[1]),
            [(m[2], int(m[1]) // 8) for m in re.finditer(r"\.param\s+\.[a-z]+(\d+)[^\n]*?(\w+_param_\d+)", head)],
        )
    )
    for number, line in enumerate(lines[first + 1 : last], first + 2):
        reader.read(number, line)
    return reader.program


class _Reader:
    """Read a kernel's body line by line: a statement may take several, and inline assembly opens scopes of names."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scopes: list[dict[str, str]] = [{}]
        self.statement = ""
        self.began = 0
        self.source = ""
        self.count = 0

    def read(self, number: int, line: str) -> None:
        code, _, comment = line.partition("//")
        code = code.strip()
        if code.startswith((".loc\t", ".loc ")):
            self.source = comment.split("@")[0].strip() or self.source
            return
        if code.startswith(".pragma"):
            return
        while code := code.lstrip():
            if self.statement == "":
                self.began = number
                if label := _LABEL.match(code):
                    self._label(label[1])
                    code = code[label.end() :]
                    continue
                if code[0] in "{};":
                    if code[0] == "{":
                        self.scopes.append({})
                    elif code[0] == "}":
                        self.scopes.pop()
                    code = code[1:]
                    continue
            part, semicolon, code = code.partition(";")
            self.statement += f" {part}"
            if semicolon:
                self._end(self.statement.strip())
                self.statement = ""

    def _label(self, name: str) -> None:
        if name.startswith(("$L__tmp", "$L__func")):  # for debuggers
            return
        if self.program.blocks[-1]:
            self.program.blocks.append([])
        unique = name if len(self.scopes) == 1 else f"{name}_{self.count}"
        self.scopes[-1][name] = unique
        self.program.labels[unique] = len(self.program.blocks) - 1

    def _end(self, statement: str) -> None:
        if found := _REGISTERS.match(statement):
            self._declare(found[1], found[2])
        elif found := _LOCAL.match(statement):
            self.program.local_name, self.program.local_bytes = found[1], int(found[2])
        elif found := _INSTRUCTION.match(statement):
            negation, guard, op, operands = found.groups()
            if op == BARRIER and self.program.blocks[-1]:
                self.program.blocks.append([])
            self.program.blocks[-1].append(
                Instruction(
                    self.count, op, tuple(map(self._unique, split(operands))), guard and self._unique(guard),
                    negation == "!", self.began, statement, self.source,
                )
            )  # fmt: skip
            self.count += 1
            if op in BRANCHES:
                self.program.blocks.append([])

    def _declare(self, kind: str, names: str) -> None:
        for given in names.split(","):
            many = re.fullmatch(r"(.*)<(\d+)>", given.strip())
            for name in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [given.strip()]:
                count = len(self.program.registers)
                unique = name if len(self.scopes) == 1 else f"{name}_{count}"
                self.scopes[-1][name] = unique
                self.program.registers[unique] = count, REGISTER_BYTES[kind]

    def _unique(self, operand: str) -> str:
        def inner(match: re.Match[str]) -> str:
            return next((scope[match[0]] for scope in reversed(self.scopes) if match[0] in scope), match[0])

        return re.sub(r"[%$\w]+", inner, operand)


def split(operands: str) -> list[str]:
    """Operands between commas outside of brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", operands) if part.strip()]


def vector(operand: str) -> list[str]:
    """Registers of an operand in braces, or the only one."""
    return [part.strip() for part in operand.strip("{}").split(",")]
