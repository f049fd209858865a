"""`eval fetch`: public data from folders and from an imitated hub, what is made of it, and a network that is down."""

import hashlib
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import HfApi, constants
from support.models.fake_hub import FakeHub
from support.paths import ROOT
from typer.testing import CliRunner

from kvcache_compress.cli.evaluate.app import app
from kvcache_compress.eval.runner import fetch
from kvcache_compress.eval.runner.fetch import DATA, MADE, Data, Made, remedy
from kvcache_compress.files.text import read_yaml


def run(output: Path, *words: str) -> Any:
    return CliRunner().invoke(app, ["fetch", "--output", str(output), *words])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with small files under the names of the public data."""
    folder = tmp_path / "source"
    for name in (name for data in DATA for name in data.digests):
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
    texts = [(output / f"texts/{half}/essays.txt").read_text() for half in ("tune", "compare")]
    assert "data/essays/before.txt" in "".join(texts)
    assert "to make  codebooks/commvq-2bit.safetensors: takes minutes: kvcache-compress calibrate" in done.output
    (output / "data/wikitext-2/valid.txt").write_text("mine")
    assert "here     texts\n" in run(output, "--from", str(source)).output
    assert (output / "data/wikitext-2/valid.txt").read_text() == "mine", "nothing is replaced"


def test_rows_of_the_hub_become_the_files_byte_for_byte(hub: FakeHub) -> None:
    texts = {Path(data.name).parent.name: data.text for data in DATA if data.text is not None}
    text = "Title \n \n a line \n"
    hub.dataset = [{"text": line if line.strip() else ""} for line in text.splitlines(keepends=True)]
    assert texts["wikitext-2"]("") == text
    hub.dataset = [{"answer": "ü", "question": f"{number}", "more": 1} for number in range(500)]
    lines = texts["gsm8k"]("").splitlines()
    assert (len(lines), lines[0]) == (400, '{"question": "0", "answer": "\\u00fc"}')
    hub.dataset = {"test": [{"context": "ü", "_id": number} for number in range(200)]}
    assert texts["longbench"]("").startswith('{"context": "ü", "_id": 0}\n')
    assert texts["longbench"]("").count("\n") == 60


def test_files_are_checked_against_their_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(b"right").hexdigest()[:16]
    monkeypatch.setattr(fetch, "MADE", ())
    for text, told in (("right", "here     a\n"), ("other", "here     a: not the version")):
        monkeypatch.setattr(fetch, "DATA", (Data("a", "x on the hub", {"data/a": digest}, lambda _, text=text: text),))
        done = run(tmp_path / text)
        assert done.exit_code == 0
        assert done.output.startswith(told)


def test_a_host_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set of files asks it once, and names the way out."""
    asked = []

    def down(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "dataset_info", down)
    monkeypatch.setattr(fetch.urllib.request, "urlopen", down)
    monkeypatch.setattr(datasets, "load_dataset", down)
    done = run(tmp_path)
    assert done.exit_code == 1
    assert len(asked) == 4, "three data sets of the hub, and GitHub for all essays"
    lines = [line for line in done.output.splitlines() if line.startswith("missing")]
    assert len(lines) == len(DATA) + 1
    assert all("--from" in line for line in lines[:-1])
    assert "texts: " in lines[-1]


def test_a_command_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "DATA", ())
    monkeypatch.setattr(fetch, "MADE", (Made("a", ("a",), "kvcache-compress calibrate --text no.txt --output a"),))
    done = run(tmp_path, "--make")
    assert done.exit_code == 1
    assert "missing  a: error:" in done.output


def test_comparisons_name_only_files_that_can_be_brought() -> None:
    known = {name for data in DATA for name in data.digests} | {name for made in MADE for name in made.files}
    for path in sorted((ROOT / "benchmarks" / "comparisons").glob("*.yaml")):
        content = read_yaml(path)
        named = [model["codebooks"] for model in content["models"] if isinstance(model, dict)]
        for options in content["benchmarks"].values():
            named += [*options.get("texts", ()), *([options["data"]] if "data" in options else [])]
        assert set(named) <= known, path
    assert remedy([Path("data/wikitext-2/valid.txt")]) == "kvcache-compress eval fetch"
    assert remedy([Path("codebooks/commvq-2bit.safetensors")]) == "kvcache-compress eval fetch --make"
    assert remedy([Path("mine.txt")]) is None
