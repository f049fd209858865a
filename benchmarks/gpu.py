"""What the kernels do on a GPU: first whether they are right, then how fast; one command, planned for eight minutes.

    make bench-gpu                                # correctness, then all measurements, to benchmarks/results/gpu.json
    python benchmarks/gpu.py --small --output F   # every part in small, also without a GPU (TRITON_INTERPRET=1)

Correctness is the kernel tests on the device (`KVCACHE_COMPRESS_TEST_DEVICE=cuda pytest tests/triton_kernels`), which
must pass before anything is timed. Decode attention of FlashAttention and FlashInfer is measured where they are
installed. Presets beyond those named here are not measured unless asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_compress.bench.decode import DecodeTime, measure_decode
from kvcache_compress.bench.encode import EncodeTime, measure_encode
from kvcache_compress.bench.layers import SHAPES, Shape
from kvcache_compress.bench.models import ModelTime, measure_models, random_llama
from kvcache_compress.bench.prompts import LongestContext, PrefillTime, measure_longest, measure_prefill
from kvcache_compress.bench.timing import copy_bandwidth
from kvcache_compress.eval.results import circumstances, git_commit, write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
PRESETS = (
    "turboquant-4bit", "turboquant-3bit", "turboquant-2bit", "turboquant-k3v2", "kivi-4bit", "kivi-2bit",
    "polarquant-3.4bit", "polarquant-rope-4bit", "qjl-3bit", "commvq-2bit",
)  # fmt: skip
CHECKED = ("codes", "encode", "query", "append", "attention", "generation")
SMALL = {"small": Shape(4, 2, 64)}
LONGEST = ("turboquant-4bit", "turboquant-2bit")
PARTS = ("check", "bandwidth", "decode", "encode", "models", "prefill", "longest")


def check_kernels() -> str:
    """Runs the kernel tests on the device: the last line that pytest prints.

    Raises:
        RuntimeError: a test failed, so that nothing may be timed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Without the second pytest would find the sources, which lack the folders that are installed into the package.
    environment |= {"KVCACHE_COMPRESS_TEST_DEVICE": "cuda", "PYTHONSAFEPATH": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    tests = [f"tests/triton_kernels/test_{name}.py" for name in CHECKED]
    tests.append("tests/test_tiled.py")
    command = [sys.executable, "-m", "pytest", *tests, "-n", str(min(8, os.cpu_count() or 1)), "--maxfail", "20"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=480)
    print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "pytest printed nothing"
    if done.returncode != 0:
        raise RuntimeError(f"the kernels are not right on this device, so nothing is timed: {summary}")
    return summary


def collect(title: str, found: Iterable[Any], rows: list[dict[str, Any]], bandwidth: float | None = None) -> None:
    """Prints and keeps measurements as they come; `bandwidth` is that of a copy, in GB/s, where it was measured."""
    print(f"\n{title}", flush=True)
    for row in found:
        rows.append(asdict(row))
        print(_line(row, bandwidth), flush=True)


def _line(row: DecodeTime | EncodeTime | ModelTime | PrefillTime | LongestContext, bandwidth: float | None) -> str:
    batch = getattr(row, "batch", 1)
    where = f"{row.cache:22} B {batch:2} x {row.tokens:6}: "
    if isinstance(row, LongestContext):
        return f"{where}cache {row.cache_gib:.2f} GiB; then: {row.end}"
    if row.error is not None:
        return where + row.error
    if isinstance(row, ModelTime):
        return (
            f"{where}{row.tokens_per_second:8.1f} tokens/s, cache {row.cache_gib:.2f} GiB{_peak(row)}, filled in "
            f"{row.fill_seconds:.2f} s"
        )
    if isinstance(row, PrefillTime):
        ratio = "" if row.ratio is None else f", {row.ratio:.3f}x of full"
        return f"{where}{row.seconds:8.3f} s in chunks of {row.chunk}{ratio}{_peak(row)}"
    if isinstance(row, EncodeTime):
        return f"{row.shape:13} {where}{row.milliseconds:8.3f} ms, {row.gigabytes_per_second:7.1f} GB/s of input"
    speed = "" if row.speedup is None else f", {row.speedup:.2f}x of {row.bound:.2f}x"
    share = "" if bandwidth is None else f" ({row.gigabytes_per_second / bandwidth:.0%} of a copy's)"
    figures = f"{row.milliseconds:8.3f} ms, {row.gigabytes_per_second:7.1f} GB/s{share} at {row.bits:.2f} bits"
    return f"{row.shape:13} {where}{figures}{speed}"


def _peak(row: ModelTime | PrefillTime) -> str:
    return "" if row.peak_gib is None else f", peak {row.peak_gib:.1f} GiB"


def measure_llama(
    parts: Sequence[str], presets: Sequence[str], small: bool, device: torch.device, results: dict[str, Any]
) -> None:
    """Decoding, prompts and the longest context of a model of Llama-3.1-8B's shape, which is made once."""
    sizes = (SMALL["small"], 2, 64, 64) if small else (SHAPES["llama-3.1-8b"], 32, 4096, 14336)
    model = random_llama(*sizes, device)
    if "models" in parts:
        lengths = [160] if small else [8192, 32768, 131072]
        collect("a whole model", measure_models(model, presets[:4], [1], lengths), results["models"])
    if "prefill" in parts:
        tokens, chunks = (160, [160, 64]) if small else (32768, [32768, 4096])
        found = measure_prefill(model, presets[:4], tokens, chunks)
        collect("a whole model's prompt", found, results["prefill"])
    if "longest" in parts:
        piece, most = (128, 256) if small else (131072, 1 << 23)
        tried = [name for name in presets if name in LONGEST] or presets[:1]
        found = measure_longest(model, tried, piece, most)
        collect("the longest context that fits beside the weights", found, results["longest"])


def main(
    output: Annotated[Path | None, typer.Option(help="JSON file; the committed one only for a whole run.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes, no kernel tests; runs without a GPU.")] = False,
    preset: Annotated[list[str] | None, typer.Option(help="Presets to measure.")] = None,
    part: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}; all by default.")] = None,
) -> None:
    """Checks the kernels on the device and measures them."""
    if not small and not torch.cuda.is_available():
        raise typer.BadParameter("no GPU here: only --small runs without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if output is None and (small or preset or part):
        raise typer.BadParameter("--output is needed for --small, --preset and --part")
    parts = part or PARTS
    if unknown := {*parts} - {*PARTS}:
        raise typer.BadParameter(f"--part {', '.join(sorted(unknown))}: allowed {', '.join(PARTS)}")
    presets = preset or (["turboquant-4bit", "kivi-2bit"] if small else list(PRESETS))
    results: dict[str, Any] = {**circumstances(device), "commit": git_commit(__file__), "check": "skipped"}
    results |= {"finished": False} | {name: [] for name in PARTS[2:]}
    if "check" in parts and not small:
        results["check"] = check_kernels()
    if "bandwidth" in parts:
        results["copy_gigabytes_per_second"] = round(copy_bandwidth(device), 1)
        print(f"copy: {results['copy_gigabytes_per_second']} GB/s, read and written")
    try:
        if "decode" in parts:
            shapes, batches, lengths = (SMALL, [1], [128]) if small else (SHAPES, [1, 8, 32], [8192, 32768, 131072])
            found = measure_decode(presets, shapes, batches, lengths, device, 2 if small else 20)
            bandwidth = results.get("copy_gigabytes_per_second")
            collect("decode attention of one layer", found, results["decode"], bandwidth)
        if "encode" in parts:
            shapes, tokens = (SMALL, 128) if small else (SHAPES, 32768)
            found = measure_encode(presets, shapes, 1, tokens, device, 2 if small else 5)
            collect("encoding a prompt's keys and values, one layer", found, results["encode"])
        if {"models", "prefill", "longest"} & {*parts}:
            measure_llama(parts, presets, small, device, results)
        results["finished"] = True
    finally:
        path = output or RESULTS
        path.parent.mkdir(parents=True, exist_ok=True)
        if output is not None or results["finished"]:
            write_atomically(path, json.dumps(results, indent=1) + "\n")
            print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
