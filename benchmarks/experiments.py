"""Experiments of the papers that are small enough for a CPU; docs/dev/evaluation.md has what follows from them.

python benchmarks/experiments.py codes
python benchmarks/experiments.py angles
python benchmarks/experiments.py prod --text TEXT.txt
python benchmarks/experiments.py commvq --text TEXT.txt
python benchmarks/experiments.py scores
python benchmarks/experiments.py generation
python benchmarks/experiments.py likelihood
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import experiments_commvq
import experiments_likelihood
import experiments_times
import torch
import typer
import yaml
from transformers import DynamicCache

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.codecs.lloyd_max import lloyd_max_levels
from kvcache_compress.codecs.polar_tree import adjacent_order, angles
from kvcache_compress.codecs.rotation import random_rotation
from kvcache_compress.codecs.scalar import boundaries
from kvcache_compress.eval.provenance.artifacts import write_json
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT
from kvcache_compress.methods.polarquant.codebooks import angle_density
from kvcache_compress.methods.turboquant.codec import TurboQuantCodec, TurboQuantOptions
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "experiments"
LEVELS = 4
"""Levels of the polar transform in the paper's Figure 2."""
BINS = 48
WINDOWS = ((16, 64), (0, 0))
"""Sinks and recent tokens that stay dense, with which `prod` is compared."""

app = typer.Typer(no_args_is_help=True, add_completion=False)
ModelOption = Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a folder.")]
TextOption = Annotated[Path, typer.Option(help="Text that the model reads.")]


