"""Time each preset's kernels on a GPU, the rows that are worth most first.

    make bench-gpu OUTPUT=build/gpu.jsonl MINUTES=9    # with this machine's Python; continues a file of the same commit
    TRITON_INTERPRET=1 python benchmarks/gpu.py --small --output F    # tiny sizes, without a GPU

Each row is one line of JSON, written as soon as it is measured. A worker process measures. If it crashes or hangs, the
row that it was measuring gets an error and another worker goes on with the next. Attention is compared with plain
attention before it is timed (`bench/compare.py`); `pytest tests/triton_kernels` checks the kernels (README.md).
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig, PreTrainedModel, StaticCache

from kvcache_compress.attention.interface import enable_fused_attention
from kvcache_compress.bench.decode import compressed_time, full_time, random_view
from kvcache_compress.bench.layers import SHAPES, VARIANTS, Shape, named_config
from kvcache_compress.bench.timing import copy_bandwidth, median_ms
from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.codecs.device import interpreting
from kvcache_compress.config import preset_names
from kvcache_compress.eval.provenance.results import circumstances, error_message, git_commit
from kvcache_compress.modeling.decoder import cache_argument

PARTS = ("bandwidth", "decode", "model", "encode")
CPU = torch.device("cpu")
DTYPE = torch.bfloat16
TARGETS = ("none", "turboquant-4bit", "spectral-2bit", "turboquant-2bit", "spectral-4bit", "kivi-2bit")
"""Presets that come first. `none` is our attention kernel over uncompressed keys and values."""
WARM_UP_STEPS = 4
"""Steps before a CUDA graph is recorded."""
FILL_TOKENS = 32_768
FLUSHES = 16
"""Reads of other data before a prompt is encoded, during which Python queues all launches."""
POISONED = 75
"""Exit status of a worker whose CUDA context no longer works, after it has written the row that broke it."""


class Job(NamedTuple):
    """Name of a row.

    Attributes:
        part: one of `PARTS`.
        cache: preset; `full` for the uncompressed cache.
        shape: name of the model's shape.
        batch, tokens: sequences, and packed tokens of each.
        variant: of `model` the loop (graph, eager).
    """

    part: str
    cache: str
    shape: str = ""
    batch: int = 1
    tokens: int = 0
    variant: str = ""


class Sizes(NamedTuple):
    """Sizes of the measurements; the first shape is also the model's.

    Attributes:
        main, others: batches and lengths of decode rows.
        encoded: tokens of a prompt that is encoded.
        model: layers, hidden size, intermediate size and vocabulary.
        model_sizes: batches and lengths of the model.
        steps: decode steps of a timed model.
        repeats: timed calls; the result is their median.
    """

    shapes: Mapping[str, Shape]
    main: tuple[tuple[int, int], ...]
    others: tuple[tuple[int, int], ...]
    encoded: int
    model: tuple[int, int, int, int]
    model_sizes: tuple[tuple[int, int], ...]
    steps: int
    repeats: int


SIZES = Sizes(
    SHAPES, ((8, 32_768), (32, 32_768), (1, 131_072), (1, 8_192)),
    ((8, 8_192), (32, 8_192), (1, 32_768), (8, 131_072), (32, 131_072)), 32_768, (32, 4096, 14336, 128_256),
    ((1, 32_768), (8, 32_768), (1, 8_192), (8, 8_192), (1, 131_072)), 40, 20,
)  # fmt: skip
SMALL_SIZES = Sizes({"small": Shape(2, 1, 32)}, ((1, 64),), (), 64, (2, 64, 64, 1024), ((1, 128),), 5, 1)


def plan_jobs(presets: Sequence[str], parts: Iterable[str], sizes: Sizes) -> list[Job]:
    """Rows of these parts in order of worth."""
    main, *others = sizes.shapes
    targets = [name for name in TARGETS if name in presets] or presets
    jobs = [Job("bandwidth", "copy")]

    def add(names: Iterable[str], shape: str, pairs: Iterable[tuple[int, int]]) -> None:
        pairs = list(pairs)
        jobs.extend(Job("decode", "full", shape, *size) for size in pairs)
        for name in names:
            jobs.extend(Job("decode", name, shape, *size) for size in pairs)
            if name != "none":
                jobs.append(Job("encode", name, shape, 1, sizes.encoded))

    add(targets, main, sizes.main)
    for size, loop in product(sizes.model_sizes, ("graph", "eager")):
        jobs += [Job("model", name, main, *size, loop) for name in ("full", *targets) if name != "none"]
    add(presets, main, sizes.main)
    for shape in (main, *others):
        add(presets, shape, (*sizes.main, *sizes.others))
    return [job for job in dict.fromkeys(jobs) if job.part in parts]


def record(step: Callable[[], object]) -> Callable[[], object]:
    """Record a step as a CUDA graph; the function returned replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.inference_mode()
