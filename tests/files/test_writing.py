"""Writing files: locks that other runs wait for; files are replaced at once, links followed, devices refused."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.saved_files import filled

from kvcache_compress.eval.provenance.results import write_json
from kvcache_compress.eval.reporting.plots import figure_file
from kvcache_compress.files.atomic import whole_file
from kvcache_compress.files.lock import only_one
from kvcache_compress.methods.commvq.calibration.calibrate import check_output


def test_one_at_a_time(tmp_path: Path) -> None:
    """Many threads run one at a time, though the lock file is removed while some wait, and one thread fails."""
    inside, most, done = 0, 0, []

    def work(number: int) -> None:
        nonlocal inside, most
        try:
            with only_one(tmp_path / "new" / ".lock"):
                inside += 1
                most = max(most, inside)
                time.sleep(0.002)
                inside -= 1
                if number == 3:
                    raise KeyError
        except KeyError:
            pass
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (most, sorted(done)) == (1, list(range(12)))
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


def write_figure(path: Path) -> None:
    with figure_file(path, 1, 1):
        pass


WRITERS: dict[str, Callable[[Path], Any]] = {
    "cache": lambda path: filled(20).save(path),
    "JSON": lambda path: write_json(path, {"a": 1}, torch.device("cpu")),
    "figure": write_figure,
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
