"""What the emulator counts, against a program worked out by hand."""

from support.ptx.counts import class_of
from support.ptx.machine import Machine
from support.ptx.program import parse
from support.ptx.translate import translate

PROGRAM = """
.visible .entry kernel()
.reqntid 64
{
.reg .pred %p<2>;
.reg .b32 %r<4>;
.reg .f32 %f<2>;
mov.u32 %r1, %tid.x;
setp.ge.s32 %p1, %r1, 32;
@%p1 bra $L_end;
mad.lo.s32 %r2, %r1, %r1, 3;
shl.b32 %r3, %r1, 2;
cvt.rn.f32.s32 %f1, %r2;
add.f32 %f1, %f1, %f1;
st.shared.b32 [%r3], %r2;
bar.warp.sync -1;
$L_end:
ret;
}
"""


def test_instructions_of_warps_are_counted_by_class() -> None:
    """The second of two warps leaves out what lies before the label."""
    program = parse(PROGRAM)
    machine = Machine(program, (1, 1, 1), 128, [])
    machine.run(translate(program))
    assert not machine.findings
    assert machine.executed.tolist() == [2, 2, 2, 1, 1, 1, 1, 1, 1, 2]
    classes = [class_of(instruction.op) for instruction in program.instructions]
    assert classes[:5] == ["bits", "integer", "control", "integer", "bits"]
    assert classes[5:] == ["convert", "float", "shared", "control", "control"]
