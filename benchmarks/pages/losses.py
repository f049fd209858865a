"""Tables of losses from the committed results of comparisons."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

from kvcache_compress.config import BUDGETS as BUDGET_NAMES
from kvcache_compress.config import preset_names
from kvcache_compress.eval.reporting.report import markdown_table
from kvcache_compress.eval.reporting.tables import MISSING, Table, bits_text, tables
from kvcache_compress.eval.runner.table import Cell, read_cells

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
LEADING = "wikitext"
BASE = "best-3bit"
"""The cache from which the differences of others are shown."""


def table_of(name: str) -> Table:
    return tables(read_cells(RESULTS / f"{name}.jsonl"))[0]


def source(name: str) -> str:
    return f"[{name}.jsonl](../benchmarks/results/{name}.jsonl), which holds the commands"


def figure(cell: Cell | None, text: Callable[[dict[str, float]], str]) -> str:
    """A figure computed from a cell's scores."""
    return MISSING if cell is None else "failed" if cell.error is not None else text(cell.scores)


def mean_kl(scores: dict[str, float]) -> str:
    return f"{scores['kl']:.4f} ± {scores['kl_stderr']:.4f}"


def tail_kl(scores: dict[str, float]) -> str:
    return f"{scores['kl_999']:.3f}"


def cells_of(table: Table, benchmark: str) -> dict[str, Cell]:
    return {row.cache: row.cells[benchmark] for row in table.rows if benchmark in row.cells}


def perplexity(table: Table) -> str:
    """Table of all presets on one text, and the source of the figures."""
    cells = cells_of(table, LEADING)
    lines = [[name, bits_text(cell.packed_bits), mean_kl(cell.scores)] for name, cell in cells.items()]
    cell = cells["full"]
    options = cell.benchmark["options"]
    return (
        f"{markdown_table(['cache', 'bits', 'KL'], lines)}\n\n{table.model}, {options['texts'][0]}, "
        f"{cell.samples} windows of {options['prefix']} + {options['scored']} tokens, {options['step']} per pass, "
        f"{cell.date[:10]}; from {source('smollm2')}."
    )


def keys(table: Table) -> str:
    """Table of log-probabilities of the right answers, and their mean differences from the full cache's."""
    full = table.rows[0].cells

    def answers(cell: Cell | None, base: Cell) -> str:
        text = figure(cell, lambda scores: f"{scores['logprob']:.3f}")
        missing = cell is None or cell is base or cell.error is not None
        return text if missing else f"{text} ({difference(cell, base, 'logprob', 3)})"

    lines = [
        [row.cache, bits_text(row.packed_bits), *(answers(row.cells.get(name), base) for name, base in full.items())]
        for row in table.rows
    ]
    return f"{markdown_table(['cache', 'bits', *full], lines)}\n\n{table.model}; from {source('tasks')}."


def difference(cell: Cell, base: Cell, score: str, digits: int) -> str:
    """Mean difference of a score from another cache's, paired by sample, with its standard error."""
    before = {record["id"]: record[score] for record in base.records}
    changes = [record[score] - before[record["id"]] for record in cell.records]
    error = stdev(changes) / math.sqrt(len(changes))
    return f"{fmean(changes):+.{digits}f} ± {error:.{digits}f}"


def held_out(table: Table) -> str:
    """Table of losses after prompts of two lengths, and the differences from `BASE` on the same windows."""
    names = "1k", "8k"
    base, full = cells_of(table, names[0])[BASE], table.rows[0].cells
    lines = []
    for row in table.rows[1:]:
        figures = [figure(row.cells.get(name), mean_kl) for name in names]
        figures += [figure(row.cells.get(name), tail_kl) for name in names]
        figures.append(difference(row.cells[names[0]], base, "kl", 4) if row.cache != BASE else MISSING)
        lines.append([row.cache, bits_text(row.packed_bits), *figures])
    heads = [*(f"KL, {name}" for name in names), *(f"99.9 %, {name}" for name in names)]
    heads.append(f"KL minus that of `{BASE}`, {names[0]}")
    windows = []
    for name in names:
        options = full[name].benchmark["options"]
        windows.append(f"{name} {full[name].samples} windows of {options['prefix']:,} + {options['scored']} tokens")
    return (
        f"{markdown_table(['cache', 'bits', *heads], lines)}\n\n{table.model}; {', '.join(windows)}, of "
        f"{len(options['texts'])} texts alike; from {source('held-out')}."
    )


def writing(table: Table) -> str:
    """Table of how long caches write the same as the full one."""
    lines = []
    for name, cell in cells_of(table, "writing").items():
        if cell.error is not None:
            continue
        scores = cell.scores
        quartiles = f"{scores['same_25']:.0f} to {scores['same_75']:.0f}"
        lines.append([name, f"{scores['same']:.0f}", quartiles, f"{scores['all']:.0%}", f"{scores['logprob']:.3f}"])
    options = cell.benchmark["options"]
    heads = ["cache", "same tokens, median", "quartiles", f"all {options['scored']} the same", "log-probability"]
    prompts = f"{cell.samples} prompts of {options['prefix']} tokens"
    return f"{markdown_table(heads, lines)}\n\n{prompts}; from {source('held-out')}."


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

    full, *cells = cells_of(table, "turns").items()
    cases = full[1].benchmark["options"]["cases"]
    lines = [
        [name, bits_text(cell.all_bits), figure(cell, mean_kl), *(figure(cell, loss(case)) for case in cases)]
        for name, cell in cells
    ]
    heads = ["cache", "bits, whole cache", "KL", *cases]
    return f"{markdown_table(heads, lines)}\n\n{table.model}; from {source('turns')}."


def long_answers(table: Table) -> str:
    """Table of losses along long answers."""
    lines = []
    for name, cell in [*cells_of(table, "long").items()][1:]:
        parts = map(fmean, zip(*(record["kl_parts"] for record in cell.records), strict=True))
        lines.append([name, bits_text(cell.packed_bits), mean_kl(cell.scores), *(f"{part:.4f}" for part in parts)])
    options = cell.benchmark["options"]
    each = options["scored"] // len(cell.records[0]["kl_parts"])
    heads = [f"to {each * (number + 1):,}" for number in range(len(lines[0]) - 3)]
    return (
        f"{markdown_table(['cache', 'bits', 'KL', *heads], lines)}\n\n{table.model}, {cell.samples} windows of "
        f"{options['prefix']} + {options['scored']:,} tokens; from {source('long')}."
    )


def losses(budgets: Table) -> dict[str, dict[str, float]]:
    """Losses of presets by falling bits, from which `kvcache-compress presets` makes its recommendation."""
    names = {*BUDGET_NAMES, *preset_names()}
    rows = sorted((row for row in budgets.rows if row.cache in names), key=lambda row: -(row.packed_bits or 0))
    rows.sort(key=lambda row: row.cache not in BUDGET_NAMES)
    scores = {row.cache: row.cells[budgets.columns[0].name].scores for row in rows}
    return {name: {key: float(f"{of[key]:.4g}") for key in ("kl", "kl_999")} for name, of in scores.items()}
