"""Experiments on a model's keys and answers: CommVQ's loss, LongBench-E's bands, likelihoods through the cache.

Run by `benchmarks/experiments.py`; each function returns what goes to a result file, its `_table` the page's table.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_compress.eval.caches.caches import full_cache
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.runner.progress import ProgressLine
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.tasks.longbench.benchmark import LongBench
from kvcache_compress.eval.tasks.longbench.data import length_band
from kvcache_compress.eval.tasks.samples import read_jsonl
from kvcache_compress.methods.commvq.calibration.calibrate import CommVQSettings, split_windows, train_side
from kvcache_compress.methods.commvq.calibration.collect import calibrated_layers, collect, read_layer
from kvcache_compress.methods.commvq.codebook_file import code_bits
from kvcache_compress.modeling.calibration.text import read_windows
from kvcache_compress.modeling.facts import head_shape
from kvcache_compress.modeling.loading import load_model

GRID = ((8, 2, 8), (16, 4, 8), (32, 4, 16), (32, 16, 8), (32, 64, 11))
"""Pairs g that share a code, centres N and rounds R of each calibration; losses are read after every round."""
SHOWN = ((8, 2, 1), (16, 4, 1), (32, 16, 1), (8, 2, 8), (16, 4, 8), (32, 4, 16), (32, 16, 8), (32, 64, 1), (32, 64, 3),
         (32, 64, 5), (32, 64, 8), (32, 64, 11))  # fmt: skip
PAPER = {(8, 2, 1): 0.2699, (16, 4, 1): 0.2011, (32, 16, 1): 0.1265, (8, 2, 8): 0.0798, (16, 4, 8): 0.0790,
         (32, 16, 8): 0.0254}  # fmt: skip
"""Mean squared errors of CommVQ's Tables 9 and 10."""
BANDS = ("0-4k", "4-8k", "8k+")
E_CACHES = ("turboquant-paper-3.5bit", "turboquant-paper-2.5bit", "turboquant-3bit", "kivi-2bit")

ModelOption = Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a folder.")]


