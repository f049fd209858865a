"""Write the tables and the plot of the README and the pages from the committed results; `--check` only compares.

python benchmarks/readme.py
"""

import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcache_compress.cache.estimate import BF16_BYTES, MODELS, packed_bits, total_bytes
from kvcache_compress.config import BUDGETS as BUDGET_NAMES
from kvcache_compress.config import load_config, preset_names
from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.reporting.plots import plot_pareto
from kvcache_compress.eval.reporting.report import markdown_table
from kvcache_compress.eval.reporting.tables import MISSING, Table, bits_text, tables
from kvcache_compress.eval.runner.table import Cell, read_cells
from kvcache_compress.eval.tuning.tune import Budget
from kvcache_compress.validation import parse_size, size_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TUNED = ROOT / "benchmarks" / "comparisons" / "tuned"
LOSSES = ROOT / "configs" / "measured.json"
LEADING = "wikitext"
LADDER = {
    "hqq-4": "to compare: Transformers' `QuantizedCache`",
    "quanto-4": "to compare: the same with quanto",
    "kivi-4bit@sinks=16,recent=64": "to compare: the usual baseline",
    "turboquant-4bit": "speed on a GPU",
    "best-4bit": "no visible loss",
    "best-3bit": "the best trade-off",
    "best-2bit": "half the size of `best-4bit`",
    "best-1.5bit": "the smallest without calibration",
    "tuned-1.4": "the smallest, tuned for the model",
}
"""Caches of the README's first table, and what each is good for."""
BYTES = (
    ("smollm2-135m", 4, "8K", ("200MB", "100MB", "75MB")),
    ("llama-3.1-8b", 4, "128K", ("16GB", "10GB", "8GB", "6GB")),
)
"""Models, sequences, tokens of each sequence, and budgets on the page about tuning."""
SENTENCED = ("best-3bit", "turboquant-4bit", "kivi-4bit", "hqq-4", "quanto-4")
"""Caches whose decode step on a CPU is in the README's sentence."""
LLAMA, CONTEXTS = "llama-3.1-8b", ("8K", "32K", "128K")
SIZED = ("best-4bit", "best-3bit", "best-2bit", "best-1.5bit", "turboquant-4bit", "turboquant-2bit", "kivi-4bit")
"""Presets and contexts on the page about presets."""


def table_of(name: str) -> Table:
    return tables(read_cells(RESULTS / f"{name}.jsonl"))[0]


def source(name: str) -> str:
    return f"[{name}.jsonl](../benchmarks/results/{name}.jsonl), which holds the commands"


def cells_of(table: Table, benchmark: str) -> dict[str, Cell]:
    return {row.cache: row.cells[benchmark] for row in table.rows if benchmark in row.cells}


def figure(cell: Cell | None, text: Callable[[dict[str, float]], str]) -> str:
    """A figure computed from a cell's scores."""
    return MISSING if cell is None else "failed" if cell.error is not None else text(cell.scores)


def mean_kl(scores: dict[str, float]) -> str:
    return f"{scores['kl']:.4f} ± {scores['kl_stderr']:.4f}"


def losses_of(cell: Cell | None) -> list[str]:
    return [figure(cell, mean_kl), figure(cell, lambda scores: f"{scores['kl_999']:.3f}")]


def llama_sizes(context: str) -> dict[str, float]:
    """Bytes of Llama-3.1-8B's cache by preset; the full cache has the key ''."""
    layers, _, heads, dim = MODELS[LLAMA]
    tokens = parse_size(context, "context")
    full = {"": 2 * BF16_BYTES * layers * heads * dim * tokens}
    return full | {name: total_bytes(load_config(name), layers, heads, dim, tokens) for name in SIZED}


