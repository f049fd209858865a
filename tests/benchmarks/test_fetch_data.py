"""The public data of the comparisons, from folders and from an imitated hub, and hosts that are down."""

from pathlib import Path

import fetch_data
import typer
from support.models.fake_hub import FakeHub
from support.paths import ROOT
from typer.testing import CliRunner

from kvcache_compress.files.text import read_yaml

script = typer.Typer()
script.command()(fetch_data.main)


def test_data_come_from_a_folder_and_replace_nothing(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "checkout"
    for name in fetch_data.FILES:
        path = source / name.removeprefix("data/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    mine = output / "data/wikitext-2/valid.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    done = CliRunner().invoke(script, ["--from", str(source), "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert done.output.count("not the version of the committed results") == len(fetch_data.FILES)
    assert mine.read_text() == "mine"
    assert (output / "data/essays/vb.txt").read_text() == "data/essays/vb.txt"


def test_rows_of_the_hub_become_the_files_byte_for_byte(hub: FakeHub) -> None:
    text = "Title \n \n a line \n"
    hub.dataset = [{"text": line if line.strip() else ""} for line in text.splitlines(keepends=True)]
    assert fetch_data.wikitext("") == text
    hub.dataset = [{"answer": "ü", "question": f"{number}", "more": 1} for number in range(500)]
    lines = fetch_data.gsm8k("").splitlines()
    assert (len(lines), lines[0]) == (400, '{"question": "0", "answer": "\\u00fc"}')
    hub.dataset = {"test": [{"context": "ü", "_id": number} for number in range(200)]}
    for name, count in (("multi_news", 60), ("multifieldqa_zh", 20)):
        lines = fetch_data.longbench(f"data/longbench/{name}.jsonl").splitlines()
        assert (len(lines), lines[0]) == (count, '{"context": "ü", "_id": 0}')


def test_comparisons_name_only_files_that_can_be_brought() -> None:
    made = {f"texts/compare/{kind}.txt" for kind in ("essays", "news", "code", "mathematics", "help")}
    held_out = ("code", "help", "reference", "numpy", "chinese", "licences")
    made |= {f"texts/held-out/{kind}.txt" for kind in held_out} | {"texts/gsm8k.jsonl"}
    for path in sorted((ROOT / "benchmarks" / "comparisons").glob("*.yaml")):
        for options in read_yaml(path)["benchmarks"].values():
            named = {*options.get("texts", ()), *([options["data"]] if "data" in options else [])}
            assert named <= {*fetch_data.FILES, *made}, path
