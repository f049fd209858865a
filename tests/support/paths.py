"""Paths of the repository that tests read, and folders that they fill."""

import atexit
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def temporary_folder(prefix: str) -> Path:
    """New folder that is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
