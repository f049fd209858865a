"""What the emulator counts, against cases worked out by hand."""

import numpy as np
import pytest
from support.ptx.counts import Meter, class_of
from support.ptx.machine import Machine
from support.ptx.program import Program, parse
from support.ptx.translate import translate

WARP = np.arange(32)
PROGRAM = Program("kernel", 32, [])


@pytest.mark.parametrize(
    ("size", "places", "touched", "needed"),
    [
        (4, 4 * WARP, 4, 4),
        (4, 16 + 4 * WARP, 5, 4),  # half a sector off
        (4, 16 * WARP, 16, 4),
        (4, 0 * WARP, 1, 1),  # all threads read the same
        (16, 16 * WARP, 16, 16),
        (2, 2 * WARP[:8], 1, 1),  # eight threads run
    ],
)
def test_sectors_of_a_request(size: int, places: np.ndarray, touched: int, needed: int) -> None:
    meter = Meter(PROGRAM)
    meter.sectors(0, (1 << 40) + places.astype(np.uint64), size, WARP[: len(places)])
    assert (meter.requests[0], meter.touched[0], meter.needed[0]) == (1, touched, needed)


def test_warps_ask_apart() -> None:
    meter = Meter(PROGRAM)
    meter.sectors(0, np.zeros(64, np.uint64), 4, np.arange(64))
    assert (meter.requests[0], meter.touched[0], meter.needed[0]) == (2, 2, 2)


@pytest.mark.parametrize(
    ("size", "places", "turns", "least"),
    [
        (4, 4 * WARP, 1, 1),
        (4, 128 * WARP, 32, 1),
        (4, 132 * WARP, 1, 1),  # rows padded by a bank
        (4, 0 * WARP, 1, 1),  # the same word for all
        (2, 128 * (WARP // 2) + 2 * (WARP % 2), 16, 1),
        (16, 16 * WARP, 4, 4),
        (16, 128 * WARP, 32, 4),
    ],
)
def test_turns_of_shared_memory(size: int, places: np.ndarray, turns: int, least: int) -> None:
    meter = Meter(PROGRAM)
    meter.wavefronts(0, places.astype(np.uint32), size, WARP)
    assert (meter.turns[0], meter.least[0]) == (turns, least)


TRANSPOSED = """
.visible .entry kernel()
.reqntid 32
{
.reg .b32 %r<10>;
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, STEP;
st.shared.v4.b32 [%r2], {%r1, %r1, %r1, %r1};
bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];
ret;
}
"""


@pytest.mark.parametrize(("step", "turns"), [(4, 4), (7, 32)])
def test_rows_of_tiles_meet_in_banks(step: int, turns: int) -> None:
    """Rows of 16 bytes one after another fill all banks; 128 bytes apart they lie in the same four."""
    program = parse(TRANSPOSED.replace("STEP", str(step)))
    machine = Machine(program, (1, 1, 1), 32 << step, [], Meter(program))
    machine.run(translate(program))
    assert machine.meter is not None
    store, load = (i.number for i in program.instructions if class_of(i.op) == "shared")
    assert not machine.findings
    assert machine.meter.turns == {store: turns, load: turns}
    assert machine.meter.least == {store: 4, load: 4}
    assert machine.executed.tolist() == [1] * 6
