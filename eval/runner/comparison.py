"""Compare caches: models x caches x benchmarks, from one YAML file.

    models: [smollm2-135m]                 # hub ids, folders; or {model: ..., codebooks: FILE} for CommVQ
    caches:                                # presets, YAML files, peers; the full cache is always added
      - turboquant-4bit
      - hqq-4
      - {name: mine, config: {keys: {method: turboquant, bits: 3}, values: {method: turboquant, bits: 2}}}
    benchmarks:
      wikitext: {kind: perplexity, texts: [wikitext-2/valid.txt]}
      passkey: {kind: needle, mode: passkey, lengths: [512, 1024]}
    output: results.jsonl

Finished samples are never computed again, so an interrupted or enlarged comparison continues. A cell that fails (out
of memory, missing data, a cache that does not fit the model) records the reason, and the others go on. Relative paths
start at the working directory.
"""

import gc
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from kvcache_compress.config import load_config
from kvcache_compress.eval.caches.caches import CacheSpec, full_cache, preset_cache
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.tasks import make_benchmark
from kvcache_compress.eval.tasks.benchmark import Benchmark
from kvcache_compress.files.text import read_yaml
from kvcache_compress.validation import AnyPath, AnyTuple, Seed, StrictOptions, explain

from .load import load
from .progress import Progress
from .runner import Runner, check_distinct
from .table import Cell, ResultTable


class Calibrated(StrictOptions):
    """Calibrated files: CommVQ's codebooks and spectral's statistics."""

    codebooks: AnyPath | None = None
    statistics: AnyPath | None = None


class ModelEntry(Calibrated):
    """A model, with its calibrated files."""

    model: str


class CacheEntry(Calibrated):
    """A cache with a name. `config` is anything that `load_config` takes; without it, the name says what it is."""

    name: str
    config: str | dict[str, Any] | None = None


def _named(field: str, entry: Any) -> Any:
    """The mapping that a plain name stands for."""
    return {field: entry} if isinstance(entry, str) else entry


class Comparison(StrictOptions):
    """The content of a comparison's YAML file; see the module's docstring.

    Attributes:
        models: names of models, or models with their calibrated files.
        caches: names as on the command line of a benchmark, or caches with a config.
        benchmarks: `kind` and its options by the benchmark's name.
        output: the table of results, a `.jsonl` file.
        dtype: dtype of the models.
        device: device of the models; by default each process's own.
        seed: seed that is set before each sample.
        fused: attend over the codes instead of decoding them.
    """

    models: AnyTuple[Annotated[ModelEntry, BeforeValidator(partial(_named, "model"))]] = Field(min_length=1)
    caches: AnyTuple[Annotated[CacheEntry, BeforeValidator(partial(_named, "name"))]] = Field(min_length=1)
    benchmarks: dict[str, dict[str, Any]] = Field(min_length=1)
    output: AnyPath
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str | None = None
    seed: Seed = 0
    fused: bool = False

    @model_validator(mode="after")
    def _distinct_models(self) -> "Comparison":
        check_distinct("models", [entry.model for entry in self.models])
        return self

    @classmethod
    def read(cls, path: Path, output: Path | None = None) -> "Comparison":
        """Read a YAML file; `output`, if given, replaces its entry `output`.

        Raises:
            ValueError: The file is missing or is not YAML, or its content is wrong.
        """
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise ValueError(f"{path}: must be a mapping with {', '.join(cls.model_fields)}")
        try:
            return cls.model_validate(content if output is None else content | {"output": output})
        except ValidationError as error:
            models: dict[str, type[StrictOptions]] = {"": cls, "models": ModelEntry, "caches": CacheEntry}
            raise ValueError(f"{path}: {explain(error, 'in the comparison', models)}") from error

    def specs(self, model: ModelEntry) -> list[CacheSpec]:
        """The caches for a model, the full cache first.

        Raises:
            ValueError: A name is no cache's, or two caches have one name.
        """
        specs = [full_cache(), *(_spec(entry, model) for entry in self.caches if entry != CacheEntry(name="full"))]
        check_distinct("caches", [spec.name for spec in specs])
        return specs

    def suite(self) -> dict[str, Benchmark]:
        """Make the benchmarks, by name.

        Raises:
            ValueError: A kind is unknown, or its options are wrong.
        """
        suite = {}
        for name, options in self.benchmarks.items():
            if not isinstance(kind := options.get("kind"), str):
                raise ValueError(f"benchmarks.{name}: needs a `kind`, such as perplexity")
            try:
                suite[name] = make_benchmark(kind, {key: value for key, value in options.items() if key != "kind"})
            except ValueError as error:
                raise ValueError(f"benchmarks.{name}: {error}") from error
        return suite


def compare(comparison: Comparison, on_progress: Progress | None = None) -> tuple[list[Cell], list[str]]:
    """Run a comparison.

    Returns:
        All cells, and messages about models that could not be loaded.

    Raises:
        ValueError, ImportError: The comparison itself is wrong, or needs a missing package; nothing was run.
    """
    suite = comparison.suite()
    entries = [(entry, comparison.specs(entry)) for entry in comparison.models]
    ResultTable(comparison.output)  # a wrong file is reported before a model is loaded
    cells: list[Cell] = []
    problems: list[str] = []
    for entry, specs in entries:
        try:
            model, tokenizer = load(entry.model, comparison.dtype, comparison.device, fused=comparison.fused)
        except Exception as error:
            problems.append(f"model {entry.model}: {error}")
            continue
        runner = Runner(model, tokenizer, comparison.output, seed=comparison.seed, on_progress=on_progress)
        del model
        for name, benchmark in suite.items():
            cells += runner.run(name, benchmark, specs)
        del runner
        gc.collect()
    return cells, problems


def _spec(entry: CacheEntry, model: ModelEntry) -> CacheSpec:
    both = ("codebooks", "statistics")
    files: dict[str, Path | None] = {file: getattr(entry, file) or getattr(model, file) for file in both}
    if entry.config is None:
        return resolve_cache(entry.name, **files)
    return preset_cache(load_config(entry.config).with_files(**files), name=entry.name)
