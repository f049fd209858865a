"""Reading of machine code: loops, pipes, and clocks from the control bits, by hand-made listings."""

from __future__ import annotations

import pytest
import sass

FREE = 7


def line(at: int, text: str, stall: int = 1, sets: int = FREE, frees: int = FREE, waits: int = 0) -> str:
    """One instruction as `cuobjdump` prints it."""
    control = (stall | sets << 5 | frees << 8 | waits << 11) << 41
    return f"        /*{at:04x}*/   {text} ;   /* 0x0000000000000000 */\n      /* 0x{control:016x} */"


def listing(*lines: str) -> list[sass.Instruction]:
    return sass.read("\n".join(["\t.target\tsm_90a", *lines]))


def test_fields_of_an_instruction() -> None:
    (read,) = listing(line(0x10, "@!P0 LDS.64 R2, [R4]", stall=3, sets=2, frees=5, waits=0b100001))
    assert read == sass.Instruction(0x10, "@!P0 LDS.64 R2, [R4]", "LDS.64", 3, 2, 5, 0b100001)
    assert (read.pipe, read.weight) == ("memory", 2)


@pytest.mark.parametrize(
    ("text", "pipe"),
    [
        ("PRMT R1, R2, 0x5140, R3", "alu"),
        ("LOP3.LUT R1, R2, 0x7, RZ, 0xc0, !PT", "alu"),
        ("IMAD.SHL.U32 R1, R2, 0x10, RZ", "imad"),
        ("HFMA2.MMA R1, R2, R3, R4", "fma"),
        ("HMMA.16816.F32 R4, R4, R8, RZ", "tensor"),
        ("MUFU.EX2 R1, R2", "special"),
        ("SHFL.IDX PT, R1, R2, R3, 0x1f", "memory"),
        ("@P1 BRA 0x100", "other"),
        ("UIADD3 UR4, UR4, 0x1, URZ", "other"),
    ],
)
def test_pipe_of_an_opcode(text: str, pipe: str) -> None:
    assert listing(line(0, text))[0].pipe == pipe


def nested() -> list[sass.Instruction]:
    """A loop of three instructions and a branch around two more, with a loop of two inside."""
    return listing(
        line(0x00, "MOV R1, R2"),
        line(0x10, "PRMT R1, R2, R3, R4"),
        line(0x20, "@P0 BRA 0x50"),
        line(0x30, "FADD R1, R2, R3"),
        line(0x40, "FADD R1, R2, R3"),
        line(0x50, "LDS.128 R4, [R2]"),
        line(0x60, "@P1 BRA 0x50"),
        line(0x70, "@P2 BRA 0x10"),
        line(0x80, "EXIT"),
    )


def test_loops_leave_out_what_a_branch_skips() -> None:
    (loop,) = sass.loops(nested())
    assert (loop.instructions, loop.inner) == (3, (2,))


def test_pipes_of_a_path_count_inner_turns() -> None:
    (loop,) = sass.loops(nested())
    counts = sass.pipes(loop.path([3]))
    assert counts == {"alu": 1, "fma": 0, "imad": 0, "tensor": 0, "special": 0, "memory": 12, "other": 5}


def test_clocks_are_stalls_where_nothing_waits() -> None:
    path = listing(line(0, "PRMT R1, R2, R3, R4", stall=2), line(0x10, "FADD R1, R2, R3", stall=5))
    assert sass.clocks(path, 700) == 7


def test_clocks_include_the_wait_for_memory() -> None:
    path = listing(line(0, "LDG.E R1, [R2.64]", sets=0), line(0x10, "FADD R1, R1, R1", stall=4, waits=1))
    assert sass.clocks(path, 700) == 704
    assert sass.clocks(path, 0) == 5


def test_copies_a_turn_ahead_hide_the_wait() -> None:
    """A group that is waited for a turn later has that turn to arrive."""
    path = listing(
        line(0x00, "DEPBAR.LE SB0, 0x0", stall=1),
        line(0x10, "LDGSTS.E [R1], [R2.64]", stall=1),
        line(0x20, "LDGDEPBAR", stall=1),
        *(line(0x30 + 16 * i, "FADD R1, R1, R1", stall=15) for i in range(40)),
    )
    assert sass.clocks(path, 300) == 603
    assert sass.clocks(path, 700) == 701
