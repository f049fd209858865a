"""Atomic writing: other processes see either the old file or the complete new one."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to, whose file replaces `path` when the block ends without an error.

    The temporary file lies beside the old one and is flushed to disk first. Links are followed, missing folders are
    created, and the old file's permissions are kept. An `OSError` leaves what was there unchanged.
    """
    if not is_replaceable(Path(path)):
        raise OSError(f"{str(path)!r} is not a regular file and cannot be replaced; pass the name of a file")
    place = Path(path).resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = place.with_name(f".{uuid4().hex}.unfinished")
    try:
        # Created here, since safetensors creates files that only their owner can read.
        unfinished.touch()
        permissions = (place if place.exists() else unfinished).stat().st_mode & 0o777
        yield unfinished
        unfinished.chmod(permissions)
        with unfinished.open("rb") as file:
            os.fsync(file)
        os.replace(unfinished, place)
    finally:
        unfinished.unlink(missing_ok=True)


def is_replaceable(path: Path) -> bool:
    """Return True if a path is free or leads to a regular file. Raises `OSError` if links form a circle."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
