"""Keeping processes from each other's files, by a lock that the operating system takes back however its owner ends."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Waits, with a warning, until no other process or thread is in such a block with this file, and removes it after.

    Folders that are missing are made. Where the file system has no locks, a warning says so, and nothing is kept apart.

    Raises:
        OSError: the file cannot be made.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with lock.open("a") as file:
            _acquire(file, lock)
            # Whoever held it until now has removed it, and yet another may have made a new one.
            if not _is_at(file, lock):
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    lock.unlink()
            return


def _acquire(file: IO[str], lock: Path) -> None:
    try:
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("%s: another run is at work there; this one goes on when it has ended", lock.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError) as error:
        logger.warning("%s cannot be locked (%s): let no other run write there at the same time", lock, error)


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
