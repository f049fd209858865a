"""CommVQ's loss of keys by pairs per group g, centres N and rounds R (CommVQ, appendix A.4).

python benchmarks/studies/commvq.py --text data/wikitext-2/valid.txt

writes `results/experiments/commvq.json`.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_compress.eval.provenance.results import write_json
from kvcache_compress.methods.commvq.calibration.calibrate import CommVQSettings, split_windows, train_side
from kvcache_compress.methods.commvq.calibration.collect import collect, read_layer
from kvcache_compress.methods.commvq.codebook_file import code_bits
from kvcache_compress.modeling.calibration.text import read_windows
from kvcache_compress.modeling.facts import calibrated_layers, head_shape
from kvcache_compress.modeling.loading import load_model

GRID = ((8, 2, 8), (16, 4, 8), (32, 4, 16), (32, 16, 8), (32, 64, 11))
"""Pairs g that share a code, centres N and rounds R of each calibration; losses are read after every round."""
RESULT = Path(__file__).resolve().parents[1] / "results" / "experiments" / "commvq.json"


def main(
    text: Annotated[list[str], typer.Option(help="Text file; repeatable.")],
    model: str = "smollm2-135m",
    tokens: int = 18_432,
    context: int = 1024,
    every: Annotated[int, typer.Option(help="Train the keys of every so many layers, from the first.")] = 5,
) -> None:
    loaded, tokenizer = load_model(model)
    config = loaded.config.get_text_config(decoder=True)
    head_dim, heads, _ = head_shape(config)
    layers = calibrated_layers(config)[::every]
    training, held_out = split_windows(read_windows(text, tokenizer, tokens, context)[0])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / name for name in ("training", "held_out")]
        for windows, path in zip((training, held_out), folders, strict=True):
            collect(loaded, windows, path, layers)
        for pairs, centres, rounds in GRID:
            sizes = {"key_rounds": rounds, "centres": centres, "groups": head_dim // (2 * pairs)}
            settings = CommVQSettings.quick(tokens=tokens, context=context, **sizes)
            found: dict[str, list[list[float]]] = {"rounds": [], "held_out": []}
            seconds = 0.0
            for layer in layers:
                states, unseen = (read_layer(path, layer, "keys", heads, head_dim) for path in folders)
                _, losses = train_side(states, unseen, "keys", layer, settings)
                seconds += losses["seconds"]
                for kind, by_layer in found.items():
                    by_layer.append([round(statistics.fmean(of), 5) for of in zip(*losses[kind], strict=True)])
            bits = code_bits("keys", centres) / (2 * pairs)
            rows.append({"g": pairs, "centres": centres, "bits_per_round": bits, "seconds": seconds} | found)
    about: dict[str, Any] = {"model": model, "texts": [Path(path).name for path in text], "tokens": tokens}
    about |= {"context": context, "layers": layers, "head_dim": head_dim, "rows": rows}
    write_json(RESULT, about, torch.device("cpu"))


if __name__ == "__main__":
    typer.run(main)
