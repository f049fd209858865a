"""`eval fetch`: public data from folders and from an imitated hub, what is made of them, and a network that is down."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import HfApi, constants
from support.models.fake_hub import FakeHub
from support.paths import ROOT
from typer.testing import CliRunner

from kvcache_compress.eval.cli import fetch
from kvcache_compress.eval.cli.app import app
from kvcache_compress.eval.cli.fetch import ITEMS, Item, remedy
from kvcache_compress.files.text import read_yaml

WIKITEXT, NEWS, GSM8K = (
    next(item for item in ITEMS if part in item.name) for part in ("wikitext", "longbench", "gsm8k")
)


def run(output: Path, *words: str) -> Any:
    return CliRunner().invoke(app, ["fetch", "--output", str(output), *words])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with small files under the names of the public data."""
    folder = tmp_path / "source"
    for item in ITEMS:
        for name in item.files if item.command is None else ():
            path = folder / name.removeprefix("data/")
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = {"gsm8k": {"question": "q", "answer": "a"}, "longbench": {"context": "c"}}
            row = next((row for part, row in rows.items() if part in name), None)
            path.write_text(name if row is None else json.dumps(row), encoding="utf-8")
    return folder


def test_data_come_from_a_folder_and_texts_are_made(source: Path, tmp_path: Path, offline: None) -> None:
    output = tmp_path / "checkout"
    output.mkdir()
    (output / "benchmarks").symlink_to(ROOT / "benchmarks")
    done = run(output, "--from", str(source))
    assert done.exit_code == 0, done.output
    assert done.output.count("not the version of the committed results") == 5
    assert (output / "data/wikitext-2/valid.txt").read_text() == "data/wikitext-2/valid.txt"
    assert (
        "data/essays/before.txt"
        in (output / "texts/tune/essays.txt").read_text() + (output / "texts/compare/essays.txt").read_text()
    )
    assert "to make  codebooks/commvq-2bit.safetensors, minutes: kvcache-compress calibrate" in done.output
    (output / "data/wikitext-2/valid.txt").write_text("mine")
    again = run(output, "--from", str(source))
    assert "here     texts" in again.output
    assert (output / "data/wikitext-2/valid.txt").read_text() == "mine", "nothing is replaced"


def test_texts_are_as_the_committed_results_had_them(tmp_path: Path, hub: FakeHub) -> None:
    """The rows of the hub's data sets become the files, byte for byte."""
    text = "Title \n \n a line \n"
    hub.dataset = [{"text": line if line.strip() else ""} for line in text.splitlines(keepends=True)]
    assert WIKITEXT.text is not None
    assert WIKITEXT.text("") == text
    hub.dataset = [{"answer": "ü", "question": f"{number}", "more": 1} for number in range(500)]
    assert GSM8K.text is not None
    lines = GSM8K.text("").splitlines()
    assert (len(lines), lines[0]) == (400, '{"question": "0", "answer": "\\u00fc"}')
    hub.dataset = {"test": [{"context": "ü", "_id": number} for number in range(200)]}
    assert NEWS.text is not None
    assert NEWS.text("").startswith('{"context": "ü", "_id": 0}\n')
    assert NEWS.text("").count("\n") == 60


def test_files_are_checked_against_their_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(b"right").hexdigest()[:16]

    def texts(good: str) -> Callable[[str], str]:
        return lambda name: good

    for text, told in (("right", "here     data/a"), ("other", "here     data/a, not the version")):
        monkeypatch.setattr(fetch, "ITEMS", (Item({"data/a": digest}, "x on the hub", texts(text)),))
        done = run(tmp_path / text)
        assert done.exit_code == 0
        assert done.output.startswith(told)


def test_a_host_that_is_down_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def down(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise ConnectionError("ConnectError: Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "dataset_info", down)
    monkeypatch.setattr(fetch.urllib.request, "urlopen", down)
    monkeypatch.setattr(datasets, "load_dataset", down)
    began = time.monotonic()
    done = run(tmp_path)
    assert time.monotonic() - began < 5
    assert done.exit_code == 1
    assert len(asked) == 2, "the hub and GitHub"
    lines = [line for line in done.output.splitlines() if line.startswith("missing")]
    assert len(lines) == 6
    assert all("--from" in line for line in lines[:5])
    assert "hub is unreachable" in lines[0]
    assert "texts: needs data/essays/worked.txt" in lines[5]


def test_a_made_item_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Item(
        {"codebooks/a.safetensors": ""}, command="kvcache-compress calibrate --text no.txt --output x.safetensors"
    )
    monkeypatch.setattr(fetch, "ITEMS", (wrong,))
    done = run(tmp_path, "--make")
    assert done.exit_code == 1
    assert "missing  codebooks/a.safetensors: error:" in done.output


def test_comparisons_name_only_files_that_can_be_brought() -> None:
    """All files of the committed comparisons are known, and named where they are missing."""
    known = {name for item in ITEMS for name in item.files}
    for path in sorted((ROOT / "benchmarks" / "comparisons").glob("*.yaml")):
        content = read_yaml(path)
        named = [model["codebooks"] for model in content["models"] if isinstance(model, dict)]
        for options in content["benchmarks"].values():
            named += [*options.get("texts", ()), *([options["data"]] if "data" in options else [])]
        assert set(named) <= known, path
    assert remedy([Path("data/wikitext-2/valid.txt")]) == "kvcache-compress eval fetch"
    assert remedy([Path("codebooks/commvq-2bit.safetensors")]) == "kvcache-compress eval fetch --make"
    assert remedy([Path("mine.txt")]) is None
