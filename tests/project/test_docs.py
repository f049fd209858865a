"""Documentation: its site builds without a broken link or a request elsewhere, and what its pages show runs."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from support.files.commvq_files import random_codebooks
from support.files.spectral_files import random_statistics
from support.models.saved_model import saved_model
from support.paths import ROOT

from kvcache_compress import CompressedCache, disable_fused_attention
from kvcache_compress.cli import app
from kvcache_compress.cli.evaluate.app import app as evaluations
from kvcache_compress.config import load_config
from kvcache_compress.methods.commvq.codebook_file import write_codebooks
from kvcache_compress.methods.spectral.statistics_file import write_statistics
from kvcache_compress.modeling.loading import load_model

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
ROOMS = ("kvcache_compress", "eval", "cpu_kernels", "triton_kernels")
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
SHORTENED = CHAT.replace("message.content }}", "message.content if message.role != 'assistant' else '...' }}")
"""A chat template that writes earlier answers differently from how they were generated, as those of reasoners do."""
NOT_RUN = {"docs/guides/clients.md": ["needs the hub"] * 2}
"""Snippets of pages that are not run, and why: lm-eval's tasks download their data."""


def snippets(page: str, language: str) -> list[str]:
    """Code blocks of a page, without those that say that they are not run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- not run here: [^>]+-->\n```.*?```", "", text, flags=re.DOTALL)
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in strict mode."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_asks_no_other_host(built: Path) -> None:
    pages = list(built.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r'\ssrc="https?:[^"]*"|<link[^>]*stylesheet[^>]*https?:[^>]*>', text), path
        assert 'class="mermaid"' not in text, "its script would come from another host"


def test_links_within_the_site_lead_somewhere(built: Path) -> None:
    """Also in pages made from docstrings, which mkdocs does not check, and to headings."""
    ids: dict[Path, set[str]] = {}
    for path in built.rglob("*.html"):
        ids[path] = set(re.findall(r'\s(?:id|name)="([^"]+)"', path.read_text(encoding="utf-8")))
    for path in ids:
        if path.name == "404.html":
            continue
        for target in re.findall(r'\shref="([^"]*)"', path.read_text(encoding="utf-8")):
            if re.match("[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            to = (path.parent / file).resolve() if file else path
            to = to / "index.html" if to.is_dir() else to
            assert to.exists(), f"{path.relative_to(built)}: {target}"
            assert not anchor or anchor in ids[to], f"{path.relative_to(built)}: {target}"


def test_reference_holds_the_public_names(built: Path) -> None:
    import kvcache_compress

    text = "".join(path.read_text(encoding="utf-8") for path in (built / "reference").glob("*.html"))
    for name in kvcache_compress.__all__:
        assert re.search(rf'id="kvcache_compress\.(?:[\w.]+\.)?{name}"', text), name
    for command in ("tune", "eval compare", "eval report"):
        assert f"<code>kvcache-compress {command}</code>" in text


def test_links_to_files_outside_of_the_site() -> None:
    """They become pages or, once the project has an address, absolute; until then they are plain text."""
    pytest.importorskip("mkdocs")
    from mkdocs.exceptions import PluginError

    rewrite = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["with_site_links"]
    page = ("docs/guides/cpu.md", "guides/cpu.md")
    text = "[a](../../CONTRIBUTING.md#rules) [b](../results.md) [c](../../LICENSE) [d](https://e.org) [`e[0]`](#f)"
    plain = "[a](../dev/contributing.md#rules) [b](../results.md) c [d](https://e.org) [`e[0]`](#f)"
    assert rewrite(text, *page, None) == plain
    address = "https://host.org/project"
    assert rewrite(text, *page, address) == plain.replace(" c ", f" [c]({address}/blob/main/LICENSE) ")
    assert rewrite(f"[x]({address}/blob/main/docs/results.md)", *page, address) == "[x](../results.md)"
    fenced = "```python\nx[0](../nowhere)\n```\n"
    assert rewrite(fenced, *page, None) == fenced
    with pytest.raises(PluginError, match="nowhere"):
        rewrite("[x](../nowhere.md)", *page, None)


def write_files(folder: Path, config: Any) -> None:
    """Write the files that pages name."""
    for name in ("model.safetensors", "codebooks.safetensors"):
        write_codebooks(folder / name, config, random_codebooks(config, 1, (3, 16), (5, 16)))
    path = str(folder / "statistics.safetensors")
    write_statistics(path, config, random_statistics(config), 32, {})
    yaml = "keys: {method: spectral, bits: 2}\nvalues: {method: turboquant, bits: 2}\n"
    (folder / "my.yaml").write_text(yaml, encoding="utf-8")


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A small model and its tokenizer, in a folder with the files that pages name."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load_model(saved_model())
    model.config.max_position_embeddings = 16_384
    tokenizer.chat_template = CHAT
    write_files(tmp_path, model.config)
    yield {"model": model, "tokenizer": tokenizer}
    disable_fused_attention(model)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder with files for SmolLM2, and the model and its tokenizer."""
    folder = tmp_path_factory.mktemp("pages")
    model, tokenizer = load_model("smollm2-135m")
    write_files(folder, model.config)
    return folder, model, tokenizer


