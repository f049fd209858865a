"""List the measured figures in the prose of README, guides and methods with their sources in `figures.yaml`.

python benchmarks/pages/figures.py

`--check` only compares the pages with `figures.yaml`, and the results' commits with the history. Figures between
markers come from result files by `readme.py`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/results.md", "docs/guides/*.md", "docs/methods/*.md")
UNITS = "ms|s|min|seconds|minutes|GB|MB|GiB|MiB|KiB|%|times|nats|tokens per second"
FIGURE = re.compile(rf"(?<![\w.-])(?:\d[\d,.]*\d|\d|\.\d+) (?:{UNITS})(?!\w)|(?<![\w.-])0?\.\d{{2,}}(?![\w.])")
OTHER = re.compile(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->|```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
"""Generated text, code and links, which are left out."""


def problems(figures: list[dict[str, str]]) -> list[str]:
    """Figures of the pages without a source, and sources of what is on no page."""
    found = []
    known: dict[str, list[str]] = {}
    for figure in figures:
        known.setdefault(figure["page"], []).append(figure["says"])
        if "source" in figure and not (ROOT / figure["source"]).exists():
            found.append(f"{figure['says']!r}: there is no {figure['source']}")
    for path in (path for pattern in PAGES for path in sorted(ROOT.glob(pattern))):
        page, whole = str(path.relative_to(ROOT)), path.read_text("utf-8")
        text = OTHER.sub(lambda other: re.sub(r"[^\n]", " ", other[0]), whole)
        spans = []
        for says in known.pop(page, []):
            start = whole.find(says)
            spans.append((start, start + len(says)))
            if start < 0:
                found.append(f"{page}: {says!r} is not there")
        for match in FIGURE.finditer(text):
            if not any(start <= match.start() < end for start, end in spans):
                found.append(f"{page}, line {text.count(chr(10), 0, match.start()) + 1}: {match[0]!r} has no source")
    return found + [f"{page}: no such page" for page in known]


def unknown_commits() -> list[str]:
    """List commits of result rows that are not in the git history; none in shallow clones."""
    if (ROOT / ".git" / "shallow").exists():
        return []
    known = {commit[:7] for commit in subprocess.check_output(["git", "rev-list", "HEAD"], cwd=ROOT, text=True).split()}
    return [
        f"{path.name}: {commit} is not in the history"
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
        for commit in {str(json.loads(line).get("commit"))[:7] for line in path.read_text("utf-8").splitlines()}
        if commit not in known
    ]


def main() -> None:
    figures = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    if "--check" in sys.argv[1:]:
        sys.exit("\n".join(problems(figures) + unknown_commits()) or None)
    for figure in figures:
        print(f"{figure['page']}: {figure['says']}\n    {figure['command']}")


if __name__ == "__main__":
    main()
