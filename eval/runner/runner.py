"""Run a benchmark for several caches: prefills are shared and cells resumed."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from kvcache_compress.eval.caches.caches import CacheSpec
from kvcache_compress.eval.caches.prefill import Prefill, prefill
from kvcache_compress.eval.provenance.results import (
    circumstances,
    digest_of,
    error_message,
    fingerprint,
    strip_folders,
    without_folders,
)
from kvcache_compress.eval.tasks.benchmark import Benchmark, Record, Sample
from kvcache_compress.files.lock import only_one

from .progress import Progress
from .table import Cell, ResultTable, with_scores


@dataclass
class _Work:
    """A cell in progress; `foreign` if the table holds other results under its names."""

    spec: CacheSpec
    head: Cell
    stored: Cell | None = None
    error: str | None = None
    foreign: bool = False


class Runner:
    """Runs benchmarks for one model, and keeps their cells in a table.

    Args:
        output: the table's file (see `ResultTable`); None keeps nothing on disk.
        seed: seed that is set before each sample.
        on_progress: see `Progress`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        output: Path | None = None,
        *,
        seed: int = 0,
        on_progress: Progress | None = None,
    ) -> None:
        self.model, self.tokenizer, self.table, self.seed = model, tokenizer, ResultTable(output), seed
        self.on_progress = on_progress or (lambda done, total, label: None)
        self.model_name = without_folders(model.name_or_path) or type(model).__name__

    def run(self, name: str, benchmark: Benchmark, specs: Sequence[CacheSpec]) -> list[Cell]:
        """Compute every cell of a benchmark, in the order of `specs`.

        Finished samples are not computed again. A failure ends one cell, which the next run tries again. If another run
        writes to the same table, this one waits for it. `name` is the benchmark's in the table.

        Raises:
            ValueError: Two caches have one name.
            OSError: A file cannot be written.
        """
        check_distinct("caches", [spec.name for spec in specs])
        path = self.table.path
        with nullcontext() if path is None else only_one(path.with_name(f"{path.name}.lock")):
            self.table.read()
            works = [self._work(self._head(name, benchmark, spec), spec) for spec in specs]
            samples: list[Sample] = []
            try:
                samples = self._samples(name, benchmark)
            except Exception as error:
                for work in works:
                    work.error = work.error or error_message(error)
            else:
                self._score_all(name, samples, benchmark, works)
            self.table.read()
            digests = {sample.id: sample.digest for sample in samples}
            cells = [self._collect(benchmark, work, digests) for work in works]
            self.table.write([cell for work, cell in zip(works, cells, strict=True) if not work.foreign])
            return cells

    def _samples(self, name: str, benchmark: Benchmark) -> list[Sample]:
        samples = benchmark.samples(self.model, self.tokenizer)
        if not samples:
            raise ValueError(f"benchmark {name}: no samples")
        check_distinct(f"benchmark {name}: ids of samples", [sample.id for sample in samples])
        return samples

    @cached_property
    def _circumstances(self) -> dict[str, Any]:
        return circumstances(self.model.device)

    @cached_property
    def _model(self) -> dict[str, Any]:
        return {
            "model": self.model_name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": str(self.model.config._attn_implementation),
            "weights": fingerprint(self.model),
        }

    def _head(self, name: str, benchmark: Benchmark, spec: CacheSpec) -> Cell:
        """The cell before its results: model, benchmark, cache and digest."""
        kind = {"kind": benchmark.kind, "options": strip_folders(benchmark.model_dump(mode="json", exclude={"limit"}))}
        scores = {"main_score": benchmark.main_score, "higher_is_better": benchmark.higher_is_better}
        cache = {"name": spec.name, "lossless": spec.lossless, "config": strip_folders(spec.description)}
        digest = digest_of(**self._model, benchmark=kind, cache=cache["config"], seed=self.seed)
        about = {"name": name, **kind, **scores}
        skipped = benchmark.skipped(self.model)
        return Cell(**self._model, benchmark=about, cache=cache, seed=self.seed, digest=digest, skipped=skipped)

    def _work(self, head: Cell, spec: CacheSpec) -> _Work:
        """Pick up a cell where it was left; it fails if the table holds other results under its names."""
        stored = self.table.cell(head)
        if stored is None or stored.digest == head.digest:
            return _Work(spec, head, stored)
        if stored.error is not None:
            return _Work(spec, head)
        error = (
            f"the table already holds results of {'/'.join(head.key[1:])} with other weights, options or another seed; "
            "use another output, another name for the benchmark, or remove them"
        )
        return _Work(spec, head, error=error, foreign=True)

    def _known(self, work: _Work) -> dict[str, Record]:
        """Records of this run and earlier ones by sample id."""
        stored = [*work.stored.records, *work.stored.further] if work.stored else []
        return {record["id"]: record for record in stored} | self.table.unfinished(work.head)[0]

    def _score_all(self, name: str, samples: Sequence[Sample], benchmark: Benchmark, works: Sequence[_Work]) -> None:
        """Score the samples that a cell still lacks."""
        done = {work.spec.name: self._known(work) for work in works}

        def pending(sample: Sample) -> list[_Work]:
            known = {name: records.get(sample.id, {}).get("digest") for name, records in done.items()}
            return [work for work in works if work.error is None and known[work.spec.name] != sample.digest]

        total = sum(len(pending(sample)) for sample in samples)
        count = 0
        shared: Prefill | None = None
        for sample in samples:
            if not (todo := pending(sample)):
                continue
            shared = None  # frees its memory before the next prefill
            with self._failing(todo):
                self.on_progress(count, total, f"{name} {sample.id}")
                set_seed(self.seed)
                shared = prefill(self.model, sample.prompt, sample.question)
            for work in todo:
                if shared is not None and work.error is None:
                    self.on_progress(count, total, f"{name} {sample.id}, {work.spec.name}")
                    with self._failing([work]):
                        self._score(benchmark, shared, sample, work)
                count += 1
        self.on_progress(total, total, name)

    def _score(self, benchmark: Benchmark, shared: Prefill, sample: Sample, work: _Work) -> None:
        set_seed(self.seed)
        run = shared.run(work.spec)
        set_seed(self.seed)
        scored = benchmark.score(run, sample, self.tokenizer)
        common = {"id": sample.id, "digest": sample.digest, "tokens": sample.prompt.shape[1]}
        seconds = {"seconds": round(run.seconds, 3), "prefill_seconds": round(shared.seconds, 3)}
        about = common | dataclasses.asdict(run.measured) | seconds | {"commit": self._circumstances["commit"]}
        self.table.append(work.head, record=about | scored)

    @contextmanager
    def _failing(self, works: Sequence[_Work]) -> Iterator[None]:
        """Turn an exception into the error of these cells."""
        try:
            yield
        except Exception as error:
            for work in works:
                work.error = work.error or error_message(error)
                self.table.append(work.head, error=work.error)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _collect(self, benchmark: Benchmark, work: _Work, wanted: dict[str, str]) -> Cell:
        """Assemble a cell from its records."""
        stored, known = work.stored, {} if work.foreign else self._known(work)
        records = [known[name] for name, digest in wanted.items() if known.get(name, {}).get("digest") == digest]
        further = [record for name, record in known.items() if name not in wanted]
        finished = stored is not None and stored.error is None
        if stored is not None and finished and not wanted:
            return stored  # it was finished before its data went missing
        head = dataclasses.replace(work.head, records=records, further=further, **self._circumstances)
        if len(records) < len(wanted) or not records:
            error = work.error or self.table.unfinished(head)[1] or "interrupted"
            return dataclasses.replace(head, error=error)
        if not work.spec.lossless and not any(record["packed_tokens"] for record in records):
            error = "nothing was packed, so there is no loss to measure; use longer prompts, or fewer dense tokens"
            return dataclasses.replace(head, error=error)
        unchanged = (head.benchmark, records, further)
        if stored is not None and finished and (stored.benchmark, stored.records, stored.further) == unchanged:
            return stored
        try:
            return with_scores(head, benchmark.summarize(records))
        except Exception as error:
            return dataclasses.replace(head, error=error_message(error))


def check_distinct(what: str, names: Sequence[str]) -> None:
    """Raise ValueError if two names are equal."""
    if twice := sorted(name for name, count in collections.Counter(names).items() if count > 1):
        raise ValueError(f"{what}: {', '.join(twice)} more than once; give each a name of its own")
