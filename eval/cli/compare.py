"""Comparison of caches: models x caches x benchmarks from one YAML file.

    models: [smollm2-135m]                 # hub ids, folders; or {model: ..., codebooks: FILE} for CommVQ
    caches:                                # presets, YAML files, peers; the full cache is always added
      - turboquant-4bit
      - hqq-4
      - {name: mine, config: {keys: {method: turboquant, bits: 3}, values: {method: turboquant, bits: 2}}}
    benchmarks:
      wikitext: {kind: perplexity, texts: [wikitext-2/valid.txt]}
      passkey: {kind: needle, mode: passkey, lengths: [512, 1024]}
    output: results

Run it by `kvcache-compress eval compare FILE`, or over several processes by
`accelerate launch --num_processes N -m kvcache_compress.eval compare FILE`: the samples are sharded, the results are
those of one process. (On CPUs accelerate starts more than one process only by MPI; `torchrun --nproc-per-node N -m ...`
needs none.) Finished samples are never computed again: an interrupted or enlarged comparison continues. A cell that
fails (out of memory, missing data, a cache that does not fit) records the reason, and the others go on; where the data
of every benchmark are missing, nothing runs. Relative paths start at the working directory.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Discriminator, Field, Tag, ValidationError
from transformers import Cache, PreTrainedModel

from kvcache_compress.eval.caches.caches import CacheSpec, full_cache, preset_cache
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.reporting.report import write_report
from kvcache_compress.eval.runner.cells import Cell
from kvcache_compress.eval.runner.command import load, show
from kvcache_compress.eval.runner.processes import LaunchedProcesses, Processes
from kvcache_compress.eval.runner.progress import ProgressLine
from kvcache_compress.eval.runner.runner import Progress, Runner, check_distinct
from kvcache_compress.eval.tasks.benchmark import Benchmark, make_benchmark
from kvcache_compress.files.text import read_yaml
from kvcache_compress.validation import AnyPath, AnyTuple, Seed, StrictOptions, explain

from .fetch import remedy


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
        output: folder of cells and report.
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
            ValueError: no such kind, options that it does not have, or names that are the same as folders.
        """
        check_distinct("benchmarks", list(self.benchmarks))
        return {name: _benchmark(name, options) for name, options in self.benchmarks.items()}

    def missing(self) -> dict[str, list[Path]]:
        """Files that do not exist, by the benchmark that reads them; those of models and caches under ''."""
        found = {
            name: [path for value in vars(benchmark).values() for path in _paths(value) if not path.exists()]
            for name, benchmark in self.suite().items()
        }
        entries: list[ModelEntry | CacheEntry] = [
            *self.entries(),
            *(entry for entry in self.caches if not isinstance(entry, str)),
        ]
        found[""] = [path for one in entries for path in (one.codebooks, one.statistics) if path and not path.exists()]
        return {name: paths for name, paths in found.items() if paths}

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
    cells: list[Cell] = []
    problems: list[str] = []
    for entry, specs in entries:
        problem, model, tokenizer = None, None, None
        try:
            model, tokenizer = load(
                entry.model, comparison.dtype, comparison.device or str(processes.device), fused=comparison.fused
            )
        except Exception as error:
            problem = f"model {entry.model}: {error}"
        if failed := [message for message in processes.gather(problem) if message is not None]:
            problems.append(failed[0])
            continue
        runner = Runner(
            model,
            tokenizer,
            comparison.output,
            seed=comparison.seed,
            processes=processes,
            on_progress=on_progress,
        )
        for name, benchmark in suite.items():
            cells += runner.run(name, benchmark, specs)
        del model, runner
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


def tell_missing(missing: Mapping[str, Sequence[Path]]) -> str:
    """One line about missing files, with the command that brings them if there is one."""
    paths = list(dict.fromkeys(path for of_one in missing.values() for path in of_one))
    shown = ", ".join(map(str, paths[:2])) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")
    command = remedy(paths)
    return f"missing {shown}" + (f": `{command}` brings them" if command else "")


def _missing(error: ImportError) -> Any:
    def make(model: PreTrainedModel) -> Cache:
        raise error

    return make


def _benchmark(name: str, options: Mapping[str, Any]) -> Benchmark:
    if not isinstance(options.get("kind"), str):
        raise ValueError(f"benchmarks.{name}: `kind` is missing, or no text")
    try:
        return make_benchmark(options["kind"], {key: value for key, value in options.items() if key != "kind"})
    except ValueError as error:
        raise ValueError(f"benchmarks.{name}: {error}") from error


def main(
    file: Annotated[Path, typer.Argument(help="YAML file with models, caches, benchmarks and output.")],
    output: Annotated[Path | None, typer.Option(help="Output folder, instead of the file's.")] = None,
) -> None:
    """Compare caches on models and benchmarks; write JSON cells, a Markdown table, CSV and an HTML report."""
    processes = LaunchedProcesses()
    main_process = processes.index == 0
    try:
        comparison = Comparison.read(file)
        if output is not None:
            comparison = comparison.model_copy(update={"output": output})
        try:
            if missing := comparison.missing():
                if set(comparison.benchmarks) <= set(missing):
                    raise ValueError(tell_missing(missing))
                if main_process:
                    typer.echo(f"warning: {tell_missing(missing)}", err=True)
            cells, problems = compare(comparison, processes, ProgressLine() if main_process else None)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    finally:
        processes.close()
    if main_process:
        for benchmark in dict.fromkeys((cell.model, cell.benchmark["name"]) for cell in cells):
            show([cell for cell in cells if (cell.model, cell.benchmark["name"]) == benchmark])
        for problem in problems:
            typer.echo(f"error: {problem}", err=True)
        if cells:
            write_report(comparison.output)
            typer.echo(f"report: {comparison.output / 'report.html'}")
    if problems or any(cell.error is not None for cell in cells):
        raise typer.Exit(1)
