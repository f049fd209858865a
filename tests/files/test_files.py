"""Files: locks, replacement at once, and short errors that name users' text files and are found quickly."""

import errno
import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.saved_files import filled
from support.models.small_model import small_config

from kvcache_compress import CompressedCache, load_config
from kvcache_compress.eval.provenance.results import write_json
from kvcache_compress.eval.runner.comparison import Comparison
from kvcache_compress.eval.tasks.haystack import haystack_words
from kvcache_compress.eval.tasks.longbench.data import TASKS, load_rows
from kvcache_compress.eval.tasks.longbench.prompts import read_templates
from kvcache_compress.eval.tasks.samples import read_jsonl
from kvcache_compress.eval.tasks.scoring import read_texts
from kvcache_compress.files.atomic import whole_file
from kvcache_compress.files.lock import only_one
from kvcache_compress.files.text import parse_yaml
from kvcache_compress.methods.commvq.calibration.calibrate import check_output


def test_one_at_a_time(tmp_path: Path) -> None:
    """Many threads run one at a time, though the lock file is removed while some wait, and one thread fails."""
    inside, most = 0, 0

    def work(number: int) -> None:
        nonlocal inside, most
        with only_one(tmp_path / "new" / ".lock"):
            inside += 1
            most = max(most, inside)
            time.sleep(0.002)
            inside -= 1
            if number == 3:
                raise KeyError

    with ThreadPoolExecutor(12) as pool:
        tasks = [pool.submit(work, number) for number in range(12)]
    assert (most, [number for number, task in enumerate(tasks) if task.exception()]) == (1, [3])
    assert not list((tmp_path / "new").iterdir())


def hold(lock: Path, held: Any) -> None:
    with only_one(lock):
        held.set()
        time.sleep(100)


def test_a_killed_process_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = tmp_path / ".lock"
    fork = multiprocessing.get_context("fork")
    held = fork.Event()
    process = fork.Process(target=hold, args=(lock, held))
    process.start()
    assert held.wait(30)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert lock.exists()
    with only_one(lock):
        assert not caplog.text
    assert not lock.exists()


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with only_one(tmp_path / ".lock"), only_one(tmp_path / ".lock"):
        assert caplog.text.count("cannot be locked") == 2
    assert not list(tmp_path.iterdir())


WRITERS: dict[str, Callable[[Path], Any]] = {
    "cache": lambda path: filled(20).save(path),
    "JSON": lambda path: write_json(path, {"a": 1}, torch.device("cpu")),
}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    return WRITERS[request.param]


def test_links_are_followed(write: Callable[[Path], Any], tmp_path: Path) -> None:
    target, link, loose = tmp_path / "there" / "target", tmp_path / "link", tmp_path / "loose"
    target.parent.mkdir()
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("there/target")
    loose.symlink_to(tmp_path / "new" / "file")
    for path in (link, loose):
        write(path)
        assert path.is_symlink()
        assert path.stat().st_size > 3
    assert target.stat().st_mode & 0o777 == 0o640
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path, tmp_path / "circle", tmp_path / "pipe.safetensors"):
        with pytest.raises(OSError, match=path.name), whole_file(path):
            pytest.fail("nothing may be written")
    with pytest.raises(ValueError, match=r"output=.*device or a pipe"):
        check_output(tmp_path / "pipe.safetensors")


SIDES = "keys: {method: kivi, bits: 4}\nvalues: {method: kivi, bits: 2}\n"


