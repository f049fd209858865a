"""Atomic writing: other processes see either the old file or the complete new one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to, whose file replaces `path` when the block ends without an error.

    The temporary file lies beside the old one and is flushed to disk first. Links are followed, missing folders are
    created, and the old file's permissions are kept; a new file's follow the umask. A device, a pipe, or a file that is
    open as `/dev/stdout` cannot be replaced: the contents are appended to it instead.

    Raises:
        OSError: The file cannot be written; the old one is unchanged.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not is_replaceable(path):
        with tempfile.TemporaryDirectory() as folder:
            unfinished = Path(folder, "unfinished")
            yield unfinished
            with unfinished.open("rb") as source, path.open("ab") as target:
                shutil.copyfileobj(source, target)
        return
    place = path.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = place.with_name(f".{uuid4().hex}.unfinished")
    try:
        # Created here, since safetensors creates files that only their owner can read.
        unfinished.touch()
        permissions = (place if place.exists() else unfinished).stat().st_mode & 0o777
        yield unfinished
        unfinished.chmod(permissions)
        _flush_to_disk(unfinished)
        os.replace(unfinished, place)
    finally:
        unfinished.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # The file is complete; not all file systems can flush folders.
        _flush_to_disk(place.parent)


def is_replaceable(path: Path) -> bool:
    """True if a path is free or leads to a regular file, except through the open files of a process in `/proc`.

    Raises:
        OSError: Links form a circle, or a folder cannot be searched.
    """
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        regular = True
    while regular and path.is_symlink():
        folder = path.parent.resolve()
        regular = folder.parts[:2] != ("/", "proc")
        path = folder / path.readlink()
    return regular


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
