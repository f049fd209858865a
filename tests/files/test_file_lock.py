"""File locks: other runs wait, killed ones hold no lock, and file systems without locks get a warning."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvcache_compress.files.lock import only_one


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
