"""Cut texts of five kinds into a half to tune on and a half to compare on, and texts of six kinds that are held out.

    python benchmarks/studies/texts.py --data data --output texts

`data` holds `essays/*.txt`, LongBench's `multi_news.jsonl` and `multifieldqa_zh.jsonl` and GSM8K's `train-400.jsonl` in
their public formats. Code is the source of Python's standard library, and help texts are its docstrings, so both depend
on Python's version; the held-out texts depend on NumPy's, too.

- `texts/tune` is for `kvcache-compress tune`.
- `texts/compare` is for choices: defaults were chosen on it, and `benchmarks/comparisons/budgets.yaml` runs on it.
- `texts/held-out` takes part in no choice. `benchmarks/comparisons/held-out.yaml` measures the README's figures on it:
  code and help texts of other modules, the reference of Python's language, docstrings of NumPy, articles in Chinese,
  and the licences that every Debian system has.
- `texts/gsm8k.jsonl` has a hundred problems of GSM8K, each after eight others, in RULER's format with the length in
  characters. They are from the half to compare on.
- `texts/multi_news.jsonl` has the first nine samples of LongBench's multi_news, and of its first sixty the six that
  have 4,000 to 8,000 words.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import numpy as np
import typer

MODULES = (
    "argparse", "ast", "calendar", "codecs", "configparser", "csv", "datetime", "difflib", "doctest", "enum",
    "fractions", "ftplib", "functools", "gettext", "heapq", "imaplib", "inspect", "locale", "mailbox", "mimetypes",
    "optparse", "pathlib", "pickle", "pickletools", "platform", "random", "shutil", "smtplib", "socket", "statistics",
    "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "trace", "turtle", "typing", "zipfile",
)  # fmt: skip
"""Modules of the standard library that give code and help texts."""
OTHER_MODULES = (
    "asyncio/base_events", "asyncio/streams", "asyncio/tasks", "email/message", "email/_header_value_parser",
    "multiprocessing/managers", "multiprocessing/pool", "json/decoder", "logging/__init__", "logging/config",
    "unittest/mock", "unittest/case", "http/client", "http/server", "tkinter/__init__", "urllib/request",
    "urllib/parse", "concurrent/futures/process", "_pydecimal", "ssl", "socketserver", "tokenize", "weakref", "uuid",
    "traceback", "dis", "webbrowser", "xmlrpc/client",
)  # fmt: skip
"""Modules whose code and help texts are held out."""
SOURCES = {"essays": "essays", "news": "longbench/multi_news.jsonl", "mathematics": "gsm8k/train-400.jsonl"}


def _rows(path: Path) -> list[dict[str, Any]]:
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


def held_out(data: Path) -> dict[str, str]:
    """Each kind of text that takes part in no choice.

    Raises:
        OSError: a file is missing.
    """
    library = Path(sysconfig.get_path("stdlib"))
    modules = [(library / f"{name}.py").read_text(encoding="utf-8") for name in OTHER_MODULES]
    package = [path.read_text(encoding="utf-8") for path in sorted(Path(np.__path__[0]).glob("*/*.py"))]
    licences = [path for path in sorted(Path("/usr/share/common-licenses").iterdir()) if not path.is_symlink()]
    return {
        "code": "\n\n".join(modules[::4]),
        "help": "\n\n".join(text for index, module in enumerate(modules) if index % 4 for text in _docstrings(module)),
        "reference": "\n\n".join(topics.values()),
        "numpy": "\n\n".join(text for module in package for text in _docstrings(module)),
        "chinese": "\n\n".join(row["context"] for row in _rows(data / "longbench" / "multifieldqa_zh.jsonl")),
        "licences": "\n\n".join(path.read_text(encoding="utf-8") for path in licences),
    }


def problems(data: Path) -> Iterator[dict[str, Any]]:
    """The rows of `gsm8k.jsonl`."""
    rows = _rows(data / SOURCES["mathematics"])[1::2]
    solved = [f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows]
    for number, row in enumerate(rows[100:]):
        before = "".join(solved[(3 * number + i) % 100] for i in range(8))
        prompt = {"input": f"{before}Question: {row['question']}\n", "answer_prefix": "Answer:"}
        yield {"index": number, **prompt, "outputs": [row["answer"]], "length": len(before)}


def main(
    data: Annotated[Path, typer.Option(help="Folder of the public data.")] = Path("data"),
    output: Annotated[Path, typer.Option(help="Folder for the texts.")] = Path("texts"),
) -> None:
    for kind, parts in pieces(data).items():
        for half, name in enumerate(("tune", "compare")):
            _write(output / name / f"{kind}.txt", "\n\n".join(parts[half::2]))
    for kind, text in held_out(data).items():
        _write(output / "held-out" / f"{kind}.txt", text)
    news = _rows(data / SOURCES["news"])
    news = news[:9] + [row for row in news[9:] if 4000 <= row["length"] < 8000]
    for name, rows in (("gsm8k", problems(data)), ("multi_news", news)):
        _write(output / f"{name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    typer.echo(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    typer.run(main)
