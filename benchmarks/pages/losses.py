"""Tables of losses from the committed results of comparisons."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

import tables
from tables import MISSING, Row, Table, bits_text, markdown_table

from kvcache_compress.config import BUDGETS as BUDGET_NAMES
from kvcache_compress.config import preset_names
from kvcache_compress.eval.runner.table import Cell, difference, read_cells
from kvcache_compress.eval.tasks.perplexity import PART

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
LEADING = "wikitext"
BASE = "best-3bit"
"""The cache from which the differences of others are shown."""


def table_of(name: str) -> Table:
    return tables.table_of(read_cells(RESULTS / f"{name}.jsonl"))


def figure(cell: Cell | None, text: Callable[[dict[str, float]], str]) -> str:
    """A figure computed from a cell's scores."""
    return MISSING if cell is None else "failed" if cell.error is not None else text(cell.scores)


def mean_kl(scores: dict[str, float]) -> str:
    return f"{scores['kl']:.4f} ± {scores['kl_stderr']:.4f}"


def tail_kl(scores: dict[str, float]) -> str:
    return f"{scores['kl_999']:.3f}"


def cells_of(table: Table, benchmark: str) -> dict[str, Cell]:
    return {row.cache: row.cells[benchmark] for row in table.rows if benchmark in row.cells}


Columns = dict[str, Callable[[Row], str]]
"""Columns of a table of caches: the function that writes a cell, by heading."""
BITS: Columns = {"bits": lambda row: bits_text(row.packed_bits)}


def scores_of(benchmark: str, text: Callable[[dict[str, float]], str]) -> Callable[[Row], str]:
    """A column with a figure of a benchmark."""
    return lambda row: figure(row.cells.get(benchmark), text)


def described(rows: Iterable[Row], columns: Columns, name: str, note: str) -> str:
    """A table with a line for each cache, and what it was measured on."""
    lines = ([row.cache, *(text(row) for text in columns.values())] for row in rows)
    source = f"[{name}.jsonl](../benchmarks/results/{name}.jsonl)"
    return f"{markdown_table(['cache', *columns], lines)}\n\n{note}; from {source}."


def perplexity(table: Table) -> str:
    """Table of all presets on one text."""
    cell = table.rows[0].cells[LEADING]
    options = cell.benchmark["options"]
    note = (
        f"{table.model}, {options['texts'][0]}, {cell.samples} windows of {options['prefix']} + {options['scored']} "
        f"tokens, {options['step']} per pass, {cell.date[:10]}"
    )
    return described(table.rows, BITS | {"KL": scores_of(LEADING, mean_kl)}, "smollm2", note)


def keys(table: Table) -> str:
    """Table of log-probabilities of the right answers, and their mean differences from the full cache's."""

    def answers(name: str, base: Cell) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            cell = row.cells.get(name)
            found = figure(cell, lambda scores: f"{scores['logprob']:.3f}")
            if cell is None or cell is base or cell.error is not None:
                return found
            return f"{found} ({difference(cell, base, 'logprob', 3)})"

        return text

    columns = {name: answers(name, base) for name, base in table.rows[0].cells.items()}
    return described(table.rows, BITS | columns, "tasks", table.model)


def held_out(table: Table) -> str:
    """Table of losses after prompts of several lengths, and the differences from `BASE` on the same windows."""
    full = table.rows[0].cells
    names = [name for name in ("1k", "4k", "8k") if name in full]
    base = cells_of(table, "1k")[BASE]
    columns = BITS | {f"KL, {name}": scores_of(name, mean_kl) for name in names}
    columns |= {f"99.9 %, {name}": scores_of(name, tail_kl) for name in names}
    columns[f"KL minus that of `{BASE}`, 1k"] = lambda row: (
        MISSING if row.cache == BASE else difference(row.cells["1k"], base, "kl", 4)
    )
    windows = []
    for name in names:
        options = full[name].benchmark["options"]
        windows.append(f"{name} {full[name].samples} windows of {options['prefix']:,} + {options['scored']} tokens")
    note = f"{table.model}; {', '.join(windows)}, of {len(options['texts'])} texts alike"
    return described(table.rows[1:], columns, "held-out", note)


