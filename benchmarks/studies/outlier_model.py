"""Write a copy of a model that computes the same with keys that are hard to code, as some models have them.

    python benchmarks/studies/outlier_model.py --output models/outliers-16
    python benchmarks/studies/outlier_model.py --factor 1 --bias 50 --output models/means-50

For outlier channels a few RoPE pairs of all keys are multiplied by a factor, and those of queries are divided by it.
For large means a constant is added to the keys before RoPE, at the pairs that rotate least, so that scores change by
nearly the same number for all tokens. `benchmarks/comparisons/outliers.yaml` compares caches on such copies of SmolLM2.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedModel

from kvcache_compress.modeling.loading import SMOLLM2, load_model

PAIRS = (1, 5, 9)
"""RoPE pairs that become outliers."""
MEANS = 2
"""Pairs that get a large mean: those that rotate least."""


@torch.no_grad()
def with_outlier_channels(
    model: PreTrainedModel, factor: float = 16.0, pairs: Sequence[int] = PAIRS
) -> PreTrainedModel:
    """Multiply RoPE pairs of keys by `factor` and divide those of queries by it, in place."""
    dim = model.model.layers[0].self_attn.head_dim
    scale = torch.ones(dim)
    for pair in pairs:
        scale[[pair, pair + dim // 2]] = factor
    for layer in model.model.layers:
        for projection, factors in ((layer.self_attn.k_proj, scale), (layer.self_attn.q_proj, 1 / scale)):
            repeated = factors.repeat(len(projection.weight) // dim)
            projection.weight.mul_(repeated[:, None])
            if projection.bias is not None:
                projection.bias.mul_(repeated)
    return model


@torch.no_grad()
def with_large_means(model: PreTrainedModel, bias: float) -> PreTrainedModel:
    """Add `bias` to keys before RoPE, at the real part of the pairs that rotate least, in place."""
    model.config.attention_bias = True
    for layer in model.model.layers:
        attention = layer.self_attn
        dim = attention.head_dim
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            if projection.bias is None:
                projection.bias = torch.nn.Parameter(projection.weight.new_zeros(len(projection.weight)))
        attention.k_proj.bias.view(-1, dim)[:, dim // 2 - MEANS : dim // 2] += bias
    return model


def main(
    output: Annotated[Path, typer.Option(help="Folder for the model.")],
    model: Annotated[str, typer.Option(help="A model of Llama's architecture.")] = SMOLLM2,
    factor: Annotated[float, typer.Option(help="Factor of the keys' outlier channels; 1 for none.")] = 16.0,
    pair: Annotated[list[int] | None, typer.Option(help=f"RoPE pair; repeatable, by default {PAIRS}.")] = None,
    bias: Annotated[float, typer.Option(help="Constant added to keys; 0 for none.")] = 0.0,
) -> None:
    loaded, tokenizer = load_model(model)
    if factor != 1:
        with_outlier_channels(loaded, factor, pair or PAIRS)
    if bias:
        with_large_means(loaded, bias)
    loaded.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    typer.run(main)