def headline(budgets: Table) -> str:
    """The sentences on the README's first screen."""
    size = {name: f"{size / 2**30:.{2 if name else 0}f}" for name, size in llama_sizes("128K").items()}
    kl = {name: f"{cell.score:.4f}" for name, cell in cells_of(budgets, "1k").items()}
    return (
        f"At 128K tokens the key/value cache of Llama-3.1-8B takes {size['']} GiB in bfloat16, more than its "
        f"weights, and every decode step reads all of it; `best-3bit` keeps it in {size['best-3bit']} GiB "
        f"and `best-2bit` in {size['best-2bit']}. The loss of `best-3bit`, measured on SmolLM2-135M-Instruct (4-bit "
        f"GGUF weights) over six kinds of text, is a KL divergence of {kl['best-3bit']} nats per token, "
        f"against {kl['hqq-4']} for Transformers' own 4-bit cache (hqq)."
    )


def ladder(budgets: Table) -> str:
    """Table of a few caches and what each is good for."""
    cells = cells_of(budgets, "1k")
    lines = [
        [name.partition("@")[0], bits_text(cells[name].packed_bits), *losses_of(cells[name]), purpose]
        for name, purpose in LADDER.items()
    ]
    text = markdown_table(["cache", "bits", "KL", "99.9 %", "take it for"], lines, (0, -1))
    return (
        f"{text}\n\nSmolLM2-135M-Instruct, prompts of "
        f"{cells['hqq-4'].benchmark['options']['prefix']:,} tokens of six kinds of text; 16 sinks and 64 recent tokens "
        "stay dense, except in Transformers' own caches. A preset's name counts the bits of codes alone."
    )


def perplexity(table: Table) -> str:
    """Table of all presets on one text, and the source of the figures."""
    cells = cells_of(table, LEADING)
    lines = []
    for name, cell in cells.items():
        scores = cell.scores
        bits = bits_text(cell.packed_bits), bits_text(cell.all_bits)
        lines.append([name, *bits, f"{scores['perplexity']:.2f}", mean_kl(scores), f"{scores['top1']:.3f}"])
    cell = cells["full"]
    options = cell.benchmark["options"]
    heads = ["cache", "bits, packed part", "bits, whole cache", "perplexity", "KL", "same top-1"]
    return (
        f"{markdown_table(heads, lines)}\n\n{table.model}, {options['texts'][0]}, {cell.samples} windows of "
        f"{options['prefix']} + {options['scored']} tokens, {options['step']} per pass, {cell.date[:10]}; from "
        f"{source('smollm2')}."
    )


def keys(table: Table) -> str:
    """Table of log-probabilities of the right answers, and their mean differences from the full cache's."""

    def answers(cell: Cell, full: Cell) -> str:
        text = f"{cell.scores['logprob']:.3f}"
        if cell is full:
            return text
        before = {record["id"]: record["logprob"] for record in full.records}
        changes = [record["logprob"] - before[record["id"]] for record in cell.records]
        error = statistics.stdev(changes) / math.sqrt(len(changes))
        return f"{text} ({statistics.fmean(changes):+.3f} ± {error:.3f})"

    names = [column.name for column in table.columns]
    lines = [
        [
            row.cache,
            bits_text(row.packed_bits),
            *(answers(row.cells[name], table.rows[0].cells[name]) for name in names),
        ]
        for row in table.rows
    ]
    return f"{markdown_table(['cache', 'bits', *names], lines)}\n\n{table.model}; from {source('tasks')}."


def lengths(budgets: Table) -> str:
    """Table of caches over several texts together, with a group of columns for each length."""
    names = [column.name for column in budgets.columns]
    lines = []
    for row in budgets.rows[1:]:
        figures = [text for name in names for text in losses_of(row.cells.get(name))]
        top1 = statistics.fmean(cell.scores["top1"] for cell in row.cells.values())
        lines.append([row.cache, bits_text(row.packed_bits), *figures, f"{top1:.3f}"])
    heads = ["cache", "bits", *(f"{name}: {what}" for name in names for what in ("KL", "99.9 %")), "same top-1"]
    windows = []
    for name in names:
        cell = budgets.rows[0].cells[name]
        options = cell.benchmark["options"]
        windows.append(f"{name} {cell.samples} windows of {options['prefix']:,} + {options['scored']} tokens")
    return (
        f"{markdown_table(heads, lines)}\n\n{budgets.model}; {', '.join(windows)}, of {len(options['texts'])} texts "
        f"alike; from {source('budgets')}."
    )


