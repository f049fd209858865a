"""Overwriting existing files: regular files are replaced atomically, links followed, devices kept."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import tty
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from support.files.saved_files import config, filled

from kvcache_compress import CompressedCache
from kvcache_compress.eval.provenance.results import write_atomically, write_json
from kvcache_compress.eval.reporting.drawing import save_figure
from kvcache_compress.files.atomic import whole_file
from kvcache_compress.methods.commvq.calibration.calibrate import check_output

WRITERS: dict[str, Callable[[Path], Any]] = {
    "cache": lambda path: filled(20).save(path),
    "JSON": lambda path: write_json(path, {"a": 1}, torch.device("cpu")),
    "figure": lambda path: save_figure(Figure(), path),
}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    return WRITERS[request.param]


def test_links_are_followed(write: Callable[[Path], Any], tmp_path: Path) -> None:
    """Links are followed to an existing file, whose permissions stay, and to a new one."""
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


def test_pipes_stay(write: Callable[[Path], Any], tmp_path: Path) -> None:
    pipe, content = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: content.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write(pipe)
    reader.join(20)
    assert pipe.is_fifo()
    assert len(content[0]) > 2
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_devices_stay(write: Callable[[Path], Any], tmp_path: Path) -> None:
    """A terminal behind a link is written to, not replaced; real devices are shared, so the test makes its own."""
    master, slave = os.openpty()
    tty.setraw(slave)
    written = bytearray()

    def drain() -> None:
        with contextlib.suppress(OSError):  # The terminal is gone.
            while part := os.read(master, 65536):
                written.extend(part)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    (tmp_path / "terminal").symlink_to(os.ttyname(slave))
    write(tmp_path / "terminal")
    assert (tmp_path / "terminal").is_symlink()
    assert (tmp_path / "terminal").is_char_device()
    os.close(slave)
    reader.join(20)
    os.close(master)
    assert len(written) > 2


def test_standard_output(tmp_path: Path) -> None:
    """Standard output redirected to a file is appended to: text printed before and after stays.

    The test uses its own link instead of `/dev/stdout`, which a failure would replace.
    """
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    (tmp_path / "link").symlink_to("stdout")

    def write(stream: int) -> None:
        os.dup2(stream, 1)
        os.write(1, b"before\n")
        write_atomically(tmp_path / "link", "written\n")
        os.write(1, b"after\n")

    with (tmp_path / "out").open("a") as stream:
        process = multiprocessing.get_context("fork").Process(target=write, args=(stream.fileno(),))
        process.start()
        process.join()
    assert process.exitcode == 0
    assert (tmp_path / "out").read_text() == "before\nwritten\nafter\n"


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path, tmp_path / "circle"):
        with pytest.raises(OSError, match=path.name), whole_file(path):
            pytest.fail("nothing may be written")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ValueError, match=r"output=.*device or a pipe"):
        check_output(tmp_path / "pipe.safetensors")


def test_a_folder_that_cannot_be_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be flushed, as on some network file systems, is no error."""
    flush = os.fsync

    def only_files(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError("not for folders")
        flush(handle)

    monkeypatch.setattr(os, "fsync", only_files)
    filled(20).save(tmp_path / "cache")
    assert CompressedCache.load(tmp_path / "cache", config()).get_seq_length() == 20
