"""Write `docs/reference/support.md` from a run of every family and method; `--check` (in CI) only compares.

python benchmarks/pages/support_table.py

Runs the families of `tests/support/models/family_sweep.py`, and the kinds of models of
`tests/support/models/family_cases.py` with every method. Needs the development requirements.
"""

import sys

import transformers
from readme import ROOT, check_or_write

PAGE = ROOT / "docs" / "reference" / "support.md"
sys.path.append(str(ROOT / "tests"))

from support.models.family_cases import FAMILIES, METHODS, outcome  # noqa: E402 - found by the line above
from support.models.family_sweep import CASES, verdict  # noqa: E402

KINDS = {
    "fused": "packed, with fused attention",
    "unfused": "packed, without fused attention",
    "refused": "refused",
    "fails": "fails with Transformers' own cache too",
    "not run": "not run",
}

INTRODUCTION = """# Models and operations

How compressed caches work with every causal and image-text model family of Transformers.
`benchmarks/pages/support_table.py` shrinks each family to a few small random layers and generates from a left-padded
batch of text or, where the list says *(image)*, from an image and text.

- *Packed*: without compression, logits equal those with Transformers' own cache bit for bit; with TurboQuant at 6 bits,
  tokens are packed.
- *With fused attention*: attention reads packed tokens; logits differ by less than 1e-5.
- *Without fused attention*: each step decodes the packed tokens first, for the reason given.
- *Refused*: `CompressedCache` raises a `ValueError` with the reason given.

Names are the `model_type` of Transformers; a change to the family's default config may follow.
Call MPT's `generate` with `use_cache=True`, and load BERT and similar models with `is_decoder=True`.
"""
METHODS_TEXT = """## Methods

Find the row whose attention is like your model's. Every method runs on each kind with a left-padded batch: a prompt,
single steps, several tokens at once and a chunk.

- *Yes*: tokens are packed in full-attention layers, and logits with and without fused attention differ by less than
  1e-4.
- *No*: `CompressedCache` raises the error in the footnote.
- *With a rule*: it works if a rule gives the named layers another method.
- *Fused*: attention reads packed tokens without decoding them.
"""
OPERATIONS = """## Operations

`tests/contract` runs every cache operation on a small Llama for every method, with and without fused attention where it
matters: prompts, chunks, steps and left padding; reordering, repeating and selecting rows; crop and drafts; all modes
of `generate`; gradients; reset, copies and moves between devices; saving and loading; and static capacity.
"""


def footnote(family: str, method: str) -> str:
    """The reason why a method does not support a family, or only with a rule."""
    result = outcome(family, method)
    text = f"Refused: {result.reason.removeprefix(f'{method} for keys ')}."
    rule = FAMILIES[family].rule
    if result.support == "no" or rule is None:
        return text
    rules = " or ".join(f"`layers: [{{match: {rule['match']}, method: {one}}}]`" for one in (rule["method"], "none"))
    return f"{text} With a rule for this layer it works: {rules}."


def sweep_lists() -> str:
    """Lists of families, grouped by result and reason, each with its count."""
    groups: dict[tuple[str, str], list[str]] = {}
    for case in CASES:
        found = verdict(case)
        name = f"`{case}` (image)" if found.images else f"`{case}`"
        groups.setdefault((found.kind, found.reason), []).append(name)
    lines, counts = [], []
    for kind, title in KINDS.items():
        reasons = {reason: names for (of, reason), names in groups.items() if of == kind}
        counts.append(f"{sum(map(len, reasons.values()))} {title}")
        for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
            heading = f"{title}: {reason}" if reason else title
            lines += [f"**{heading[0].upper()}{heading[1:]}** ({len(names)})", "", ", ".join(names) + ".", ""]
    return "\n".join([f"## Families\n\nOf {len(CASES)} cases: {'; '.join(counts)}.", "", *lines])


def method_table() -> str:
    """Table with a line per kind of model, and footnotes."""
    notes: list[str] = []
    methods = " | ".join(method.replace("_", "_<wbr>") for method in METHODS)
    lines = [f"| kind of model | {methods} | fused | features |", "|---" * (len(METHODS) + 3) + "|"]
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


def render() -> str:
    source = f"Written by `python benchmarks/pages/support_table.py` with Transformers {transformers.__version__}.\n"
    return "\n".join([INTRODUCTION, sweep_lists(), METHODS_TEXT, method_table(), "", source, OPERATIONS])


if __name__ == "__main__":
    check_or_write({PAGE: render()})
