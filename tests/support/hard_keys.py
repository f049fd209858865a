"""Changes of a model that keep its function but make its keys hard to code, as those of some real models are."""

from typing import Any

import torch

OUTLIERS = (1, 5, 9)
"""RoPE pairs that `with_outlier_channels` scales."""


def with_outlier_channels(model: Any, factor: float = 16.0) -> Any:
    """Multiply three RoPE pairs of keys by `factor` and divide those of queries by it: the same function."""
    attention = model.model.layers[0].self_attn
    dim = attention.head_dim
    scale = torch.ones(dim)
    for pair in OUTLIERS:
        scale[[pair, pair + dim // 2]] = factor
    with torch.no_grad():
        for layer in model.model.layers:
            for projection, factors in ((layer.self_attn.k_proj, scale), (layer.self_attn.q_proj, 1 / scale)):
                projection.weight.mul_(factors.repeat(len(projection.weight) // dim)[:, None])
    return model