def turns(table: Table) -> str:
    """Table of losses after histories of several parts; the mean is over the cases of the benchmark `turns`."""

    def loss(case: str) -> Callable[[dict[str, float]], str]:
        return lambda scores: f"{scores[f'kl.{case}']:.4f}"

    full = table.rows[0].cells
    names = [name for name in ("turns", "steps") if name in full]
    cases = [(name, case) for name in names for case in full[name].benchmark["options"]["cases"]]
    lines = [
        [
            row.cache,
            bits_text(row.cells["turns"].all_bits),
            figure(row.cells["turns"], mean_kl),
            *(figure(row.cells.get(name), loss(case)) for name, case in cases),
        ]
        for row in table.rows[1:]
    ]
    heads = ["cache", "bits, whole cache", "KL", *(case for _, case in cases)]
    return f"{markdown_table(heads, lines)}\n\n{table.model}; from {source('turns')}."


def losses(budgets: Table) -> dict[str, dict[str, float]]:
    """Losses of presets by falling bits, from which `kvcache-compress presets` makes its recommendation."""
    names = {*BUDGET_NAMES, *preset_names()}
    rows = sorted((row for row in budgets.rows if row.cache in names), key=lambda row: -(row.packed_bits or 0))
    rows.sort(key=lambda row: row.cache not in BUDGET_NAMES)
    scores = {row.cache: row.cells[budgets.columns[0].name].scores for row in rows}
    return {name: {key: float(f"{of[key]:.4g}") for key in ("kl", "kl_999")} for name, of in scores.items()}


def tuned_table() -> str:
    """Table of losses from the headers of tuned configs: tuned, and the best with equal bits."""
    lines = []
    for path in sorted(TUNED.glob("*.yaml"), key=lambda path: -float(path.stem.rpartition("-")[2])):
        figures = re.findall(r": ([\d.]+) bits .*?, KL ([\d.]+ ± [\d.]+) \(99.9 %: ([\d.]+)\)", path.read_text("utf-8"))
        lines.append([path.stem.rpartition("-")[2], *(x for row in figures for x in row)])
    heads = ["budget", "tuned: bits", "KL", "99.9 %", "equal bits: bits", "KL", "99.9 %"]
    return markdown_table(heads, lines)


def bytes_table() -> str:
    """Table of the bits that budgets in bytes leave for a packed number, and of the best preset within each budget."""
    lines = []
    base = load_config("best-2bit")
    for model, batch, context, budgets in BYTES:
        shape, tokens = MODELS[model], parse_size(context, "context")
        sizes = shape.layers, shape.kv_heads, shape.head_dim
        full = size_text(2 * BF16_BYTES * math.prod(sizes) * tokens * batch)
        for given in budgets:
            memory = parse_size(given, "memory")
            spare = 8 * Budget(shape, None, memory, tokens, batch).spare(base) / (2 * shape.head_dim * shape.layers)
            bits = packed_bits(base, shape.head_dim, shape.layers, shape.kv_heads) + spare
            fitting = (name for name in BUDGET_NAMES if total_bytes(load_config(name), *sizes, tokens, batch) <= memory)
            preset = next((f"`{name}`" for name in fitting), "none: tune")
            lines.append([model, f"{batch} x {context}", full, given, f"{bits:.2f}", preset])
    heads = ["model", "contexts", "bfloat16", "budget", "bits per packed number", "preset"]
    return markdown_table(heads, lines, (0, 1, -1))


def memory_table() -> str:
    """Table of one model's estimated cache sizes, by preset and context."""
    sizes = [llama_sizes(context) for context in CONTEXTS]
    lines = [[f"`{name}`" if name else "bfloat16", *(size_text(of[name]) for of in sizes)] for name in sizes[0]]
    return markdown_table([LLAMA, *CONTEXTS], lines)


