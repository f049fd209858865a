"""Text for calibrations: windows spread over files."""

from pathlib import Path
from typing import Any

import pytest
from support.models.toy_tokenizers import START, Characters

from kvcache_compress.modeling.calibration.text import read_windows


def test_windows_are_spread_over_the_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(i % 64) for i in range(600)))
    windows, _ = read_windows([str(path)], Characters(), 256, 64)  # type: ignore[arg-type]
    assert windows.shape == (4, 64)
    assert (windows[:, 0] == START).all()
    assert windows[-1, -1] == 599 % 64


def test_large_files_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files are read in blocks from beginning to end, even if cut inside multi-byte characters."""
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(0x20AC + i // 1000) for i in range(40_000)), encoding="utf-8")
    monkeypatch.setattr("kvcache_compress.modeling.calibration.text._WHOLE_BYTES", 1000)
    monkeypatch.setattr("kvcache_compress.modeling.calibration.text._BLOCK_BYTES", 500)
    seen: list[str] = []

    class Recorded(Characters):
        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            seen.append(text)
            return super().__call__(text, **options)

    windows, _ = read_windows([str(path)], Recorded(), 128, 32)  # type: ignore[arg-type]
    assert windows.shape == (4, 32)
    assert sum(len(part) for part in seen) < 1500
    assert {ord(part[0]) - 0x20AC for part in seen if part} == {0, 9, 19, 29, 39}
    assert not any("\ufffd" in part for part in seen)
    path.write_bytes(b"\xff" * 5000)
    with pytest.raises(ValueError, match="not text in UTF-8"):
        read_windows([str(path)], Characters(), 128, 32)  # type: ignore[arg-type]