YAML = {
    "brackets": ("keys: " + "[" * 1000 + "]" * 1000, "not YAML: nested too deeply"),
    "digits": (SIDES + "sink_tokens: " + "9" * 5000, "4300"),
    "a date": (SIDES + "seed: 2020-99-99", "not YAML: month must be in 1..12"),
    "a long text": (SIDES + "backend: " + "x" * 100_000, "backend='xxx"),
    "a long key": (SIDES + "x" * 1000 + ": 3", "unknown key 'xxx"),
    "many wrong": (SIDES + "layers: [" + "3, " * 4000 + "]", "and 3997 more"),
    "twice": ("keys: kivi\nvalues: kivi\nkeys: none\n", "not YAML: line 3: key 'keys' appears twice"),
    "two texts": ("keys: none\n---\nvalues: none", "not YAML: line 2: but found another document"),
    "a tag": ("keys: !!python/name:os.system\nvalues: none", "not YAML: line 1: could not determine a constructor"),
    "control": ("keys: \x00", "not YAML: unacceptable character #x0000"),
    "a list for a key": ("? [3]\n: 3\nkeys: none\nvalues: none", "not YAML: line 1: found unhashable key"),
}


def refused(call: Callable[[], Any], name: str, message: str) -> None:
    """Assert that a call quickly raises a one-line `ValueError` that begins with the file's name."""
    started = time.process_time()
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    text = str(caught.value)
    assert message in text
    assert name in text[:600]
    assert len(text) < 1500
    assert "\n" not in text
    assert time.process_time() - started < 5


@pytest.mark.parametrize("case", YAML)
def test_yaml(case: str, tmp_path: Path) -> None:
    text, message = YAML[case]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    refused(lambda: load_config(path), "mine.yaml: ", message)
    if "not YAML" in message or "twice" in message:
        refused(lambda: Comparison.read(path), "mine.yaml: ", message)
        refused(lambda: read_templates(path, [TASKS["qasper"]]), "mine.yaml", message)


def test_yaml_that_is_fine() -> None:
    """Valid YAML loads: anchors, merges with overridden keys, and the same key in two mappings."""
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *a, y: 4}\nd: [*a, *b]\n1: 2\n'1': 3\n"
    a, b = {"x": 1, "y": 2}, {"x": 3, "y": 2}
    assert parse_yaml(text, "x") == {"a": a, "b": b, "c": {"x": 1, "y": 4}, "d": [a, b], 1: 2, "1": 3}
    assert parse_yaml("", "x") is None


FILES = {
    "not UTF-8": (lambda path: path.write_bytes(b"keys: \xff\xfe"), "not text in UTF-8"),
    "UTF-16": (lambda path: path.write_text("keys: none", encoding="utf-16"), "not text in UTF-8"),
    "a folder": (lambda path: path.mkdir(), "is a folder; pass a file"),
    "nothing": (lambda path: None, "no such file"),
    "a pipe": (lambda path: os.mkfifo(path), "no such file"),
    "a loop": (lambda path: path.symlink_to(path), "no such file"),
}


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("x.yaml", load_config),
        ("x.yaml", lambda path: CompressedCache(small_config(), str(path))),
        ("x.yaml", Comparison.read),
        ("x.yaml", lambda path: read_templates(path, [TASKS["qasper"]])),
        ("x.json", lambda path: read_templates(path, [TASKS["qasper"]])),
        ("qasper.jsonl", lambda path: load_rows(path, "v1", ["qasper"])),
        ("x.txt", read_texts),
        ("x.txt", lambda path: haystack_words(path.parent, 5, 0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files(name: str, read: Callable[[Path], Any], case: str, tmp_path: Path) -> None:
    make, message = FILES[case]
    path = tmp_path / name
    make(path)
    started = time.process_time()
    with pytest.raises(ValueError, match=r".") as caught:
        read(path)
    assert time.process_time() - started < 2
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "\n" not in text
    # Readers that also take folders have their own messages for folders and missing files.
    assert message in text or "no .txt file" in text or "no file qasper.jsonl" in text


JSON = {"brackets": "[" * 100_000, "digits": '{"a": ' + "9" * 5000 + "}", "cut": '{"a": '}


@pytest.mark.parametrize("case", JSON)
def test_json(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(JSON[case])
    refused(lambda: read_jsonl(path, ()), "x.json, line 1", "not JSON: ")
    refused(lambda: read_templates(path, [TASKS["qasper"]]), "x.json", "not YAML: ")