def _write(name: str, result: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_json(RESULTS / f"{name}.json", result, torch.device("cpu"))


@torch.no_grad()
def cached_keys(model_name: str, text: Path, tokens: int) -> tuple[str, list[torch.Tensor]]:
    """Name of the model, and the keys `[1, H, T, D]` of each of its layers after reading a text's first tokens."""
    model, tokenizer = load_model(model_name)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[:, :tokens]
    cache = DynamicCache(config=model.config)
    model(ids, **{cache_argument(): cache}, logits_to_keep=1)
    return Path(model.name_or_path).name, [layer.keys.float() for layer in cache.layers]


def entropy(shares: torch.Tensor) -> float:
    """Bits of a symbol with these probabilities."""
    return -(shares[shares > 0] * shares[shares > 0].log2()).sum().item()


def prefix_code_bits(shares: list[float]) -> float:
    """Mean length of the best prefix code (Huffman's): the sum of the weights of all joined nodes."""
    heap, length = sorted(shares), 0.0
    while len(heap) > 1:
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        length += joined
        heapq.heappush(heap, joined)
    return length


@app.command()
def codes(model: ModelOption = "smollm2-135m", text: TextOption = DEFAULT_TEXT, tokens: int = 512) -> None:
    """Entropy of TurboQuant's Lloyd-Max codes, in theory and on a model's keys (section 3.1, Entropy Encoding)."""
    name, keys = cached_keys(model, text, tokens)
    dim = keys[0].shape[-1]
    rows = []
    for bits in (1, 2, 3, 4):
        levels = lloyd_max_levels(dim, bits)
        # A coordinate of a random direction; the draws cost less than the integral, and are reproducible.
        x = torch.randn(1 << 18, dim, generator=torch.Generator().manual_seed(bits), dtype=torch.float32)
        drawn = torch.bucketize((x[:, 0] / x.norm(dim=1)).double(), boundaries(levels))
        theory = torch.bincount(drawn, minlength=2**bits).double() / drawn.numel()
        measured = []
        for number, layer in enumerate(keys):
            context = CodecContext("keys", dim, layer.shape[1], number, 0, 0, torch.float32, layer.device)
            options = TurboQuantOptions(bits=bits, codebook="lloyd_max", rotation="haar")
            codec = TurboQuantCodec(options, context)
            codec.prepare(layer)
            planes = codec.encode(layer)[: len(packing.PLANES[bits])]
            counts = torch.bincount(packing.unpack(planes, bits).flatten(), minlength=2**bits)
            measured.append(counts.double() / counts.sum())
        rows.append(
            {
                "bits": bits,
                "entropy": entropy(theory),
                "prefix_code": prefix_code_bits(theory.tolist()),
                "measured": [entropy(shares) for shares in measured],
                "measured_prefix_code": [prefix_code_bits(shares.tolist()) for shares in measured],
            }
        )
    _write("codes", {"model": name, "text": text.name, "tokens": tokens, "head_dim": dim, "rows": rows})


@app.command("angles")
def angle_histograms(model: ModelOption = "smollm2-135m", text: TextOption = DEFAULT_TEXT, tokens: int = 512) -> None:
    """Angles of keys with and without preconditioning (recursive PolarQuant, Figure 2), by level."""
    name, keys = cached_keys(model, text, tokens)
    dim = keys[0].shape[-1]
    rows = []
    for preconditioned in (True, False):
        by_level: list[list[torch.Tensor]] = [[] for _ in range(LEVELS)]
        for number, layer in enumerate(keys):
            y = layer @ random_rotation("haar", dim, number).to(layer.dtype).T if preconditioned else layer
            for level, found in enumerate(angles(y[..., adjacent_order(dim, LEVELS)], LEVELS)):
                top = 2 * math.pi if level == 0 else math.pi / 2
                by_level[level].append(torch.histc(found, BINS, 0, top).double() / found.numel())
        for level, shares in enumerate(by_level):
            top = 2 * math.pi if level == 0 else math.pi / 2
            middles = (torch.arange(BINS, dtype=torch.float64) + 0.5) * top / BINS
            theory = angle_density(level + 1, middles) * top / BINS
            rows.append(
                {
                    "preconditioned": preconditioned,
                    "level": level + 1,
                    "shares": torch.stack(shares).mean(0).tolist(),
                    "theory": theory.tolist(),
                    "distance": [(share - theory).abs().sum().item() / 2 for share in shares],
                }
            )
    _write("angles", {"model": name, "text": text.name, "tokens": tokens, "head_dim": dim, "rows": rows})


@app.command()
def prod(
    text: Annotated[list[Path], typer.Option(help="Text file; repeatable.")],
    model: ModelOption = "smollm2-135m",
    windows: int = 3,
    prefix: int = 512,
    scored: int = 128,
) -> None:
    """KL of keys by TurboQuant's `prod` and `mse` at equal bits, end to end, with dense values."""
    from kvcache_compress.eval.caches.caches import full_cache, preset_cache
    from kvcache_compress.eval.runner.runner import Runner
    from kvcache_compress.eval.tasks.perplexity import Perplexity

    loaded, tokenizer = load_model(model)
    specs, wanted = [full_cache()], list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for (sinks, recent), bits, estimator in itertools.product(WINDOWS, (3, 4), ("mse", "prod")):
            keys = {"method": "turboquant", "bits": bits, "estimator": estimator}
            keys |= {"codebook": "lloyd_max"} if estimator == "mse" else {}
            config = {"keys": keys, "values": {"method": "none"}, "sink_tokens": sinks, "recent_tokens": recent}
            path = Path(folder) / f"{estimator}-{bits}-{sinks}.yaml"
            path.write_text(yaml.safe_dump(config), encoding="utf-8")
            specs.append(preset_cache(str(path)))
            wanted.append({"estimator": estimator, "bits": bits, "sinks": sinks, "recent": recent})
        task = Perplexity(texts=tuple(text), windows=windows, prefix=prefix, scored=scored)
        cells = Runner(loaded, tokenizer).run("perplexity", task, specs)[1:]
    rows = [
        row | {name: cell.scores[name] for name in ("kl", "kl_stderr", "top1")}
        for row, cell in zip(wanted, cells, strict=True)
    ]
    sizes = {"windows": windows, "prefix": prefix, "scored": scored, "texts": [path.name for path in text]}
    _write("prod", {"model": Path(loaded.name_or_path).name, **sizes, "rows": rows})


def _add_command(run: Callable[..., dict[str, Any]]) -> None:
    """Register a command that writes what an experiment of another file returns."""

    @app.command(run.__name__)
    @functools.wraps(run)
    def command(**values: Any) -> None:
        _write(run.__name__, run(**values))


for _run in (
    experiments_commvq.commvq,
    experiments_times.scores,
    experiments_times.generation,
    experiments_likelihood.likelihood,
):
    _add_command(_run)

if __name__ == "__main__":
    app()
