"""Write the tables and the plot of README and documentation from the committed results; `--check` only compares.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

from kvcache_compress.cache.estimate import BF16_BYTES, MODELS, packed_bits, total_bytes
from kvcache_compress.config import BUDGETS as BUDGET_NAMES
from kvcache_compress.config import load_config, preset_names
from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.reporting.plots import pareto
from kvcache_compress.eval.reporting.tables import MISSING, Table, tables
from kvcache_compress.eval.runner.cells import Cell, read_cells
from kvcache_compress.eval.tuning.tune import Budget
from kvcache_compress.validation import parse_size, size_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMPARISON = RESULTS / "smollm2"
BUDGETS, TASKS = RESULTS / "budgets", RESULTS / "tasks"
DISTORTION = RESULTS / "distortion.json"
CPU = RESULTS / "cpu.json"
LOSSES = ROOT / "configs" / "measured.json"
README, RESULTS_PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
PRESETS_PAGE, TUNING_PAGE, CPU_PAGE = (ROOT / "docs" / "guides" / f"{name}.md" for name in ("presets", "tune", "cpu"))
LEADING = "wikitext"

PAPER = ("0.36, 1.57", "0.117, 0.56", "0.03, 0.18", "0.009, 0.047")


LADDER = {
    "hqq-4": "to compare: Transformers' `QuantizedCache`",
    "quanto-4": "to compare: the same with quanto",
    "kivi-4bit@sinks=16,recent=64": "to compare: the usual baseline",
    "turboquant-4bit": "few instructions per number",
    "best-4bit": "no visible loss",
    "best-3bit": "the best trade",
    "best-2bit": "half the size of `best-4bit`, without any file",
    "tuned-1.4": "the smallest, tuned for the model",
}
"""Caches of the README's first table, and what to take them for."""
BYTES = (
    ("smollm2-135m", 4, "8K", ("200MB", "100MB", "75MB")),
    ("llama-3.1-8b", 4, "128K", ("16GB", "10GB", "8GB", "6GB")),
)
"""Models, sequences, tokens of each and budgets that the page on tuning shows."""
SENTENCED = ("best-3bit", "turboquant-4bit", "kivi-4bit", "hqq-4", "quanto-4")
"""Caches whose decode step on a CPU the README names."""
LLAMA, CONTEXT = "llama-3.1-8b", 131_072
SIZED = ("best-4bit", "best-3bit", "best-2bit", "best-1.5bit", "turboquant-4bit", "turboquant-2bit", "kivi-4bit")
CONTEXTS = ("8K", "32K", "128K")
"""Presets and contexts of the page on presets."""


def headline(table: Table) -> str:
    """Headline sentences of the README's first screen."""
    cells = _cells(table, table.columns[0].name)
    layers, _, heads, dim = MODELS[LLAMA]
    full = 2 * BF16_BYTES * layers * heads * dim * CONTEXT
    sizes = {name: total_bytes(load_config(name), layers, heads, dim, CONTEXT) for name in ("best-3bit", "best-2bit")}
    ours, peer = cells["best-3bit"], cells["hqq-4"]
    return (
        f"At 128K tokens the key/value cache of Llama-3.1-8B takes {full / 2**30:.0f} GiB in bfloat16, more than its "
        f"weights, and every decode step reads all of it; `best-3bit` keeps it in {sizes['best-3bit'] / 2**30:.1f} GiB "
        f"and `best-2bit` in {sizes['best-2bit'] / 2**30:.1f}. The loss of `best-3bit`, measured on SmolLM2-135M over "
        f"six kinds of text, is a KL divergence of {ours.score:.4f} nats per token, against {peer.score:.4f} for "
        f"Transformers' own 4-bit cache (hqq)."
    )


