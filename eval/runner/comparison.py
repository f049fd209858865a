"""Comparison of caches: models x caches x benchmarks from one YAML file.

    models: [smollm2-135m]                 # hub ids, folders; or {model: ..., codebooks: FILE} for CommVQ
    caches:                                # presets, YAML files, peers; the full cache is always added
      - turboquant-4bit
      - hqq-4
      - {name: mine, config: {keys: {method: turboquant, bits: 3}, values: {method: turboquant, bits: 2}}}
    benchmarks:
      wikitext: {kind: perplexity, texts: [wikitext-2/valid.txt]}
      passkey: {kind: needle, mode: passkey, lengths: [512, 1024]}
    output: results.jsonl

Over several processes (`accelerate launch`, `torchrun`) the samples are sharded, and the results are those of one
process. Finished samples are never computed again: an interrupted or enlarged comparison continues. A cell that fails
(out of memory, missing data, a cache that does not fit) records the reason, and the others go on. Relative paths start
at the working directory.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError
from transformers import Cache, PreTrainedModel

from kvcache_compress.eval.caches.caches import CacheSpec, full_cache, preset_cache
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.tasks.benchmark import Benchmark, make_benchmark
from kvcache_compress.files.text import read_yaml
from kvcache_compress.validation import AnyPath, AnyTuple, Seed, StrictOptions, explain

from .load import load
from .processes import Processes
from .runner import Progress, Runner, check_distinct
from .table import Cell, ResultTable


class ModelEntry(StrictOptions):
    """A model, with files of its calibration: CommVQ's codebooks, and spectral's statistics."""

    model: str
    codebooks: AnyPath | None = None
    statistics: AnyPath | None = None


class CacheEntry(StrictOptions):
    """A named cache: `config` is anything that `load_config` takes."""

    name: str
    config: str | dict[str, Any]
    codebooks: AnyPath | None = None
    statistics: AnyPath | None = None


def _kind(entry: Any) -> str:
    return "<name>" if isinstance(entry, str) else "<mapping>"


class Comparison(StrictOptions):
    """The content of a comparison's YAML file; see the module's docstring.

    Attributes:
        models: names, or models with files of their calibration.
        caches: names as on the command line of any benchmark, or caches with a config.
        benchmarks: name to `kind` and that kind's options.
        output: the table of results, a `.jsonl` file.
        dtype: the models' dtype.
        device: the models' device; each process's own by default.
        seed: set before each sample.
        fused: attend over the codes instead of decoding them.
    """

    models: AnyTuple[
        Annotated[Annotated[str, Tag("<name>")] | Annotated[ModelEntry, Tag("<mapping>")], Discriminator(_kind)]
    ] = Field(min_length=1)
    caches: AnyTuple[
        Annotated[Annotated[str, Tag("<name>")] | Annotated[CacheEntry, Tag("<mapping>")], Discriminator(_kind)]
    ] = Field(min_length=1)
    benchmarks: dict[str, dict[str, Any]] = Field(min_length=1)
    output: AnyPath
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str | None = None
    seed: Seed = 0
    fused: bool = False

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """Read a YAML file.

        Raises:
            ValueError: the file is missing, is not YAML, or holds something that is not allowed.
        """
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise ValueError(f"{path}: a mapping is needed at the top, with {', '.join(cls.model_fields)}")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            models: dict[str, type[StrictOptions]] = {"": cls, "models": ModelEntry, "caches": CacheEntry}
            raise ValueError(f"{path}: {explain(error, 'in the comparison', models)}") from error

    def specs(self, model: ModelEntry) -> list[CacheSpec]:
        """The caches for a model, the full one first.

        Raises:
            ValueError: a name that is no cache, or two caches of one name.
        """
        specs = [full_cache(), *(_spec(entry, model) for entry in self.caches if entry != "full")]
        check_distinct("caches", [spec.name for spec in specs])
        return specs

    def suite(self) -> dict[str, Benchmark]:
        """Make the benchmarks, by name.

        Raises:
            ValueError: no such kind, or options that it does not have.
        """
        suite = {}
        for name, options in self.benchmarks.items():
            if not isinstance(kind := options.get("kind"), str):
                raise ValueError(f"benchmarks.{name}: `kind` is missing, or no text")
            try:
                suite[name] = make_benchmark(kind, {key: value for key, value in options.items() if key != "kind"})
            except ValueError as error:
                raise ValueError(f"benchmarks.{name}: {error}") from error
        return suite

    def missing(self) -> dict[str, list[Path]]:
        """Files that do not exist, by the benchmark that reads them; those of models and caches under ''."""
        files = {name: list(vars(benchmark).values()) for name, benchmark in self.suite().items()}
        mappings: list[ModelEntry | CacheEntry] = [*self.entries()]
        mappings += [entry for entry in self.caches if not isinstance(entry, str)]
        files[""] = [path for entry in mappings for path in (entry.codebooks, entry.statistics)]
        found = {name: [path for value in values for path in _paths(value)] for name, values in files.items()}
        return {name: gone for name, paths in found.items() if (gone := [p for p in paths if not p.exists()])}

    def entries(self) -> list[ModelEntry]:
        """All models as entries.

        Raises:
            ValueError: a model is listed twice.
        """
        entries = [ModelEntry(model=entry) if isinstance(entry, str) else entry for entry in self.models]
        check_distinct("models", [entry.model for entry in entries])
        return entries


def compare(
    comparison: Comparison, processes: Processes, on_progress: Progress | None = None
) -> tuple[list[Cell], list[str]]:
    """Run a comparison.

    Returns:
        All cells, and messages about models that could not be loaded.

    Raises:
        ValueError: the comparison itself is wrong; nothing was run.
    """
    suite = comparison.suite()
    entries = [(entry, comparison.specs(entry)) for entry in comparison.entries()]
    ResultTable(comparison.output)  # a wrong file shows before a model is loaded
    cells: list[Cell] = []
    problems: list[str] = []
    for entry, specs in entries:
        problem, runner = None, None
        try:
            device = comparison.device or str(processes.device)
            model, tokenizer = load(entry.model, comparison.dtype, device, fused=comparison.fused)
            options: dict[str, Any] = {"seed": comparison.seed, "processes": processes, "on_progress": on_progress}
            runner = Runner(model, tokenizer, comparison.output, **options)
            del model
        except Exception as error:
            problem = f"model {entry.model}: {error}"
        if failed := [message for message in processes.gather(problem) if message is not None]:
            problems.append(failed[0])
            continue
        assert runner is not None
        for name, benchmark in suite.items():
            cells += runner.run(name, benchmark, specs)
        del runner
        gc.collect()
    return cells, problems


def _spec(entry: str | CacheEntry, model: ModelEntry) -> CacheSpec:
    name = entry if isinstance(entry, str) else entry.name
    files = {"codebooks": model.codebooks, "statistics": model.statistics}
    try:
        if isinstance(entry, str):
            return resolve_cache(entry, **files)
        files |= {name: path for name in files if (path := getattr(entry, name)) is not None}
        return preset_cache(entry.config, name=name, **files)
    except ImportError as error:
        return CacheSpec(name, _missing(error), lambda cache: NotImplemented, description={"missing": str(error)})


def _paths(value: Any) -> list[Path]:
    """Paths in the value of an option."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, Path)]


def _missing(error: ImportError) -> Any:
    def make(model: PreTrainedModel) -> Cache:
        raise error

    return make