def writing(table: Table) -> str:
    """Table of how long caches write the same as the full one."""
    rows = [row for row in table.rows if "writing" in row.cells and row.cells["writing"].error is None]
    cell = rows[0].cells["writing"]
    options = cell.benchmark["options"]
    texts: dict[str, Callable[[dict[str, float]], str]] = {
        "same tokens, median": lambda scores: f"{scores['same']:.0f}",
        "quartiles": lambda scores: f"{scores['same_25']:.0f} to {scores['same_75']:.0f}",
        f"all {options['scored']} the same": lambda scores: f"{scores['all']:.0%}",
        "log-probability": lambda scores: f"{scores['logprob']:.3f}",
    }
    columns = {head: scores_of("writing", text) for head, text in texts.items()}
    return described(rows, columns, "held-out", f"{cell.samples} prompts of {options['prefix']} tokens")


def peers() -> str:
    """Table of public packages; those without a figure are in the results with the reason."""
    rows = [json.loads(line) for line in (RESULTS / "peers.jsonl").read_text("utf-8").splitlines()]
    lines = []
    for row in sorted((row for row in rows if "error" not in row), key=lambda row: float(row["kl"])):
        setting = ", ".join(f"{name} {value}" for name, value in row["setting"].items())
        name = row["setting"]["name"] if row["package"] == "ours" else f"{row['package']} {row['version']}, {setting}"
        held = f"{row['bits']:.1f} / {row['bits_after']:.1f}"
        lines.append([name, mean_kl(row), held, row["attends"], f"{row['step_ratio']:.1f}"])
    return markdown_table(["cache", "KL", "bits held", "a step attends over", "step / full"], lines, (0, 3))


def turns(table: Table) -> str:
    """Table of losses after histories of several parts."""

    def loss(case: str) -> Callable[[dict[str, float]], str]:
        return lambda scores: f"{scores[f'kl.{case}']:.4f}"

    columns: Columns = {"bits, whole cache": lambda row: bits_text(row.all_bits), "KL": scores_of("turns", mean_kl)}
    cases = table.rows[0].cells["turns"].benchmark["options"]["cases"]
    columns |= {case: scores_of("turns", loss(case)) for case in cases}
    return described(table.rows[1:], columns, "turns", table.model)


def long_answers(table: Table) -> str:
    """Table of losses along long answers."""

    def part(number: int) -> Callable[[Row], str]:
        return lambda row: f"{fmean(record['kl_parts'][number] for record in row.cells['long'].records):.4f}"

    cell = table.rows[0].cells["long"]
    options = cell.benchmark["options"]
    ends = range(PART, options["scored"] + 1, PART)
    columns = BITS | {"KL": scores_of("long", mean_kl)}
    columns |= {f"to {end:,}": part(number) for number, end in enumerate(ends)}
    note = f"{table.model}, {cell.samples} windows of {options['prefix']} + {options['scored']:,} tokens"
    return described(table.rows[1:], columns, "long", note)


def losses(budgets: Table) -> dict[str, dict[str, float]]:
    """Losses of presets by falling bits, from which `kvcache-compress presets` makes its recommendation."""
    names = {*BUDGET_NAMES, *preset_names()}
    rows = sorted((row for row in budgets.rows if row.cache in names), key=lambda row: -(row.packed_bits or 0))
    rows.sort(key=lambda row: row.cache not in BUDGET_NAMES)
    scores = {row.cache: row.cells["1k"].scores for row in rows}
    return {name: {key: float(f"{of[key]:.4g}") for key in ("kl", "kl_999")} for name, of in scores.items()}