def commvq(
    text: Annotated[list[str], typer.Option(help="Text file; repeatable.")],
    model: ModelOption = "smollm2-135m",
    tokens: int = 18_432,
    context: int = 1024,
    every: Annotated[int, typer.Option(help="Train the keys of every so many layers, from the first.")] = 5,
) -> dict[str, Any]:
    """CommVQ's loss of keys by pairs per group g, centres N and rounds R (appendix A.4), as in the paper."""
    loaded, tokenizer = load_model(model)
    config = loaded.config.get_text_config(decoder=True)
    head_dim, heads, _ = head_shape(config)
    layers = calibrated_layers(config)[::every]
    training, held_out = split_windows(read_windows(text, tokenizer, tokens, context)[0])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / name for name in ("training", "held_out")]
        for windows, path in zip((training, held_out), folders, strict=True):
            collect(loaded, windows, path, layers, costs=False)
        for pairs, centres, rounds in GRID:
            sizes = {"key_rounds": rounds, "centres": centres, "groups": head_dim // (2 * pairs)}
            settings = CommVQSettings.quick(
                tokens=tokens, context=context, share_rounds=False, weigh_pairs=False, **sizes
            )
            found: dict[str, list[list[float]]] = {"rounds": [], "held_out": []}
            seconds = 0.0
            for layer in layers:
                states = [read_layer(path, layer, "keys", heads, head_dim) for path in folders]
                _, losses = train_side(*states, torch.empty(heads, 0), "keys", layer, settings)
                seconds += losses["seconds"]
                for kind, by_layer in found.items():
                    by_layer.append([round(statistics.fmean(of), 5) for of in zip(*losses[kind], strict=True)])
            bits = code_bits("keys", centres) / (2 * pairs)
            rows.append({"g": pairs, "centres": centres, "bits_per_round": bits, "seconds": seconds} | found)
    sizes = {"tokens": tokens, "context": context, "layers": layers, "head_dim": head_dim}
    return {"model": Path(loaded.name_or_path).name, "texts": [Path(path).name for path in text], **sizes, "rows": rows}


def commvq_table(result: dict[str, Any]) -> str:
    """Table of losses by g, N and R: the paper's, those of the first layer, and those of all layers."""
    lines = [
        "| g | N | R | bits | paper, first layer | first layer | on held-out text | all layers | on held-out text |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = {(row["g"], row["centres"]): row for row in result["rows"]}
    for pairs, centres, rounds in SHOWN:
        row = rows[pairs, centres]
        losses = [[layer[rounds - 1] for layer in row[kind]] for kind in ("rounds", "held_out")]
        figures = [f"{x:.4f}" for x in (*(of[0] for of in losses), *map(statistics.fmean, losses))]
        paper = f"{PAPER[pairs, centres, rounds]:.4f}" if (pairs, centres, rounds) in PAPER else "–"
        bits = f"{rounds * row['bits_per_round']:.3f}"
        lines.append(f"| {pairs} | {centres} | {rounds} | {bits} | {paper} | {' | '.join(figures)} |")
    return "\n".join(lines)


def bands(
    data: Annotated[Path, typer.Option(help="LongBench's multi_news.jsonl.")],
    model: ModelOption = "smollm2-135m",
    cache: Annotated[list[str], typer.Option(help="Cache beside the full one; repeatable.")] = [*E_CACHES],  # noqa: B006
    per_band: Annotated[int, typer.Option(help="Rows of each length band, from the first.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate; 512 in the benchmark.")] = 128,
) -> dict[str, Any]:
    """LongBench-E's scores by length band on multi_news: ROUGE-L of the full cache and of others."""
    loaded, tokenizer = load_model(model)
    chosen: dict[str, list[dict[str, Any]]] = {band: [] for band in BANDS}
    for row in read_jsonl(data, ("length",)):
        chosen[length_band(row["length"])].append(row)
    rows = [row for members in chosen.values() for row in members[:per_band]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "multi_news_e.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        task = LongBench(version="e", tasks=("multi_news",), data=str(file), max_new_tokens=max_new_tokens)
        runner = Runner(loaded, tokenizer, on_progress=ProgressLine())
        cells = runner.run("longbench", task, [full_cache(), *map(resolve_cache, cache)])
    if failed := [f"{cell.cache['name']}: {cell.error}" for cell in cells if cell.error]:
        raise ValueError("; ".join(failed))
    counts = {band: len(members[:per_band]) for band, members in chosen.items()}
    found = [
        {
            "cache": cell.cache["name"],
            "bits": cell.all_bits,
            "bands": [record["labels"][0] for record in cell.records],
            "scores": [round(100 * record["score"], 3) for record in cell.records],
            "tokens": [record["tokens"] for record in cell.records],
            "cut": [record["cut"] for record in cell.records],
        }
        for cell in cells
    ]
    about = {"model": Path(loaded.name_or_path).name, "task": "multi_news", "max_new_tokens": max_new_tokens}
    return about | {"counts": counts, "rows": found}


def bands_table(result: dict[str, Any]) -> str:
    """Table by cache of ROUGE-L in each band, with the standard error of the difference from the full cache."""
    heads = [f"{band} ({count})" for band, count in result["counts"].items()]
    lines = [f"| cache | bits | {' | '.join(heads)} | mean of bands |", "|---|---:" + "|---:" * (len(heads) + 1) + "|"]
    full = result["rows"][0]
    for row in result["rows"]:
        of_band = {band: [s for s, of in zip(row["scores"], row["bands"], strict=True) if of == band] for band in BANDS}
        cells = [f"{statistics.fmean(scores):.1f}" for scores in of_band.values()]
        cells.append(f"{statistics.fmean(statistics.fmean(scores) for scores in of_band.values()):.1f}")
        if row is not full:
            changes = [ours - theirs for ours, theirs in zip(row["scores"], full["scores"], strict=True)]
            error = statistics.stdev(changes) / len(changes) ** 0.5
            cells[-1] += f" (rows: {statistics.fmean(changes):+.1f} ± {error:.1f})"
        lines.append(f"| {row['cache']} | {row['bits']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)
