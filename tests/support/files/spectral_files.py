"""Spectral in tests: files of random statistics for the small models, and a loss."""

from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig

from kvcache_compress import CompressedCache
from kvcache_compress.codecs.base import Statistics
from kvcache_compress.methods.spectral.codec import _coded
from kvcache_compress.methods.spectral.statistics_file import write_statistics
from kvcache_compress.methods.spectral.transform import mean_table
from kvcache_compress.modeling.facts import head_shape
from kvcache_compress.modeling.rope import rope_layout, rotary_embedding
from support.cache_name import with_cache
from support.files.commvq_files import CONTRACT_MODEL
from support.paths import temporary_folder

FOLDER = temporary_folder("spectral-")


def random_statistics(config: PreTrainedConfig, group: int = 32) -> dict[str, torch.Tensor]:
    """Tensors of all layers: bases near rotations, deviations from 1 down to 0.1, small means."""
    dim, heads, layers = head_shape(config)
    generator = torch.Generator().manual_seed(dim)
    tensors: dict[str, torch.Tensor] = {}
    layout, embed = rope_layout(config, dim), rotary_embedding(config)
    turns = None
    if layout is not None and embed is not None:
        cos, sin = layout.factors(embed(torch.zeros(1), torch.arange(group)[None]))
        length = (cos.square() + sin.square()).sqrt()
        turns = cos / length, sin / length
    for layer in range(layers):
        basis = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator)).Q
        tensors[f"keys.{layer}.basis"] = basis + 0.02 * torch.randn(heads, dim, dim, generator=generator)
        tensors[f"keys.{layer}.deviation"] = torch.logspace(0, -1, dim).expand(heads, -1)
        table = 0.2 * torch.randn(1, heads, 1, dim, generator=generator).expand(-1, -1, group, -1)
        if layout is not None and turns is not None:
            table = layout.rotate(table, turns)
        places, means = mean_table(table[0])
        tensors[f"keys.{layer}.places"], tensors[f"keys.{layer}.means"] = places.float(), means.float()
    return tensors


def coded_statistics(config: PreTrainedConfig, group: int = 32) -> dict[int, Statistics]:
    """The same as codecs and files have them, by layer."""
    tensors, found = random_statistics(config, group), {}
    for layer in range(config.num_hidden_layers):
        own = {name: tensors[f"keys.{layer}.{name}"].contiguous() for name in ("basis", "deviation", "places", "means")}
        found[layer] = _coded(own | {"inverse": torch.linalg.inv(own["basis"].double()).float()})
    return found


@cache
def statistics_file(head_dim: int, group: int = 32) -> str:
    """A file for the model of the contract (head dimension 32), or one like it."""
    sizes = {**CONTRACT_MODEL, "hidden_size": 6 * head_dim} if head_dim != 32 else CONTRACT_MODEL
    config = LlamaConfig(**sizes)
    return statistics_of(config, f"{head_dim}-{group}", group)


def statistics_of(config: PreTrainedConfig, name: str, group: int = 32) -> str:
    """A new file of random statistics for this model."""
    path = FOLDER / f"{name}.safetensors"
    with torch.device("cpu"):
        write_statistics(str(path), config, coded_statistics(config, group), group, {})
    return str(path)


@torch.no_grad()
def loss_of_keys(model: Any, ids: torch.Tensor, keys: dict[str, Any]) -> float:
    """Mean squared error of the logits after 400 tokens over a cache whose keys are compressed."""
    found = []
    for side in (keys, {"method": "none"}):
        values = {"method": "none"}
        cache = CompressedCache(model.config, {"keys": side, "values": values, "sink_tokens": 4, "recent_tokens": 8})
        model(ids[:, :400], **with_cache(cache))
        found.append(model(ids[:, 400:], **with_cache(cache)).logits)
        assert side["method"] == "none" or cache.packed_tokens > 300
    return (found[0] - found[1]).square().mean().item()
