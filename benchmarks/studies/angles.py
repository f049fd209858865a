"""Angles of keys with and without preconditioning (recursive PolarQuant, section 5.1 and Figure 2), by level.

python benchmarks/studies/angles.py

writes `results/experiments/angles.json`, and prints the total variation distance between the angles of a layer and
Lemma 2's density.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import torch
import typer
from transformers import DynamicCache

from kvcache_compress.codecs.polar_tree import adjacent_order, angles
from kvcache_compress.codecs.rotation import random_rotation
from kvcache_compress.eval.provenance.artifacts import write_json
from kvcache_compress.eval.reporting.report import markdown_table
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT
from kvcache_compress.methods.polarquant.codebooks import angle_density
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

ROOT = Path(__file__).resolve().parents[1]
LEVELS = 4
BINS = 48


@torch.no_grad()
def cached_keys(model_name: str, text: Path, tokens: int) -> list[torch.Tensor]:
    """Keys `[1, H, T, D]` of each layer after reading a text's first tokens."""
    model, tokenizer = load_model(model_name)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[:, :tokens]
    cache = DynamicCache(config=model.config)
    model(ids, **{cache_argument(): cache}, logits_to_keep=1)
    return [layer.keys.float() for layer in cache.layers]


def main(model: str = "smollm2-135m", text: Path = DEFAULT_TEXT, tokens: int = 512) -> None:
    keys = cached_keys(model, text, tokens)
    dim = keys[0].shape[-1]
    rows, lines = [], [[str(level + 1)] for level in range(LEVELS)]
    for preconditioned in (True, False):
        by_level: list[list[torch.Tensor]] = [[] for _ in range(LEVELS)]
        for number, layer in enumerate(keys):
            y = layer @ random_rotation("haar", dim, number).to(layer.dtype).T if preconditioned else layer
            for level, found in enumerate(angles(y[..., adjacent_order(dim, LEVELS)], LEVELS)):
                top = math.pi / (2 if level else 0.5)
                by_level[level].append(torch.histc(found, BINS, 0, top).double() / found.numel())
        for level, shares in enumerate(by_level):
            top = math.pi / (2 if level else 0.5)
            middles = (torch.arange(BINS, dtype=torch.float64) + 0.5) * top / BINS
            theory = angle_density(level + 1, middles) * top / BINS
            distance = [(share - theory).abs().sum().item() / 2 for share in shares]
            mean = torch.stack(shares).mean(0)
            lines[level].append(f"{statistics.fmean(distance):.3f} ({min(distance):.3f} to {max(distance):.3f})")
            about = {"preconditioned": preconditioned, "level": level + 1, "shares": mean.tolist()}
            rows.append(about | {"theory": theory.tolist(), "distance": distance})
    about = {"model": model, "text": text.name, "tokens": tokens, "head_dim": dim, "rows": rows}
    write_json(ROOT / "results" / "experiments" / "angles.json", about, torch.device("cpu"))
    typer.echo(markdown_table(["level", "preconditioned", "as they are"], lines))


if __name__ == "__main__":
    typer.run(main)
