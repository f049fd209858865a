"""Write the README's tables and plot from the committed results; `--check` only compares.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.reporting.plots import pareto
from kvcache_compress.eval.reporting.tables import MISSING, Table, tables
from kvcache_compress.eval.runner.cells import Cell, read_cells

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMPARISON = RESULTS / "smollm2"
DISTORTION = RESULTS / "distortion.json"
CPU = RESULTS / "cpu.json"
LEADING = "wikitext"

PAPER = ("0.36, 1.57", "0.117, 0.56", "0.03, 0.18", "0.009, 0.047")


def headline(table: Table) -> str:
    """Headline sentence of the README's first screen."""
    cells = _cells(table, LEADING)
    dense, bare, peer = cells["turboquant-4bit"], cells["turboquant-4bit@sinks=0,recent=0"], cells["hqq-4"]
    return (
        f"**{16 / dense.packed_bits:.1f}x less memory per compressed token at a KL divergence of {dense.score:.4f} "
        "nats per token**; the first 16 and last 64 tokens stay uncompressed. With all tokens compressed the "
        f"divergence is {bare.score:.4f}, at {bare.packed_bits:g} bits per number; Transformers' own 4-bit "
        f"`QuantizedCache` (hqq) has {peer.score:.4f} at {peer.packed_bits:g} bits ({table.model}, {_text(dense)})."
    )


def perplexity(table: Table) -> str:
    """Table of the leading benchmark, a line per cache, and the source of the figures."""
    cells = _cells(table, LEADING)
    numbers = {row.cache: row.number for row in table.rows}
    lines = [
        "| # | cache | bits, packed part | bits, whole cache | perplexity | KL | same top-1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cell in cells.items():
        scores = cell.scores
        kl = f"{scores['kl']:.4f} ± {scores['kl_stderr']:.4f}"
        bits = f"{cell.packed_bits:.2f} | {cell.all_bits:.2f}"
        lines.append(
            f"| {numbers[name]} | {name} | {bits} | {scores['perplexity']:.2f} | {kl} | {scores['top1']:.3f} |"
        )
    cell = next(iter(cells.values()))
    options = cell.benchmark["options"]
    windows = f"{cell.samples} windows of {options['prefix']} + {options['scored']} tokens"
    return "\n".join(
        [
            *lines,
            "",
            f"{table.model}, {_text(cell)}, {windows}, {options['step']} per pass, {cell.date[:10]}; from "
            f"[{COMPARISON.name}]({COMPARISON.relative_to(ROOT)}), whose files hold the commands.",
        ]
    )


def tasks(table: Table) -> str:
    """Table of all other benchmarks, a line per cache."""
    columns = [column for column in table.columns if column.name != LEADING]
    rows = [row for row in table.rows if any(column.name in row.cells for column in columns)]
    extra = [column for column in columns if column.main_score == "recall"]
    headings = ["cache", "bits, packed part", *(f"{column.name}: {column.main_score}" for column in columns)]
    headings += [f"{column.name}: logprob" for column in extra]
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
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


def render(readme: str, table: Table, distortion: dict[str, Any], cpu: dict[str, Any]) -> str:
    """The README with the text between its markers replaced."""
    texts = {
        "headline": headline(table),
        "perplexity": perplexity(table),
        "tasks": tasks(table),
        "distortion": distortion_table(distortion),
        "cpu": cpu_table(cpu),
    }
    for name, text in texts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        readme = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", readme, flags=re.DOTALL)  # noqa: B023
    return readme


def results() -> tuple[Table, dict[str, Any], dict[str, Any]]:
    """The committed results that the README shows."""
    (table,) = tables(read_cells(COMPARISON))
    distortion, cpu = (json.loads(path.read_text(encoding="utf-8")) for path in (DISTORTION, CPU))
    return table, distortion, cpu


def main() -> int:
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    table, distortion, cpu = results()
    new = render(old, table, distortion, cpu)
    if "--check" in sys.argv[1:]:
        return int(new != old)
    write_atomically(path, new)
    leading = next(column for column in table.columns if column.name == LEADING)
    images = ROOT / "docs" / "images"
    pareto(table, leading, "packed_bits").png(images).replace(images / "pareto.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
