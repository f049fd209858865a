"""File locks between processes, which the operating system releases however their owner ends."""

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
    """Hold an exclusive lock on this file within the block, and remove the file after it.

    If another process or thread holds it, a warning is logged and the call waits. Missing folders are created. On a
    file system without locks a warning is logged, and blocks are not kept apart.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with lock.open("a") as file:
            _acquire(file, lock)
            # The previous holder has removed this file, and another process may have created a new one.
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
            logger.warning("%s: another run is using this folder; waiting for it to end", lock.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError) as error:
        logger.warning("%s cannot be locked (%s): let no other run write there at the same time", lock, error)


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
