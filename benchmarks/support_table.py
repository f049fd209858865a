"""Write `docs/reference/support.md` from the results of the tests; `--check` only compares.

python benchmarks/support_table.py

Needs the development requirements; every family of `tests/support/family_cases.py` runs with every method.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import transformers

from kvcache_compress.eval.provenance.results import write_atomically

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "support.md"
sys.path.append(str(ROOT / "tests"))

from support.family_cases import FAMILIES, METHODS, outcome  # noqa: E402 - found by the line above

INTRODUCTION = """# Models and operations

This table shows the model families that each method supports. `tests/modeling/test_families.py` makes a small random
model of each family (2 to 4 layers, float32) and feeds it a left-padded batch: a prompt, single steps, several tokens
at once and a chunk.

- *Yes*: tokens are packed, full-attention layers are compressed while all others stay Transformers' own, and logits
  with and without fused attention differ by less than 1e-4.
- *No*: `CompressedCache` raises an error, which the footnote quotes.
- *With a rule*: the method works if a rule gives the layers named in the footnote another method.
- *Fused*: attention reads packed tokens without decoding them; with *no* in this column each step decodes them first.
"""
OPERATIONS = """## Operations

Each of these test files runs on a small Llama for every method, with and without fused attention where it matters.
`tests/modeling/test_families.py` also tests beam search and sampling on families with several kinds of layers.
"""


def footnote(family: str, method: str) -> str:
    """Footnote with the reason why a method does not support a family, or only with a rule."""
    result = outcome(family, method)
    text = f"Refused: {result.reason.removeprefix(f'{method} for keys ')}."
    rule = FAMILIES[family].rule
    if result.support == "no" or rule is None:
        return text
    rules = " or ".join(f"`layers: [{{match: {rule['match']}, method: {one}}}]`" for one in (rule["method"], "none"))
    return f"{text} With a rule for this layer it works: {rules}."


def family_table() -> str:
    """Table with a line per family, and footnotes."""
    notes: list[str] = []
    methods = " | ".join(method.replace("_", "_<wbr>") for method in METHODS)
    lines = [f"| family | {methods} | fused | features |", "|---" * (len(METHODS) + 3) + "|"]
    for family, case in FAMILIES.items():
        cells = []
        for method in METHODS:
            support = outcome(family, method).support
            if support != "yes":
                text = footnote(family, method)
                if text not in notes:
                    notes.append(text)
                support = f"{'with a rule' if support == 'rules' else 'no'}[^{notes.index(text) + 1}]"
            cells.append(support)
        works = [outcome(family, method) for method in METHODS if outcome(family, method).support != "no"]
        fused = "–" if not works else "yes" if all(one.fused for one in works) else "no"
        lines.append(f"| {family} | {' | '.join(cells)} | {fused} | {case.about} |")
    return "\n".join([*lines, "", *(f"[^{number}]: {text}" for number, text in enumerate(notes, 1))])


def operation_table() -> str:
    """Table of the contract tests' files with their first docstring paragraphs."""
    lines = ["| operations | tests |", "|---|---|"]
    for path in sorted((ROOT / "tests" / "contract").glob("test_*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = " ".join(text.split("\n\n")[0].split())
        lines.append(f"| {first} | [{path.name}](../../{path.relative_to(ROOT).as_posix()}) |")
    return "\n".join(lines)


def render() -> str:
    """Text of the complete page."""
    source = f"Written by `python benchmarks/support_table.py` with Transformers {transformers.__version__}.\n"
    return "\n".join([INTRODUCTION, family_table(), "", source, OPERATIONS, operation_table(), ""])


def main() -> int:
    new = render()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != new)
    write_atomically(PAGE, new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