@pytest.fixture
def real_scope(real: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    folder, model, tokenizer = real
    monkeypatch.chdir(folder)
    yield {"model": model, "tokenizer": tokenizer}
    disable_fused_attention(model)


def test_what_is_not_run_has_a_reason() -> None:
    marks = {page: re.findall("<!-- not run here: ([^>]+) -->", (ROOT / page).read_text("utf-8")) for page in PAGES}
    assert {page: reasons for page, reasons in marks.items() if reasons} == NOT_RUN


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # all versions know this name
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "python")])
def test_python_runs(page: str, scope: dict[str, Any]) -> None:
    run_page(page, scope)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "python")])
def test_python_runs_on_the_real_model(page: str, real_scope: dict[str, Any]) -> None:
    run_page(page, real_scope)


def run_page(page: str, scope: dict[str, Any]) -> None:
    """Run the blocks of a page in order; caches that they fill have packed tokens."""
    torch.manual_seed(0)
    filled = []
    for code in snippets(page, "python"):
        exec(compile(code, page, "exec"), scope)
        if "generate(" in code:
            filled.append(scope["compression"].last_cache if "compression" in code else scope["cache"])
    assert all(cache.packed_tokens > 0 for cache in filled)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_the_chat_takes_back_what_its_template_changed(scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    removed, crop = [], CompressedCache.crop

    def counted(cache: CompressedCache, tokens: int) -> None:
        removed.append(-tokens)
        crop(cache, tokens)

    monkeypatch.setattr(CompressedCache, "crop", counted)
    scope["tokenizer"].chat_template = SHORTENED
    exec(snippets("docs/guides/chat.md", "python")[0], scope)
    assert len(removed) == 1
    assert 0 < removed[0] <= 40
    assert scope["cache"].packed_tokens > 0
    assert scope["cache"].get_seq_length() == scope["held"].shape[1] - 1


def test_messages_that_are_explained_exist() -> None:
    """Each part of a message between its dots is in the source, whose string literals may be split over lines."""
    source = "".join(path.read_text(encoding="utf-8") for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    table = (ROOT / "docs/guides/troubleshoot.md").read_text(encoding="utf-8").split("| message |")[1].split("\n\n")[0]
    messages = re.findall(r"^\| `([^`]+)`", table, flags=re.MULTILINE)
    assert len(messages) > 8
    for message in messages:
        for part in re.split(r"\s*\.\.\.\s*|=\"triton\"", message):
            assert part in joined, message


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "yaml")])
def test_yaml_is_a_configuration_or_a_comparison(page: str, tmp_path: Path) -> None:
    from kvcache_compress.eval.runner.comparison import Comparison

    for number, text in enumerate(snippets(page, "yaml")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        if "benchmarks:" in text:
            assert Comparison.read(path).suite()
        else:
            assert load_config(path)


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md", *PAGES])
def test_commands_have_the_options_that_are_shown(page: str) -> None:
    """Each command line is parsed, not run."""
    for block in snippets(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["kvcache-compress"]:
                _parse(words[1:])


def _parse(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    if words[0] == "eval":
        command, words = typer.main.get_command(evaluations), words[1:]
    inner = command.get_command(command.context_class(command), words[0])
    assert inner is not None, words
    inner.make_context(words[0], words[1:])
