"""Write the lists of `docs/reference/support.md` from a run of every family and method; `--check` (in CI) compares.

python tests/support/models/support_table.py

Runs the families of `tests/support/models/family_sweep.py`, and the kinds of models of
`tests/support/models/family_cases.py` with every method. Needs the development requirements.
"""

import sys
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "support.md"
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks" / "pages")]

from readme import check_or_write, render  # noqa: E402 - found by the line above

from support.models.family_cases import FAMILIES, METHODS, outcome  # noqa: E402
from support.models.family_sweep import CASES, verdict  # noqa: E402

KINDS = {
    "fused": "packed, with fused attention",
    "unfused": "packed, without fused attention",
    "refused": "refused",
    "fails": "fails with Transformers' own cache too",
    "not run": "not run",
}


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
        reason, _, attention = found.reason.partition(" (it has ")
        notes = ", ".join(filter(None, ["image" if found.images else "", attention.removesuffix(")")]))
        groups.setdefault((found.kind, reason), []).append(f"`{case}` ({notes})" if notes else f"`{case}`")
    lines, counts = [], []
    for kind, title in KINDS.items():
        reasons = {reason: names for (of, reason), names in groups.items() if of == kind}
        counts.append(f"{sum(map(len, reasons.values()))} {title}")
        for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
            heading = f"{title}: {reason}" if reason else title
            lines += [f"**{heading[0].upper()}{heading[1:]}** ({len(names)})", "", ", ".join(names) + ".", ""]
    return "\n".join([f"Of {len(CASES)} cases: {'; '.join(counts)}.", "", *lines]).rstrip()


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
    source = f"Written by `python tests/support/models/support_table.py` with Transformers {transformers.__version__}."
    return "\n".join([*lines, "", *(f"[^{number}]: {text}" for number, text in enumerate(notes, 1)), "", source])


if __name__ == "__main__":
    texts = {"families": sweep_lists(), "methods": method_table()}
    check_or_write({PAGE: render(PAGE.read_text("utf-8"), texts)})
