"""Examples: the commands of `examples/README.md` run, here with a small model, and pack tokens."""

import logging
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_examples
from support.models.saved_model import saved_model
from support.paths import ROOT

from kvcache_compress.methods import registry
from kvcache_compress.modeling import loading

DOCUMENTED = run_examples.documented()
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


def test_every_example_is_on_the_page() -> None:
    assert {Path(command.split()[0]) for command in DOCUMENTED} == {
        path.relative_to(ROOT) for path in (ROOT / "examples").glob("*.py")
    }


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small model in place of SmolLM2; methods and settings of logs that an example adds are gone afterwards."""
    load = loading.load_model

    def load_small(name: str, **options: Any) -> Any:
        model, tokenizer = load(saved_model(8), **options)
        tokenizer.chat_template, tokenizer.eos_token = CHAT, chr(1)
        return model, tokenizer

    monkeypatch.setattr(loading, "load_model", load_small)
    monkeypatch.setattr(registry, "_CODECS", {k: v for k, v in registry._CODECS.items() if k != "rounding"})
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("command", DOCUMENTED, ids=lambda command: Path(command.split()[0]).stem)
def test_example_packs_tokens(command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    path, *words = shlex.split(command)
    if '"--model"' in (ROOT / path).read_text(encoding="utf-8"):
        words += ["--model", saved_model(8)]
    if "long_document" in path:  # in this process
        words += ["--cache", "turboquant-4bit"]
    monkeypatch.setattr(sys, "argv", [path, *words])
    runpy.run_path(str(ROOT / path), run_name="__main__")
    printed = capfd.readouterr().out
    if "long_document" in path:
        assert re.search(r"[\d.]+ MiB", printed)
        return
    said = r"(\d+) (?:of them |of \d+ tokens |tokens |tokens of each row )packed"
    packed = re.findall(said, printed.replace(",", ""))
    assert packed
    assert all(int(count) > 0 for count in packed)
    if "chat" in path:
        fed = [int(count) for count in re.findall(r"(\d+) tokens fed", printed)]
        assert max(fed[1:]) < 0.2 * fed[0], "a later turn fed more than its own tokens"