def ladder(table: Table) -> str:
    """Table of a few caches and what to take them for."""
    column = table.columns[0]
    rows = {row.cache: row for row in table.rows}
    lines = ["| cache | bits | KL | 99.9 % | take it for |", "|---|---:|---:|---:|---|"]
    for name, purpose in LADDER.items():
        loss = " | ".join(_losses(rows[name].cells.get(column.name)))
        lines.append(
            f"| {name.partition('@')[0]} | {table.bits_text(rows[name], 'packed_bits')} | {loss} | {purpose} |"
        )
    options = next(iter(_cells(table, column.name).values())).benchmark["options"]
    note = (
        f"SmolLM2-135M, prompts of {options['prefix']:,} tokens of six kinds of text; 16 sinks and 64 recent tokens "
        "stay dense, except in Transformers' own caches."
    )
    return "\n".join([*lines, "", note])


def perplexity(table: Table) -> str:
    """Table of the leading benchmark, a line per cache, and the source of the figures."""
    cells = _cells(table, LEADING)
    lines = [
        "| cache | bits, packed part | bits, whole cache | perplexity | KL | same top-1 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, cell in cells.items():
        scores = cell.scores
        kl = f"{scores['kl']:.4f} ± {scores['kl_stderr']:.4f}"
        bits = f"{cell.packed_bits:.2f} | {cell.all_bits:.2f}"
        lines.append(f"| {name} | {bits} | {scores['perplexity']:.2f} | {kl} | {scores['top1']:.3f} |")
    cell = next(iter(cells.values()))
    options = cell.benchmark["options"]
    windows = f"{cell.samples} windows of {options['prefix']} + {options['scored']} tokens"
    return "\n".join(
        [
            *lines,
            "",
            f"{table.model}, {_text(cell)}, {windows}, {options['step']} per pass, {cell.date[:10]}; from "
            f"[{COMPARISON.name}](../{COMPARISON.relative_to(ROOT)}), whose files hold the commands.",
        ]
    )


def keys(table: Table) -> str:
    """Table of log-probabilities of the right answers, and their mean differences from the full cache's."""
    lines = [f"| cache | bits | {' | '.join(column.name for column in table.columns)} |"]
    lines.append("|---|" + "---:|" * (len(table.columns) + 1))
    for row in table.rows:
        figures = [_answers(row.cells[column.name], table.cells(column)[0]) for column in table.columns]
        lines.append(f"| {row.cache} | {table.bits_text(row, 'packed_bits').split()[0]} | {' | '.join(figures)} |")
    source = f"[{TASKS.name}](../{TASKS.relative_to(ROOT)})"
    return "\n".join([*lines, "", f"{table.model}; from {source}, whose files hold the commands."])


def _answers(cell: Cell, full: Cell) -> str:
    text = f"{cell.scores['logprob']:.3f}"
    if cell is full:
        return text
    before = {record["id"]: record["logprob"] for record in full.records}
    changes = [record["logprob"] - before[record["id"]] for record in cell.records]
    error = statistics.stdev(changes) / math.sqrt(len(changes))
    return f"{text} ({statistics.fmean(changes):+.3f} ± {error:.3f})"


def tasks(table: Table) -> str:
    """Table of all other benchmarks, a line per cache."""
    columns = [column for column in table.columns if column.name != LEADING]
    rows = [row for row in table.rows if any(column.name in row.cells for column in columns)]
    extra = [column for column in columns if column.main_score == "recall"]
    headings = ["cache", "bits, packed part", *(f"{column.name}: {column.main_score}" for column in columns)]
    headings += [f"{column.name}: logprob" for column in extra]
    lines = [f"| {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) - 1)]
    for row in rows:
        figures = [table.score_texts(row, column)[0] for column in columns]
        figures += [_logprob(row.cells.get(column.name)) for column in extra]
        lines.append(f"| {' | '.join([row.cache, table.bits_text(row, 'packed_bits'), *figures])} |")
    sizes = []
    for column in columns:
        cells = (row.cells[column.name] for row in rows if column.name in row.cells)
        finished = [cell for cell in cells if cell.error is None]
        seconds = sum(cell.seconds for cell in finished) + finished[0].prefill_seconds
        sizes.append(
            f"{column.name} {finished[0].samples} samples, {seconds / 60:.0f} processor-minutes for all caches"
        )
    failures = [f"{failure.benchmark}, {', '.join(failure.caches)}: {failure.message}" for failure in table.failures]
    failed = [f"\nFailed: {'; '.join(failures)}."] if failures else []
    return "\n".join([*lines, "", f"{table.model}; {'; '.join(sizes)}.", *failed])


def _logprob(cell: Cell | None) -> str:
    return MISSING if cell is None or cell.error is not None else f"{cell.scores['logprob']:.3f}"


def _cells(table: Table, benchmark: str) -> dict[str, Cell]:
    return {row.cache: row.cells[benchmark] for row in table.rows if benchmark in row.cells}


def _text(cell: Cell) -> str:
    return str(cell.benchmark["options"]["texts"][0])


def lengths(table: Table) -> str:
    """Table of caches on several texts together, a group of columns for each length."""
    columns = table.columns
    headings = [f"{column.name}: {what}" for column in columns for what in ("KL", "99.9 %")]
    lines = [
        f"| cache | bits | {' | '.join(headings)} | same top-1 |",
        "|---|" + "---:|" * (len(headings) + 2),
    ]
    for row in table.rows:
        if not row.lossless:
            figures = [text for column in columns for text in _losses(row.cells.get(column.name))]
            top1 = [cell.scores["top1"] for cell in row.cells.values() if cell.error is None]
            figures.append(f"{statistics.fmean(top1):.3f}" if top1 else MISSING)
            lines.append(f"| {row.cache} | {table.bits_text(row, 'packed_bits')} | {' | '.join(figures)} |")
    return "\n".join([*lines, "", _sources(table)])


def _losses(cell: Cell | None) -> tuple[str, str]:
    if cell is None or cell.error is not None:
        return (MISSING if cell is None else "failed",) * 2
    return f"{cell.scores['kl']:.4f} ± {cell.scores['kl_stderr']:.4f}", f"{cell.scores['kl_999']:.3f}"


def losses(table: Table) -> dict[str, dict[str, float]]:
    """Losses of the presets in the table, by which `kvcache-compress presets` recommends them, the least bits last."""
    names = {*BUDGET_NAMES, *preset_names()}
    rows = sorted((row for row in table.rows if row.cache in names), key=lambda row: -(row.packed_bits or 0))
    rows.sort(key=lambda row: row.cache not in BUDGET_NAMES)
    cells = {row.cache: row.cells[table.columns[0].name] for row in rows}
    return {
        name: {score: float(f"{cell.scores[score]:.4g}") for score in ("kl", "kl_999")} for name, cell in cells.items()
    }


def by_text(table: Table) -> str:
    """Table of the mean KL of caches on each text, with a column for each length in which it was measured."""
    places = [(column, text) for column in table.columns for text in _domains(table, column.name)]
    headings = [f"{_named(text)}, {column.name}" for column, text in places]
    lines = [f"| cache | bits | {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) + 1)]
    for row in table.rows:
        if not row.lossless:
            cells = ((row.cells.get(column.name), f"kl.{text}") for column, text in places)
            figures = [MISSING if cell is None or cell.error else f"{cell.scores[name]:.4f}" for cell, name in cells]
            lines.append(f"| {row.cache} | {table.bits_text(row, 'packed_bits')} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _domains(table: Table, benchmark: str) -> list[str]:
    cell = next(iter(_cells(table, benchmark).values()))
    return [name.removeprefix("kl.") for name in cell.scores if name.startswith("kl.")]


def _named(text: str) -> str:
    folder, _, file = text.partition("/")
    return folder if file == "valid.txt" else file.removesuffix(".txt")


def _sources(table: Table) -> str:
    windows = []
    for column in table.columns:
        cell = next(iter(_cells(table, column.name).values()))
        options = cell.benchmark["options"]
        windows.append(f"{column.name} {cell.samples} windows of {options['prefix']:,} + {options['scored']} tokens")
    return (
        f"{table.model}; {', '.join(windows)}, of {len(options['texts'])} texts alike; from "
        f"[{BUDGETS.name}](../{BUDGETS.relative_to(ROOT)}), whose files hold the commands."
    )


def tuned_table(folder: Path) -> str:
    """Table of the certificates in the headers of tuned configs, beside those of the best with equal bits."""
    lines = ["| budget | tuned: bits | KL | 99.9 % | equal bits: bits | KL | 99.9 % |", "|---|" + "---:|" * 6]
    for path in sorted(folder.glob("*.yaml"), key=lambda path: -float(path.stem.rpartition("-")[2])):
        figures = re.findall(r": ([\d.]+) bits .*?, KL ([\d.]+ ± [\d.]+) \(99.9 %: ([\d.]+)\)", path.read_text("utf-8"))
        lines.append(f"| {path.stem.rpartition('-')[2]} | {' | '.join(x for row in figures for x in row)} |")
    return "\n".join(lines)


def bytes_table() -> str:
    """Table of what budgets in bytes leave for a packed number, beside the best preset that keeps to them."""
    lines = [
        "| model | contexts | bfloat16 | budget | bits per packed number | preset |",
        "|---|---|---:|---:|---:|---|",
    ]
    base = load_config("best-2bit")
    for model, batch, context, budgets in BYTES:
        shape, tokens = MODELS[model], parse_size(context, "context")
        sizes = shape.layers, shape.kv_heads, shape.head_dim
        full = 2 * BF16_BYTES * math.prod(sizes) * tokens * batch
        for given in budgets:
            memory = parse_size(given, "memory")
            spare = 8 * Budget(shape, None, memory, tokens, batch).spare(base) / (2 * shape.head_dim * shape.layers)
            bits = packed_bits(base, shape.head_dim, shape.layers, shape.kv_heads) + spare
            fitting = (name for name in BUDGET_NAMES if total_bytes(load_config(name), *sizes, tokens, batch) <= memory)
            preset = next((f"`{name}`" for name in fitting), "none: tune")
            lines.append(f"| {model} | {batch} x {context} | {size_text(full)} | {given} | {bits:.2f} | {preset} |")
    return "\n".join(lines)


def memory_table() -> str:
    """Table of the estimated sizes of presets' whole caches for one model's shape, by context."""
    lines = [f"| {LLAMA} | {' | '.join(CONTEXTS)} |", "|---|" + "---:|" * len(CONTEXTS)]
    layers, _, heads, dim = MODELS[LLAMA]
    tokens = [parse_size(context, "context") for context in CONTEXTS]
    full = [2 * BF16_BYTES * layers * heads * dim * count for count in tokens]
    lines.append(f"| bfloat16 | {' | '.join(size_text(size) for size in full)} |")
    for name in SIZED:
        sizes = (total_bytes(load_config(name), layers, heads, dim, count) for count in tokens)
        lines.append(f"| `{name}` | {' | '.join(size_text(size) for size in sizes)} |")
    return "\n".join(lines)


def distortion_table(result: dict[str, Any]) -> str:
    """Table by bits of the mean squared error of unit vectors, and of error and bias of their inner products."""
    lines = ["| estimator | " + " | ".join(f"{bits} bits" for bits in (1, 2, 3, 4)) + " |", "|---|---:|---:|---:|---:|"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        rows.setdefault(row["estimator"], []).append(row)
    for name, cells in rows.items():
        figures = (f"{c['mse']:.4f}, {c['product_error']:.3f}, {c['product_bias']:+.3f}" for c in cells)
        lines.append(f"| {name} | {' | '.join(figures)} |")
    lines.append(f"| the paper's MSE, and product error of `prod` | {' | '.join(PAPER)} |")
    bounds = (f"{4.0**-b:.4f} to {math.sqrt(3) * math.pi / 2 * 4.0**-b:.3f}" for b in (1, 2, 3, 4))
    lines.append(f"| bounds on the MSE | {' | '.join(bounds)} |")
    return "\n".join(lines)


def cpu_sentence(result: dict[str, Any]) -> str:
    """Times of a decode step with the longest cache, and of prompts, in a paragraph."""
    tokens = max(row["tokens"] for row in result["rows"])
    rows = {row["cache"]: row for row in result["rows"] if row["tokens"] == tokens}
    others = ", ".join(f"{rows[name]['step_ms']:.0f} with `{name}`" for name in SENTENCED)
    model, _, dtype = result["model"].partition(", ")
    return (
        f"**On a CPU** a decode step of {model} in {dtype} takes {rows['full']['step_ms']:.0f} ms with the full cache "
        f"at {tokens:,} tokens, {others} ({result['hardware']['threads']} threads; [table](docs/guides/cpu.md)). "
        f"Its prompt takes {rows['best-3bit']['prefill_ratio']:.1f} times as long with `best-3bit` "
        "([more](docs/methods/spectral.md))."
    )


def cpu_table(result: dict[str, Any]) -> str:
    """Table by length of the time of a decode step, and of step and prompt relative to the full cache."""
    lengths = sorted({row["tokens"] for row in result["rows"]})
    headings = [
        f"{heading}, {count:,} tokens" for count in lengths for heading in ("step", "step / full", "prompt / full")
    ]
    lines = [f"| cache | {' | '.join(headings)} |", "|---|" + "---:|" * len(headings)]
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(result["rows"], key=lambda row: row["tokens"]):
        rows.setdefault(row["cache"], []).append(row)
    for name, cells in rows.items():
        figures = (f"{c['step_ms']:.0f} ms | {c['ratio']:.2f}x | {c['prefill_ratio']:.2f}x" for c in cells)
        lines.append(f"| {name} | {' | '.join(figures)} |")
    hardware = f"{result['hardware']['threads']} threads, {result['hardware']['cpu']}"
    where = f"{result['model']}, {hardware}, medians of {result['steps']} steps in turns, {result['date'][:10]}"
    return "\n".join([*lines, "", f"{where}; `{result['command']}`."])


def render(page: str, texts: dict[str, str]) -> str:
    """A page with the text between its markers replaced.

    Raises:
        ValueError: a marker is not there just once.
    """
    for name, text in texts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"{begin}: is needed once, with its end")
        page = page[: page.index(begin)] + f"{begin}\n{text}\n" + page[page.index(end) :]
    return page


def with_address(page: str, address: str | None) -> str:
    """A page of the repository's root whose links also work elsewhere, as on PyPI; as it is without an address."""
    if address is None:
        return page

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match[1].rpartition(".")[2] in ("png", "svg") else "blob"
        return f"]({address}/{kind}/main/{match[1]})"

    return re.sub(r"\]\((?![a-z]+:|#)([^()\s]+)\)", absolute, page)


def pages() -> dict[Path, str]:
    """The pages as they should be, by path, from the committed results."""
    (table,), (budgets,), (answers,) = (tables(read_cells(folder)) for folder in (COMPARISON, BUDGETS, TASKS))
    cpu = json.loads(CPU.read_text(encoding="utf-8"))
    texts = {
        README: {
            "headline": headline(budgets),
            "ladder": ladder(budgets),
            "cpu": cpu_sentence(cpu),
        },
        RESULTS_PAGE: {
            "lengths": lengths(budgets),
            "perplexity": perplexity(table),
            "keys": keys(answers),
        },
        PRESETS_PAGE: {"ladder": ladder(budgets), "memory": memory_table()},
        CPU_PAGE: {"cpu": cpu_table(cpu)},
        TUNING_PAGE: {"tuned": tuned_table(ROOT / "benchmarks" / "tuned"), "bytes": bytes_table()},
    }
    found = {path: render(path.read_text(encoding="utf-8"), parts) for path, parts in texts.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found[README] = with_address(found[README], project.get("urls", {}).get("Repository"))
    return found | {LOSSES: json.dumps(losses(budgets), indent=1) + "\n"}


def main() -> int:
    found = pages()
    if "--check" in sys.argv[1:]:
        return int(any(path.read_text(encoding="utf-8") != page for path, page in found.items()))
    for path, page in found.items():
        write_atomically(path, page)
    (budgets,) = tables(read_cells(BUDGETS))
    images = ROOT / "docs" / "images"
    pareto(budgets, budgets.columns[0], "packed_bits").png(images).replace(images / "pareto.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
