"""Overwriting existing files: regular files are replaced atomically, links followed, devices refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.saved_files import filled

from kvcache_compress.eval.provenance.results import write_json
from kvcache_compress.eval.reporting.plots import figure_file
from kvcache_compress.files.atomic import whole_file
from kvcache_compress.methods.commvq.calibration.calibrate import check_output


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
