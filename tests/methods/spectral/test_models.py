"""Spectral on models of other kinds, calibrated here: without RoPE, with learned sinks, with many heads per group."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.spectral_files import loss_of_keys
from support.models.family_cases import build
from support.models.toy_tokenizers import Letters

from kvcache_compress import enable_fused_attention
from kvcache_compress.methods.spectral.calibration import SpectralSettings, calibrate_spectral

SIZES = {"max_position_embeddings": 1024}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "no RoPE": ("opt", SIZES),
    "learned sinks": ("gpt_oss", SIZES),
    "heads of 128, 8 query heads each": (
        "llama",
        {**SIZES, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
    ),
    "RoPE on half of each head, neighbours": ("glm4", SIZES),
    "soft-capped scores": ("gemma2", SIZES),
}


def text(tokens: int, seed: int) -> str:
    """Random characters, each drawn from a few that may follow the last one, so that models see some order."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 64, (64, 4), generator=torch.Generator().manual_seed(0))
    found = [0]
    for choice in torch.randint(0, 4, (tokens - 1,), generator=generator).tolist():
        found.append(int(table[found[-1], choice]))
    return "".join(chr(64 + token) for token in found)


@pytest.mark.parametrize("name", MODELS)
def test_loses_less_than_turboquant(name: str, tmp_path: Path) -> None:
    """At two bits the loss is below that of the paper's TurboQuant, even with random weights and thus even keys."""
    family, changes = MODELS[name]
    model: Any = build(family, **changes)
    (tmp_path / "text").write_text(text(4000, seed=1))
    output = tmp_path / "statistics.safetensors"
    settings = SpectralSettings(tokens=3200, context=400, group=32)
    calibrate_spectral(model, Letters(), [str(tmp_path / "text")], output, settings)  # type: ignore[arg-type]
    ids = torch.tensor([Letters()(text(440, seed))["input_ids"] for seed in range(2, 10)])
    enable_fused_attention(model)
    spectral = loss_of_keys(model, ids, {"method": "spectral", "bits": 2, "statistics": str(output)})
    paper = {"method": "turboquant", "bits": 2, "codebook": "lloyd_max", "scalar": "norm"}
    turboquant = loss_of_keys(model, ids, paper)
    assert 0 < spectral < turboquant, (spectral, turboquant)
