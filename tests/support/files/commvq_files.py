"""Codebook files for tests: random codebooks of any shape, and an encoder whose random weights lose nothing."""

from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig

from kvcache_compress.methods.commvq.codebook_file import write_codebooks
from support.paths import temporary_folder

FOLDER = temporary_folder("commvq-")
LAYERS, HEADS = 4, 2
CONTRACT_MODEL = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
CONTRACT_MODEL |= {"max_position_embeddings": 1024, "vocab_size": 128}


def random_codebooks(
    config: Any, groups: int, key_shape: tuple[int, int], value_shape: tuple[int, int], shrink: float = 0.7
) -> Any:
    """Tensors of all layers; shapes are (rounds, centres). Each round is smaller than the last, as residuals are."""
    head_dim, heads = config.head_dim, config.num_key_value_heads
    generator = torch.Generator().manual_seed(head_dim)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for side, (rounds, centres) in (("keys", key_shape), ("values", value_shape)):
            width = head_dim // groups
            size = shrink ** torch.arange(1, rounds + 1).view(-1, 1, 1) * head_dim**-0.5
            books = torch.randn(heads, groups, rounds, centres, width, generator=generator) * size
            tensors[f"{side}.{layer}.codebooks"] = books.unflatten(-1, (-1, 2)) if side == "keys" else books
    return tensors


def random_encoder(config: Any, bits: int) -> Any:
    """An encoder whose bits are the signs of random projections of a token, and of their opposites."""
    width = config.head_dim * config.num_key_value_heads
    generator = torch.Generator().manual_seed(width)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        rows = torch.randn(bits // 2, width, generator=generator) / width**0.5
        parts = {
            "weight1": torch.cat([torch.eye(width), -torch.eye(width)]),
            "bias1": torch.zeros(2 * width),
            "weight2": torch.cat([torch.cat([rows, -rows], 1), torch.cat([-rows, rows], 1)]),
            "bias2": torch.zeros(bits),
            "codebook": torch.cat([rows, -rows]) / (bits / 2) ** 0.5,
        }
        tensors |= {f"values.{layer}.{name}": tensor for name, tensor in parts.items()}
    return tensors


@cache
def codebook_file(
    head_dim: int,
    groups: int = 1,
    key_shape: tuple[int, int] = (3, 16),
    value_shape: tuple[int, int] = (5, 16),
    encoder_bits: int = 0,
    heads: int = HEADS,
    shrink: float = 0.7,
) -> str:
    """A file with random codebooks, made at its first use."""
    sizes = {"hidden_size": heads * head_dim, "num_hidden_layers": LAYERS, "num_attention_heads": heads}
    if head_dim == 32:
        sizes = CONTRACT_MODEL
    config = LlamaConfig(**sizes)
    described = (head_dim, groups, key_shape, value_shape, encoder_bits, heads, shrink)
    path = FOLDER / f"{'-'.join(map(str, described))}.safetensors"
    with torch.device("cpu"):
        tensors = random_codebooks(config, groups, key_shape, value_shape, shrink)
        if encoder_bits:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("keys")}
            tensors |= random_encoder(config, encoder_bits)
    write_codebooks(path, config, tensors)
    return str(path)
