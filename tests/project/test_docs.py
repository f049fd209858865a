"""Documentation: what its pages show runs, and what they name exists. `make docs` checks the site and its links."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from support.files.commvq_files import random_codebooks
from support.files.spectral_files import coded_statistics
from support.models.saved_model import saved_model
from support.paths import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcache_compress
from kvcache_compress import CompressedCache, disable_fused_attention
from kvcache_compress.cli import app
from kvcache_compress.cli.evaluate.app import app as evaluations
from kvcache_compress.config import load_config
from kvcache_compress.eval.runner.comparison import Comparison
from kvcache_compress.methods.commvq.codebook_file import write_codebooks
from kvcache_compress.methods.spectral.statistics_file import write_statistics
from kvcache_compress.modeling import loading

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PACKAGE = Path(kvcache_compress.__file__).parent
PACKAGES = ("kvcache_compress", "eval", "cpu_kernels", "triton_kernels")
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
SHORTENED = CHAT.replace("message.content }}", "message.content if message.role != 'assistant' else '...' }}")
"""A chat template that writes earlier answers differently from how they were generated, as those of reasoners do."""


def snippets(page: str, language: str) -> list[str]:
    """Code blocks of a page, without those that say that they are not run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- not run here: [^>]+-->\n```.*?```", "", text, flags=re.DOTALL)
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def write_files(folder: Path, config: Any) -> None:
    """Write the files that pages name."""
    for name in ("model.safetensors", "codebooks.safetensors"):
        write_codebooks(folder / name, config, random_codebooks(config, 1, (3, 16), (5, 16)))
    path = str(folder / "statistics.safetensors")
    write_statistics(path, config, coded_statistics(config), 32, {})
    yaml = "keys: {method: spectral, bits: 2}\nvalues: {method: turboquant, bits: 2}\n"
    (folder / "my.yaml").write_text(yaml, encoding="utf-8")


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A small model and its tokenizer, whatever name they are loaded by, in a folder with the files that pages name."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = loading.load_model(saved_model())
    model.config.max_position_embeddings = 32_768
    tokenizer.chat_template = CHAT
    write_files(tmp_path, model.config)
    for kind, made in ((AutoModelForCausalLM, model), (AutoTokenizer, tokenizer)):
        monkeypatch.setattr(kind, "from_pretrained", lambda name, made=made: made)
    monkeypatch.setattr(loading, "load_model", lambda name: (model, tokenizer))
    yield {"model": model, "tokenizer": tokenizer}
    disable_fused_attention(model)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # all versions know this name
@pytest.mark.parametrize("page", [page for page in ("README.md", *PAGES) if snippets(page, "python")])
def test_python_runs(page: str, scope: dict[str, Any]) -> None:
    blocks = snippets(page, "python")
    if page == "README.md":  # whose text is long, all the more with a token per character
        blocks = [code.replace("* 120", "* 9") for code in blocks]
    run_blocks(page, blocks, scope)


def run_blocks(page: str, blocks: list[str], scope: dict[str, Any]) -> None:
    """Run the blocks of a page in order; caches that they fill have packed tokens."""
    torch.manual_seed(0)
    filled = []
    for code in blocks:
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
    source = "".join(path.read_text(encoding="utf-8") for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    table = (ROOT / "docs/guides/troubleshoot.md").read_text(encoding="utf-8").split("| message |")[1].split("\n\n")[0]
    messages = re.findall(r"^\| `([^`]+)`", table, flags=re.MULTILINE)
    assert len(messages) > 4
    for message in messages:
        for part in re.split(r"\s*\.\.\.\s*|=\"triton\"", message):
            assert part in joined, message


def test_functions_that_a_key_passes_exist() -> None:
    page = (ROOT / "docs/dev/how-it-works.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| ([^|]+) \|", page, flags=re.MULTILINE)
    assert len(rows) > 8
    for file, names in rows:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names):
            assert all(re.search(rf"(class|def) {part}\b", source) for part in name.split(".")), name


@pytest.mark.parametrize("page", [page for page in ("README.md", *PAGES) if snippets(page, "yaml")])
def test_yaml_is_a_configuration_or_a_comparison(page: str, tmp_path: Path) -> None:
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
