"""Writes the README's tables from the committed results: `python benchmarks/readme.py`; `--check` only compares."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from kvcache_compress.eval.results import PerplexityResult, markdown_table

ROOT = Path(__file__).resolve().parents[1]
PERPLEXITY = ROOT / "benchmarks" / "results" / "perplexity-smollm2-wikitext2.json"
DISTORTION = ROOT / "benchmarks" / "results" / "distortion.json"


PAPER = ("0.36, 1.57", "0.117, 0.56", "0.03, 0.18", "0.009, 0.047")


def headline(result: PerplexityResult) -> str:
    """The one number of the first screen."""
    rows = {row.name: row for row in result.rows}
    ours, bare, peer = rows["turboquant-4bit"], rows["turboquant-4bit@sinks=0,recent=0"], rows["hqq-4"]
    return (
        f"**{16 / ours.packed_bits:.1f}x less memory per packed token at a KL divergence of {ours.kl:.4f} nats per "
        f"token**, with the first 16 and last 64 tokens dense; {bare.kl:.4f} with none dense, where Transformers' own "
        f"4-bit `QuantizedCache` (hqq, {peer.packed_bits:g} bits to our {bare.packed_bits:g}) has {peer.kl:.4f} "
        f"({Path(result.model).name}, {result.text})."
    )


def table(result: PerplexityResult) -> str:
    """One line per cache, and where the figures come from."""
    source = PERPLEXITY.relative_to(ROOT)
    return (
        f"{markdown_table(result)}\n{Path(result.model).name}, {result.text}, {result.windows} windows of "
        f"{result.prefix} + {result.scored} tokens, {result.step} per pass, {result.date[:10]}; "
        f"from [{source.name}]({source}), which holds the command."
    )


def distortion_table(result: dict[str, Any]) -> str:
    """Measured mean squared error of unit vectors, and error and bias of their inner products, by bits."""
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


def render(readme: str, result: PerplexityResult, distortion: dict[str, Any]) -> str:
    """The README with the text between its markers replaced."""
    texts = {"headline": headline(result), "perplexity": table(result), "distortion": distortion_table(distortion)}
    for name, text in texts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        readme = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", readme, flags=re.DOTALL)  # noqa: B023
    return readme


def results() -> tuple[PerplexityResult, dict[str, Any]]:
    """The committed results that the README shows."""
    perplexity = PerplexityResult.from_json(PERPLEXITY.read_text(encoding="utf-8"))
    return perplexity, json.loads(DISTORTION.read_text(encoding="utf-8"))


def main() -> int:
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = render(old, *results())
    if "--check" in sys.argv[1:]:
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
