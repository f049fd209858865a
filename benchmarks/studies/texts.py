"""Cut texts of five kinds from public data and from Python itself, each into a half to tune on and one to compare on.

    python benchmarks/studies/texts.py --data data --output texts

`data` holds `essays/*.txt`, LongBench's `multi_news.jsonl` and GSM8K's `train-400.jsonl` in their public formats. Code
is the source of Python's standard library, and help texts are its docstrings, so both depend on Python's version.
`texts/tune` is for `kvcache-compress tune`, and `benchmarks/comparisons/budgets.yaml` compares caches on
`texts/compare`.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

MODULES = (
    "argparse", "ast", "calendar", "codecs", "configparser", "csv", "datetime", "difflib", "doctest", "enum",
    "fractions", "ftplib", "functools", "gettext", "heapq", "imaplib", "inspect", "locale", "mailbox", "mimetypes",
    "optparse", "pathlib", "pickle", "pickletools", "platform", "random", "shutil", "smtplib", "socket", "statistics",
    "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "trace", "turtle", "typing", "zipfile",
)  # fmt: skip
"""Modules of the standard library that give code and help texts."""
SOURCES = {"essays": "essays", "news": "longbench/multi_news.jsonl", "mathematics": "gsm8k/train-400.jsonl"}


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _docstrings(source: str) -> Iterator[str]:
    documented = ast.Module, ast.ClassDef, ast.FunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text


def pieces(data: Path) -> dict[str, list[str]]:
    """Pieces of each kind of text, in a fixed order.

    Raises:
        OSError: a file is missing.
    """
    library = Path(sysconfig.get_path("stdlib"))
    code = [(library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES]
    news, mathematics = (_rows(data / SOURCES[kind]) for kind in ("news", "mathematics"))
    return {
        "essays": [path.read_text(encoding="utf-8") for path in sorted((data / SOURCES["essays"]).glob("*.txt"))],
        "news": [row["context"].replace("NEWLINE_CHAR", "\n") for row in news],
        "code": code,
        "mathematics": [f"{row['question']}\n{row['answer']}" for row in mathematics],
        "help": ["\n\n".join(_docstrings(source)) for source in code],
    }


def main(
    data: Annotated[Path, typer.Option(help="Folder of the public data.")] = Path("data"),
    output: Annotated[Path, typer.Option(help="Folder for the texts.")] = Path("texts"),
) -> None:
    for kind, parts in pieces(data).items():
        for half, name in enumerate(("tune", "compare")):
            path = output / name / f"{kind}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n\n".join(parts[half::2]), encoding="utf-8")
            typer.echo(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    typer.run(main)
