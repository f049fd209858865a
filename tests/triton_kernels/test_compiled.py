"""Kernels as compiled for a GPU, run by the emulator: a case for each kernel and family of codecs.

All cases run by `KVCACHE_COMPRESS_TEST_DEVICE=ptx:sm_90 pytest tests/triton_kernels`, in the workflow's job `ptx`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.kernels.device import INTERPRETED
from support.paths import ROOT

ATTENTION = "attention/test_attention.py::test_kernel_equals_plain_attention"
FLUSH = "encode/test_flush.py::test_equals_operators"
PLAN = "common/test_plan.py::test_"
FAST_PATH = ("1-bit", "3-bit", "4-2", "uniform", "trellis", "kivi-2-4", "prod-3-2", "tree", "rope-4-4")
"""Codecs that share no assembly: one of each is run."""
CASES = {
    "sm_90": [
        f"{PLAN}steps_of_one_kind_repeat_the_first",
        f"{PLAN}decoding_repeats_all_launches[turboquant-4bit-growing]",
        f"{PLAN}decoding_repeats_all_launches[turboquant-4bit-static]",
        f"{PLAN}decoding_repeats_all_launches[turned-static]",
        *(f"{ATTENTION}[{name}-128-float16]" for name in FAST_PATH),
        *(f"{ATTENTION}[{name}-bfloat16]" for name in ("polar-paper", "polarquant-rope", "qjl", "spectral-2.5")),
        f"{ATTENTION}[commvq-bfloat16]",
        "attention/test_generation.py::test_generation_equals_the_torch_backend[static]",
        *(f"{FLUSH}[0-{name}]" for name in ("4", "trellis", "groups", "tree", "anchors")),
        "encode/test_spectral.py::test_sizes[128-2-128]",
        "encode/test_encode.py::test_turboquant_codes[24-3-unbiased-uniform]",
        "update/test_step.py::test_faults_are_noted",
        "test_emulator.py::test_faults_are_noticed[wait for fewer copies]",
        "test_emulator.py::test_faults_are_noticed[no wait for tensor cores]",
        "test_emulator.py::test_a_barrier_less_is_noticed[float32-attend-3]",
    ],
    "sm_90, oldest Triton": [
        f"{PLAN}steps_with_masks_repeat_those_of_the_same_kind",
        f"{PLAN}numbers_of_64_bits_take_another_kernel",
        f"{PLAN}decoding_repeats_all_launches[turned-growing]",
        *(f"{ATTENTION}[{name}-float16]" for name in ("trellis-128", "trellis-64", "uniform-64", "spectral-3-bit-64")),
    ],
    "sm_80, oldest Triton": [f"{PLAN}decoding_repeats_all_launches[turned-growing]"],
    "sm_80": [f"{ATTENTION}[4-2-128-float16]", f"{FLUSH}[0-4]"],
}


@pytest.mark.skipif(not INTERPRETED, reason="starts the emulator")
@pytest.mark.parametrize("name", CASES)
def test_in_the_emulator(name: str, request: pytest.FixtureRequest) -> None:
    """In a process of its own, since here Triton interprets kernels."""
    target, _, oldest = name.partition(", ")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment.pop("TRITON_INTERPRET", None)
    environment["KVCACHE_COMPRESS_TEST_DEVICE"] = f"ptx:{target}"
    if oldest:
        environment["PYTHONPATH"] = request.getfixturevalue("oldest_triton")
    cases = [str(Path(__file__).parent / case) for case in CASES[name]]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=5", *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
