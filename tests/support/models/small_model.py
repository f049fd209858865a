"""Llama model so small that thousands of tokens take seconds, and one configuration per method for it."""

from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcache_compress.methods.commvq.codebook_file import write_codebooks
from support.files.commvq_files import FOLDER, random_codebooks
from support.files.spectral_files import statistics_of

VOCAB, HEADS, HEAD_DIM = 64, 2, 32
SINKS, RECENT = 4, 8


def small_config(layers: int = 2, **changes: Any) -> LlamaConfig:
    """Config with 4 query and 2 key/value heads of 32, and weights so large that attention matters."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 4096,
        "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **changes})


def small_model(layers: int = 2, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(small_config(layers, **changes)).eval()


@cache
def codebooks(layers: int = 2) -> str:
    """CommVQ's file for `small_config(layers)`, made at its first use."""
    config = small_config(layers)
    path = FOLDER / f"small-{layers}.safetensors"
    write_codebooks(path, config, random_codebooks(config, 1, (3, 16), (5, 16)))
    return str(path)


@cache
def statistics(layers: int = 2) -> str:
    """Spectral's file for `small_config(layers)`, made at its first use."""
    return statistics_of(small_config(layers), f"small-{layers}")


def method_config(name: str, layers: int = 2) -> dict[str, Any]:
    """Cache config whose keys and, if the method supports them, values are compressed by this method."""
    sides: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "turboquant": ({"bits": 4}, {"bits": 3}),
        "kivi": ({"bits": 4}, {"bits": 4}),
        "qjl": ({"sketch_ratio": 4}, {"method": "kivi", "bits": 4}),
        "polarquant_recursive": ({"bits": [4, 3, 2]}, {"bits": [4, 3, 2]}),
        "polarquant_rope": ({"group_size": 32}, {"method": "turboquant", "bits": 4}),
        "commvq": ({"codebooks": codebooks(layers)}, {"codebooks": codebooks(layers)}),
        "spectral": ({"bits": 3, "statistics": statistics(layers)}, {"method": "turboquant", "bits": 4}),
    }
    keys, values = ({"method": name, **options} for options in sides[name])
    return {"keys": keys, "values": values, "sink_tokens": SINKS, "recent_tokens": RECENT}


METHODS = ("turboquant", "kivi", "qjl", "polarquant_recursive", "polarquant_rope", "commvq", "spectral")


def mixed_config() -> dict[str, Any]:
    """Cache config of two layers with CommVQ for keys, which share cos and sin, and different methods for values."""
    rule = {"match": 1, "values": method_config("turboquant")["values"]}
    return {**method_config("commvq"), "values": method_config("kivi")["values"], "layers": [rule]}
