"""The check of static capacity detects wrong steps and reports their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_kit import check, check_static
from gpu_kit.check_static import STATIC, check_steps, graph_check

from kvcache_compress.bench.layers import Shape
from kvcache_compress.storage.step_buffers import StepBuffers
from kvcache_compress.triton_kernels.update import write_slots as slots

CPU = torch.device("cpu")
TINY = Shape(2, 1, 32)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Seed the random numbers: the 16-bit error of so few numbers comes close to the bound."""
    torch.manual_seed(0)


@pytest.mark.parametrize("preset", STATIC)
def test_steps_are_right(preset: str) -> None:
    error, problem = check_steps(preset, TINY, CPU, BF16)
    assert problem is None
    assert 0 < error < 2.8e-3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("codes", "static cache, step 5: 4.0e-01 of the stored words differ"),
        ("tail", "static cache, step 3: attention differs by"),
        ("counts", "static cache, step 5: attention differs by"),
        ("nothing", "None"),
    ],
)
def test_wrong_kernels_fail_the_check_of_the_preset(monkeypatch: pytest.MonkeyPatch, wrong: str, message: str) -> None:
    """Wrong results of the kernel that encodes and writes are detected: codes of step 5, a token of step 3, counts."""
    kernels, calls = slots, []
    write = kernels.write_slots

    def write_wrongly(
        fresh: Any, sinks: Any, tails: Any, encoders: Any, fields: Any, counts: Any, total: Any, **rest: Any
    ) -> None:
        packed = int(counts[1, 0])
        write(fresh, sinks, tails, encoders, fields, counts, total, **rest)
        calls.append(packed)
        if wrong == "codes" and int(counts[1, 0]) > packed:
            fields[1][0][:, :, packed:] ^= 0x5555
        if wrong == "tail" and len(calls) == 3:
            tails[1][:, :, :-1] += 0.1
        if wrong == "counts":
            counts[1] = packed

    monkeypatch.setattr(kernels, "write_slots", write_wrongly)
    found = check.check_kernels("turboquant-4bit", "tiny", TINY, 64, CPU)
    assert str(found.error).startswith(message)
    assert calls


def test_wrong_storing_of_groups_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of a method without a kernel encoder that are stored one place too early are detected."""
    leaving = StepBuffers._leaving

    def one_too_early(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, groups = leaving(*args)
        return x, groups - 1

    assert STATIC[-1] == "commvq-1bit"
    monkeypatch.setattr(StepBuffers, "_leaving", one_too_early)
    _, problem = check_steps("commvq-1bit", TINY, CPU, BF16)
    assert str(problem).startswith("static cache, step 5:")
    assert "of the stored words differ" in str(problem)


def test_steps_that_pack_nothing_are_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_static, "BEYOND_WINDOWS", 4)
    _, problem = check_steps("turboquant-4bit", TINY, CPU, BF16)
    assert problem == "static cache: 0 tokens are packed, by operators 0, before 0"


def test_steps_are_those_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, plain calls stand in for the graph; a graph that repeats an earlier result is detected."""
    assert graph_check("turboquant-4bit", "tiny", TINY, CPU).error is None

    def stale(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        out = step()
        return lambda: out

    monkeypatch.setattr(check_static, "record", stale)
    _, problem = check_steps("turboquant-4bit", TINY, CPU, BF16, recorded=True)
    assert str(problem).startswith("static cache, step 6 (recorded): attention differs by")


@pytest.mark.skipif(not torch.cuda.is_available() or check_static.interpreting(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("preset", check_static.GRAPHS)
def test_steps_from_a_cuda_graph(preset: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert graph_check(preset, "small", Shape(8, 2, 128), device).error is None
