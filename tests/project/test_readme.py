"""README: its code runs, and the comparison that its figures come from is whole."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from support.paths import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from kvcache_compress import CompressedCache, load_config
from kvcache_compress.config import preset_names
from kvcache_compress.eval.runner.table import read_cells
from kvcache_compress.modeling.loading import load_model

README = (ROOT / "README.md").read_text(encoding="utf-8")


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_every_preset_is_in_the_comparison() -> None:
    """Its cells are finished, but where hqq cannot pack an odd number of groups."""
    cells = read_cells(ROOT / "benchmarks" / "results" / "smollm2.jsonl")
    assert set(preset_names()) <= {cell.cache["name"] for cell in cells}
    for cell in cells:
        assert cell.error is None or ("hqq" in cell.cache["name"] and "size of tensor" in cell.error)


def test_yaml_snippet_is_a_config(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    (text,) = snippets("yaml")
    path.write_text(text, encoding="utf-8")
    assert load_config(path).layers[0].method == "none"


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # all versions know this name
@pytest.mark.slow
def test_python_snippets_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand there, but that the model and its tokenizer need no hub."""
    model, tokenizer = load_model("smollm2-135m", dtype=torch.bfloat16)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    scope: dict[str, object] = {}
    for code in snippets("python"):
        exec(code, scope)
    printed = capsys.readouterr().out
    *shown, end = snippets("text")[0].splitlines()
    assert end == "..."
    assert printed.splitlines()[: len(shown)] == shown
    packed = re.search(r"(\d+) tokens packed\n", printed)
    assert packed is not None
    assert int(packed[1]) > 0


def test_printed_memory_is_that_of_so_many_tokens() -> None:
    """The snippet's report, from a layer of SmolLM2's shape that is filled without the model, thirty times."""
    _, *lines, end = snippets("text")[0].splitlines()
    assert end == "..."
    packed, tokens = (int(count.replace(",", "")) for count in lines[1].split()[0:3:2])
    assert packed < tokens
    config = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=1)
    cache = CompressedCache(config, "best-3bit")
    x = torch.randn(1, 3, tokens, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for part in x.split([tokens - 6, *[1] * 6], dim=2):
        cache.update(part, part, 0)
    report = cache.memory_report()
    printed = str(dataclasses.replace(report, layers=report.layers * 30))
    assert printed.splitlines()[: len(lines)] == lines
