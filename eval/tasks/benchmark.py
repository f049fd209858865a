"""The contract of a benchmark: samples, a score per sample and cache, and a summary.

The runner (`runner/runner.py`) does the rest: a prefill per sample, a new cache per sample, files and
failures. A new benchmark is one file with `samples`, `score` and `summarize`. Its name in `BENCHMARKS` of
`tasks/__init__.py` makes it a command of `kvcache-compress eval` too.
"""

import abc
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import CacheRun
from kvcache_compress.validation import StrictOptions

Record = dict[str, Any]
"""The result of one sample with one cache, as plain JSON."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt, and what is needed to score its continuation.

    Attributes:
        id: a name that is unique within the benchmark, and the same in every run.
        prompt: token ids `[1, T]`, which are prefilled before anything is compressed.
        data: what else `score` needs, as plain JSON: references, a continuation, a position in a grid.
        question: token ids `[1, Q]` that follow the prompt through the cache under test; may be empty.
    """

    id: str
    prompt: torch.Tensor
    data: Mapping[str, Any]
    question: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(1, 0, dtype=torch.long))

    @property
    def digest(self) -> str:
        """Digest of the whole sample, which tells results of other texts from results of this one."""
        content = [self.prompt.tolist(), self.question.tolist(), dict(self.data)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class Benchmark(StrictOptions, abc.ABC):
    """Base of all benchmarks. Its fields are options.

    A field's description is the help of its option in `kvcache-compress eval`, and the docstring's first paragraph is
    the help of the command. A larger `limit` adds samples to a finished comparison, and computes only those.
    """

    kind: ClassVar[str]
    """The benchmark's name."""
    higher_is_better: ClassVar[bool] = True

    limit: int | None = Field(default=None, ge=1, description="Most samples to take, from the first; all by default.")

    @property
    @abc.abstractmethod
    def main_score(self) -> str:
        """The score that tables show: a key of what `summarize` returns."""

    @abc.abstractmethod
    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """Make the samples, at most `limit` or, of several tasks, of each.

        Raises:
            ValueError: Data are missing, empty or malformed, or do not fit the model.
            OSError: Data cannot be read or downloaded.
        """

    def skipped(self, model: PreTrainedModel) -> list[str]:
        """Say which parts of the benchmark have no samples with this model, and why."""
        return []

    @abc.abstractmethod
    def score(self, run: CacheRun, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
        """Score one cache on one sample, with one call of `run.forced` or `run.generate`."""

    @abc.abstractmethod
    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        """Compute the scores, `main_score` among them, from the records of all samples."""