def cpu_sentence(result: dict[str, Any]) -> str:
    """Paragraph on times of a decode step at the longest context, and of prefill."""
    tokens = max(row["tokens"] for row in result["rows"])
    rows = {row["cache"]: row for row in result["rows"] if row["tokens"] == tokens}
    others = ", ".join(f"{rows[name]['step_ms']:.0f} with `{name}`" for name in SENTENCED)
    model, _, dtype = result["model"].partition(", ")
    return (
        f"**On a CPU** a decode step of {model} in {dtype} takes {rows['full']['step_ms']:.0f} ms with the full cache "
        f"at {tokens:,} tokens, {others} ({result['hardware']['threads']} threads; [table](docs/guides/cpu.md)). "
        f"Prefill takes {rows['best-3bit']['prefill_ratio']:.1f} times as long with `best-3bit` "
        "([more](docs/methods/spectral.md))."
    )


def cpu_table(result: dict[str, Any]) -> str:
    """Table of the time of a decode step, and of step and prompt relative to the full cache, by length."""
    counts = sorted({row["tokens"] for row in result["rows"]})
    rows: dict[str, list[str]] = {}
    for row in sorted(result["rows"], key=lambda row: row["tokens"]):
        times = f"{row['step_ms']:.0f} ms", f"{row['ratio']:.2f}x", f"{row['prefill_ratio']:.2f}x"
        rows.setdefault(row["cache"], []).extend(times)
    heads = [f"{head}, {count:,} tokens" for count in counts for head in ("step", "step / full", "prompt / full")]
    hardware = f"{result['hardware']['threads']} threads, {result['hardware']['cpu']}"
    where = f"{result['model']}, {hardware}, medians of {result['steps']} interleaved steps, {result['date'][:10]}"
    table = markdown_table(["cache", *heads], ([name, *times] for name, times in rows.items()))
    return f"{table}\n\n{where}; `{result['command']}`."


def render(page: str, texts: dict[str, str]) -> str:
    """The page with new text between its markers; raises ValueError unless each marker is there exactly once."""
    for name, text in texts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page must have the marker {begin} and its end exactly once")
        page = page[: page.index(begin)] + f"{begin}\n{text}\n" + page[page.index(end) :]
    return page


def pages() -> dict[Path, str]:
    """The pages by path, as the committed results have them."""
    table, budgets, answers, parts = map(table_of, ("smollm2", "budgets", "tasks", "turns"))
    cpu = json.loads((RESULTS / "cpu.json").read_text("utf-8"))
    texts = {
        "README.md": {"headline": headline(budgets), "ladder": ladder(budgets), "cpu": cpu_sentence(cpu)},
        "docs/results.md": {
            "lengths": lengths(budgets),
            "turns": turns(parts),
            "perplexity": perplexity(table),
            "keys": keys(answers),
        },
        "docs/guides/presets.md": {"memory": memory_table()},
        "docs/guides/cpu.md": {"cpu": cpu_table(cpu)},
        "docs/guides/tune.md": {"tuned": tuned_table(), "bytes": bytes_table()},
    }
    found = {ROOT / path: render((ROOT / path).read_text("utf-8"), parts) for path, parts in texts.items()}
    return found | {LOSSES: json.dumps(losses(budgets), indent=1) + "\n"}


def check_or_write(found: dict[Path, str]) -> None:
    """Write pages or, with `--check`, exit with a message if they differ."""
    if "--check" not in sys.argv[1:]:
        for path, page in found.items():
            write_atomically(path, page)
    elif wrong := [str(path.relative_to(ROOT)) for path, page in found.items() if path.read_text("utf-8") != page]:
        sys.exit(f"not as the results have them; run python benchmarks/{Path(sys.argv[0]).name}: {', '.join(wrong)}")


def main() -> None:
    check_or_write(pages())
    if "--check" not in sys.argv[1:]:
        budgets = table_of("budgets")
        plot_pareto(budgets, budgets.columns[0], ROOT / "docs" / "images" / "pareto.png")


if __name__ == "__main__":
    main()
