"""The emulator notices faults: each is planted in the PTX of a kernel that is right, and must be found."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernels.attention_cases import F16, F32, NONE, PAIRS, Case, segments, tq
from support.kernels.device import EMULATED

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.triton_kernels.attention import launch

Edit = Callable[[str], str]
SHAPE = {"head_dim": 128, "groups": 4, "packed": 200}
CASES = {
    "4-bit": Case(tq(4), tq(4), dtype=F16, **SHAPE),
    "float32": Case(tq(4), tq(4), dtype=F32, **SHAPE),
    "warpgroup": Case(PAIRS["spectral-4"][0], NONE, dtype=F16, groups=4, packed=192),
}


def all_of(pattern: str, replacement: str = "") -> Edit:
    return lambda ptx: re.sub(pattern, replacement, ptx)


def one_of(pattern: str, replacement: str = "", number: int = 0) -> Edit:
    """Replace one match, by default the first."""

    def edit(ptx: str) -> str:
        match = list(re.finditer(pattern, ptx))[number]
        return ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]

    return edit


def later(ptx: str) -> str:
    """Wait for one group of copies less."""
    return re.sub(r"cp\.async\.wait_group\s+(\d+);", lambda match: f"cp.async.wait_group {int(match[1]) + 1};", ptx)


UNWAITED, UNWRITTEN = "a copy is read before it was waited for", "uninitialised shared memory is read"
OUTSIDE = "outside its tensor"
BARRIER = r"bar\.sync[^;]*;"
LOAD, STORE = r"(ld\.global\S* [^;]*\[ %rd\d+ \+ )0( \];)", r"(st\.global\S* \[ %rd\d+ \+ )0( \])"
FAULTS: dict[str, tuple[str, str, Edit, str]] = {
    "no wait for copies": ("4-bit", "attend", all_of(r"cp\.async\.wait_group[^;]*;"), UNWAITED),
    "wait for fewer copies": ("4-bit", "attend", later, UNWAITED),
    "no groups of copies": ("4-bit", "attend", all_of(r"cp\.async\.commit_group[^;]*;"), UNWAITED),
    "a copy less": ("4-bit", "attend", one_of(r"cp\.async\.c[ag]\.[^;]*;", "mov.b32 %r1, %r1;"), UNWRITTEN),
    "a shared store less": ("4-bit", "map_query", one_of(r"(@%p\d+ )?st\.shared[^;]*;"), UNWRITTEN),
    "no barriers of warps": ("4-bit", "attend", all_of(r"bar\.warp\.sync[^;]*;"), "by another thread of the warp"),
    "no barriers": ("float32", "attend", all_of(BARRIER), "by another warp"),
    "no barrier before tensor cores read": ("warpgroup", "attend", all_of(BARRIER), "by another warp"),
    "a load far away": ("4-bit", "attend", one_of(LOAD, r"\g<1>65536\2"), OUTSIDE),
    "a store far away": ("4-bit", "merge", one_of(STORE, r"\g<1>65536\2"), OUTSIDE),
    "a misaligned store": ("4-bit", "merge", one_of(STORE, r"\g<1>1\2"), "misaligned"),
    "a capacity too large": (
        "4-bit", "attend",
        all_of(r"ld\.param\.b32 \t(%r\d+), \[attend_kernel_param_25\];", r"mov.b32 \1, 300;"), OUTSIDE,
    ),
    "programs write the same rows": (
        "4-bit", "merge", all_of(r"mov\.u32 \t(%r\d+), %ctaid\.x;", r"mov.u32 \1, 0;"), "several programs at once",
    ),
    "a sum over the wrong lanes": (
        "4-bit", "merge", one_of(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+, )\d+", r"\g<1>3"), "replicas differ",
    ),
    "no wait for tensor cores": (
        "warpgroup", "attend", all_of(r"wgmma\.wait_group[^;]*;"), "used before it was waited for",
    ),
    "registers without a fence": ("warpgroup", "attend", all_of(r"wgmma\.fence[^;]*;"), "registers that no fence"),
    "memory without a fence": ("warpgroup", "attend", all_of(r"fence\.proxy\.async[^;]*;"), "what no fence shows them"),
}  # fmt: skip
pytestmark = pytest.mark.skipif(EMULATED != "sm_90", reason="the kernels that are edited are compiled for sm_90")
ALONE = [("float32", "attend", 14), ("4-bit", "map_query", 7), ("4-bit", "merge", 14)]
"""Kernels, and how many of their first barriers are removed, one at a time."""


@pytest.fixture
def attend(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`attend(case, kernel, edit)`: what is noticed when a kernel of a case is edited."""
    monkeypatch.setattr(launch, "split_sizes", lambda packed, tile, *_: (tile.tokens, -(-packed // tile.tokens)))

    def run(name: str, kernel: str, edit: Edit) -> list[str]:
        case = CASES[name]
        torch.manual_seed(3)
        keys, values = segments(case)
        heads = case.groups * keys.sinks.shape[1]
        query = torch.randn(2, heads, 1, case.head_dim).to(case.dtype)
        edited: list[bool] = []

        def change(of: str, ptx: str) -> str:
            if of != f"{kernel}_kernel":
                return ptx
            changed = edit(ptx)
            edited.append(changed != ptx)
            return changed

        monkeypatch.setattr(emulator, "edit", change)
        if name == "warpgroup":
            monkeypatch.setattr(launch, "tile_shape", lambda *_: launch.Tile(32, 4, 2))
        noticed: list[str] = []
        try:
            launch.attend(AttentionCall.of(query, scaling=case.head_dim**-0.5), keys, values)
        except Exception as fault:
            noticed.append(str(fault))
        noticed += [line for launched in emulator.launches for line in launched.report()]
        emulator.launches.clear()
        assert edited
        assert all(edited)
        return noticed

    return run


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, attend: Any) -> None:
    case, kernel, edit, expected = FAULTS[name]
    noticed = attend(case, kernel, edit)
    assert any(expected in line for line in noticed), noticed


@pytest.mark.parametrize(("case", "kernel", "number"), [(*kernel, i) for *kernel, count in ALONE for i in range(count)])
def test_a_barrier_less_is_noticed(case: str, kernel: str, number: int, attend: Any) -> None:
    noticed = attend(case, kernel, one_of(BARRIER, number=number))
    assert any("race" in line or UNWRITTEN in line for line in noticed), noticed