def time_encoding(preset: str, shape: Shape, batch: int, tokens: int, device: torch.device, repeats: int) -> float:
    """Milliseconds to encode the keys and values of a prompt, one layer."""
    calls, size = [], (batch, shape.kv_heads, tokens, shape.head_dim)
    keys, values, _ = random_view(preset, shape, batch, tokens, device, DTYPE)
    for view in (keys, values):
        x = torch.randn(size, device=device, dtype=DTYPE)
        backend: Any = view.backend
        calls.append(partial(backend.encoded, view.codec, x, view.rope(0, tokens)))
    return median_ms(lambda: [call() for call in calls], device, repeats, flushes=FLUSHES)


@torch.inference_mode()
def time_model(job: Job, sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Tokens per second of a model with random weights after `tokens` tokens, and its memory.

    The loop `graph` has a static cache and replays each step from a CUDA graph; `eager` has a growing one.
    """
    on_gpu, shape = device.type == "cuda", sizes.shapes[job.shape]
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    model = random_llama(shape, *sizes.model, DTYPE, device)
    capacity = job.tokens + WARM_UP_STEPS + sizes.steps + 1 if job.variant == "graph" else None
    cache: Cache
    if job.cache != "full":
        enable_fused_attention(model)
        cache = CompressedCache(model.config, named_config(job.cache).changed(max_cache_len=capacity))
    elif capacity is None:
        cache = DynamicCache(config=model.config)
    else:
        cache = StaticCache(config=model.config, max_cache_len=capacity)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    for layer, start in product(range(sizes.model[0]), range(0, job.tokens, FILL_TOKENS)):
        size = (job.batch, shape.kv_heads, min(FILL_TOKENS, job.tokens - start), shape.head_dim)
        cache.update(*(torch.randn(size, device=device, dtype=DTYPE) for _ in range(2)), layer)
    step = decode_step(model, cache, torch.randint(1000, (job.batch, 1), device=device), job.tokens)
    for _ in range(WARM_UP_STEPS):
        step()
    # Only now, because a prompt may stay dense until its queries are seen.
    figures = {"cache_gib": (torch.cuda.memory_allocated() - before) / 2**30} if on_gpu else {}
    run = record(step) if job.variant == "graph" and on_gpu else step
    synchronize()
    begun = time.perf_counter()
    for _ in range(sizes.steps):
        run()
    synchronize()
    figures["tokens_per_second"] = sizes.steps * job.batch / (time.perf_counter() - begun)
    return figures | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {})


def random_llama(
    shape: Shape, layers: int, hidden: int, intermediate: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Llama of these sizes with random weights, which take the same time as trained ones."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=shape.query_heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=1 << 20,
    )  # fmt: skip
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def decode_step(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, position: int) -> Callable[[], torch.Tensor]:
    """Step that a CUDA graph can record: it replaces the tokens `ids` `[B, 1]` by the next ones."""
    positions = torch.full((1, 1), position, device=ids.device)

    def step() -> torch.Tensor:
        logits = model(input_ids=ids, **{cache_argument(): cache}, position_ids=positions).logits
        positions.add_(1)
        return ids.copy_(logits[:, -1:].argmax(-1))

    return step


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def measure(job: Job, sizes: Sizes, device: torch.device, rows: Mapping[Job, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of a row. `rows` are those measured so far, with the uncompressed cache's times."""
    if job.part == "bandwidth":
        return {"gigabytes_per_second": copy_bandwidth(device)}
    shape, full = sizes.shapes[job.shape], rows.get(job._replace(cache="full"), {})
    call = (shape, job.batch, job.tokens, device, DTYPE, sizes.repeats)
    if job.part == "encode":
        repeats = max(1, sizes.repeats // 4)
        time = time_encoding(job.cache, shape, job.batch, job.tokens, device, repeats)
        size = 2 * DTYPE.itemsize * job.batch * shape.kv_heads * job.tokens * shape.head_dim
        return {"milliseconds": time, "gigabytes_per_second": size / time / 1e6}
    if job.part == "model":
        found = time_model(job, sizes, device)
        if "tokens_per_second" in full:
            found["speedup"] = found["tokens_per_second"] / full["tokens_per_second"]
        return found
    found = full_time(*call) if job.cache == "full" else compressed_time(job.cache, *call)
    if "milliseconds" in full:
        found |= {"speedup": full["milliseconds"] / found["milliseconds"], "bound": full["bits"] / found["bits"]}
    return found


def work(jobs: Iterable[Job], sizes: Sizes, path: Path, commit: str | None) -> int:
    """Measure rows one after the other and append each to the file; returns `POISONED` if the device stops working."""
    for job in jobs:
        torch.manual_seed(0)
        try:
            figures = measure(job, sizes, current_device(), read_rows(path, commit))
        except Exception as error:
            text = error_message(error)
            figures = {"error": text if len(text) < 300 else f"{text[:150]} ... {text[-150:]}"}
        append_row(path, job._asdict() | figures | {"commit": commit})
        gc.collect()
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        except RuntimeError:
            return POISONED
    return 0


def read_rows(path: Path, commit: str | None) -> dict[Job, dict[str, Any]]:
    """Rows of a commit, by their names."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [row for row in map(json.loads, lines) if "part" in row and row["commit"] == commit]
    return {Job(*(row[name] for name in Job._fields)): row for row in rows}


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to the file and print it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    figures = [(name, row[name]) for name in row if name not in (*Job._fields, "commit")]
    shown = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures]
    print(*(row[name] for name in Job._fields if name in row), *shown, sep="  ", flush=True)


def supervise(
    command: Sequence[str], jobs: Sequence[Job], path: Path, commit: str | None, end: float, silence: float
) -> None:
    """Run workers until no row is missing or it is `end`. A row in which a worker crashes, or that takes longer than
    `silence` seconds, gets an error.

    Raises:
        RuntimeError: a worker could not be started.
    """

    def missing() -> list[Job]:
        rows = read_rows(path, commit)
        return [job for job in jobs if job not in rows]

    while (left := missing()) and time.monotonic() < end:
        worker, since, why = subprocess.Popen(command), time.monotonic(), None
        while worker.poll() is None and why is None:
            time.sleep(0.2)
            if (now := missing()) != left:
                left, since = now, time.monotonic()
            if time.monotonic() >= end:
                why = ""
            elif time.monotonic() - since > silence:
                why = f"no result within {silence:g} s"
        worker.kill()
        code = worker.wait()
        if why is None and code == 1:
            raise RuntimeError("the worker could not be started: see its message above")
        if why != "" and code not in (0, POISONED) and (left := missing()):
            append_row(path, left[0]._asdict() | {"error": why or f"the worker ended with {code}", "commit": commit})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file of JSON lines; rows of this commit stay")
    parser.add_argument("--minutes", type=float, default=9.5, help="minutes for the whole run (%(default)s)")
    parser.add_argument("--preset", action="append", help="presets to measure; all by default")
    parser.add_argument("--part", action="append", choices=PARTS, help="what to measure; all by default")
    parser.add_argument("--row-seconds", type=float, default=150, help="a row that takes longer hangs (%(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, which also run in Triton's interpreter")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments)
    if not (interpreting() if options.small and not torch.cuda.is_available() else torch.cuda.is_available()):
        parser.error("there is no GPU here; use --small with TRITON_INTERPRET=1")
    known = ["none", *VARIANTS, *preset_names()]
    if unknown := {*(options.preset or ())} - {*known}:
        parser.error(f"--preset {', '.join(sorted(unknown))} is unknown; use {', '.join(known)}")
    sizes, commit = SMALL_SIZES if options.small else SIZES, git_commit(__file__)
    jobs = plan_jobs(options.preset or known, options.part or PARTS, sizes)
    if options.worker:
        rows = read_rows(options.output, commit)
        sys.exit(work([job for job in jobs if job not in rows], sizes, options.output, commit))
    end = time.monotonic() + 60 * options.minutes
    options.output.parent.mkdir(parents=True, exist_ok=True)
    append_row(options.output, {"run": circumstances(current_device()), "commit": commit})
    command = [sys.executable, __file__, *arguments, "--worker"]
    supervise(command, jobs, options.output, commit, end, options.row_seconds)
    rows = read_rows(options.output, commit)
    print(f"{sum(job in rows for job in jobs)} of {len(jobs)} rows are in {options.output}")


if __name__ == "__main__":
    main()
