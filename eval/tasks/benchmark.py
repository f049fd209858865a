"""The contract of a benchmark: samples, a score per sample and cache, and a summary.

A benchmark is a class whose fields are its options, registered under its name:

    @register_benchmark("needle")
    class Needle(Benchmark): ...

The runner (`runner/runner.py`) does the rest: one prefill per sample, a new cache per kind and sample, files,
processes, failures. A new benchmark is one file with `samples`, `score` and `summarize`, listed in `BENCHMARKS` of
`tasks/__init__.py`, which also makes it a command of `kvcache-compress eval`.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field, ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import CacheRun
from kvcache_compress.validation import StrictOptions, explain, quoted

Record = dict[str, Any]
"""Result of one sample with one cache; plain JSON."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt and what is needed to score the continuation.

    Attributes:
        id: unique within the benchmark, the same in every run.
        prompt: `[1, T]` token ids, prefilled before anything is compressed.
        data: what else `score` needs: references, a continuation, a position in a grid. Plain JSON.
        question: `[1, Q]` token ids that follow the prompt and already go through the cache under test; may be empty.
    """

    id: str
    prompt: torch.Tensor
    data: Mapping[str, Any]
    question: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(1, 0, dtype=torch.long))

    @property
    def digest(self) -> str:
        """Digest of the whole sample, so that the result of another text is never taken for this one's."""
        content = [self.prompt.tolist(), self.question.tolist(), dict(self.data)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class Benchmark(StrictOptions, abc.ABC):
    """Base of all benchmarks: options in, samples and scores out.

    A field's description is the help of its option in `kvcache-compress eval`; the docstring's first paragraph is the
    command's. Raising `limit` later adds samples to a finished comparison without computing any again.
    """

    kind: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    limits_itself: ClassVar[bool] = False
    """`samples` applies `limit` on its own, to each of several tasks; else the runner does."""

    limit: int | None = Field(default=None, ge=1, description="Most samples to take, from the first; all by default.")

    @property
    @abc.abstractmethod
    def main_score(self) -> str:
        """The score that tables show, a key of what `summarize` returns."""

    @abc.abstractmethod
    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """All samples (the runner applies `limit`).

        Raises:
            ValueError: data that are missing, empty, malformed, or do not fit the model.
            OSError: data that cannot be read or fetched.
        """

    def skipped(self, model: PreTrainedModel) -> list[str]:
        """Reasons why parts of the benchmark have no samples with this model."""
        return []

    @abc.abstractmethod
    def score(self, run: CacheRun, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
        """Score one cache on one sample, by one call of `run.forced` or `run.generate`."""

    @abc.abstractmethod
    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        """Scores over the records of all samples, `main_score` among them."""


_BENCHMARKS: dict[str, type[Benchmark]] = {}
AnyBenchmark = TypeVar("AnyBenchmark", bound=type[Benchmark])


def register_benchmark(kind: str) -> Callable[[AnyBenchmark], AnyBenchmark]:
    """Class decorator that registers a benchmark under a name.

    Raises:
        ValueError: the name is taken.
    """

    def register(benchmark: AnyBenchmark) -> AnyBenchmark:
        if kind in _BENCHMARKS:
            raise ValueError(f"benchmark={kind!r}: already registered")
        benchmark.kind = kind
        _BENCHMARKS[kind] = benchmark
        return benchmark

    return register


def make_benchmark(kind: str, options: Mapping[str, Any]) -> Benchmark:
    """Make a benchmark by name.

    Raises:
        ValueError: no such benchmark, or options that it does not have.
    """
    if kind not in _BENCHMARKS:
        raise ValueError(f"benchmark={quoted(kind)}: allowed {', '.join(sorted(_BENCHMARKS))}")
    try:
        return _BENCHMARKS[kind](**options)
    except ValidationError as error:
        problems = explain(error, f"for {kind}", {"": _BENCHMARKS[kind]})
        raise ValueError(f"benchmark {kind}: {problems}") from error
