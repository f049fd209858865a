"""Benchmarks: samples, and a score per sample and cache."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvcache_compress.validation import explain, quoted

from .benchmark import Benchmark
from .longbench.benchmark import LongBench
from .needle import Needle
from .perplexity import Agreement, Perplexity
from .ruler import Ruler
from .turns import Turns

BENCHMARKS: tuple[type[Benchmark], ...] = (Perplexity, Agreement, Turns, LongBench, Needle, Ruler)


def make_benchmark(kind: str, options: Mapping[str, Any]) -> Benchmark:
    """Make a benchmark by name.

    Raises:
        ValueError: There is no such benchmark, or its options are wrong.
    """
    known = {benchmark.kind: benchmark for benchmark in BENCHMARKS}
    if kind not in known:
        raise ValueError(f"benchmark={quoted(kind)}: must be one of {', '.join(sorted(known))}")
    try:
        return known[kind](**options)
    except ValidationError as error:
        raise ValueError(f"benchmark {kind}: {explain(error, f'for {kind}', {'': known[kind]})}") from error
