"""Saved caches for tests, changed copies of their files, and outcomes of bad inputs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from kvcache_compress import CompressedCache
from kvcache_compress.files.model_file import checksum
from support.models.small_model import RECENT, SINKS, method_config, small_config

Change = Callable[[dict[str, Any], dict[str, torch.Tensor], dict[str, str]], Any]
"""Function that changes the header, the tensors and the other metadata of a file in place."""


def config() -> LlamaConfig:
    """Config of a model with four layers."""
    return small_config(4, name_or_path="org/small")


def some_config() -> dict[str, Any]:
    """Cache config with several kinds of statistics, groups of tokens, cos and sin, and one uncompressed layer."""
    rules = [
        {"match": 1, "keys": method_config("commvq", 4)["keys"], "sink_tokens": 2},
        {"match": 2, "method": "none"},
        {"match": 3, "keys": {"method": "kivi", "bits": 2}},
    ]
    keys, values = {"method": "turboquant", "bits": 3.5, "center": "on"}, {"method": "kivi", "bits": 4}
    return {"keys": keys, "values": values, "sink_tokens": SINKS, "recent_tokens": RECENT, "layers": rules}


def states(tokens: int, seed: int = 0, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values `[B, 2, T, 32]`."""
    keys, values = torch.randn(2, batch, 2, tokens, 32, generator=torch.Generator().manual_seed(seed))
    return keys, values


def fill(cache: CompressedCache, tokens: int = 60) -> Any:
    """Give every layer as many tokens, and return the cache."""
    for index in range(len(cache.layers)):
        cache.update(*states(tokens, index), index)
    assert cache.packed_tokens > 0 or tokens < 60
    return cache


def filled(tokens: int = 60) -> Any:
    return fill(CompressedCache(config(), some_config()), tokens)


def changed(path: Path, change: Change, honest: bool = True, name: Path | None = None) -> Path:
    """Copy a file of a model, such as a saved cache, with changes, and with a new checksum if `honest`."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    header = json.loads(metadata["header"])
    change(header, tensors, metadata)
    metadata["header"] = json.dumps(header)
    if honest:
        metadata["sha256"] = checksum(metadata["header"], tensors)
    copy = name or path.with_name("changed.safetensors")
    copy.unlink(missing_ok=True)
    save_file(tensors, copy, metadata=metadata)
    return copy


CLEAR = (ValueError, TypeError, IndexError, FileNotFoundError)
ACCEPTED = "accepted"


def outcome(call: Callable[[], Any]) -> str:
    """Message of a clear error that a call raises, or `ACCEPTED`; any other exception fails the test."""
    try:
        call()
    except CLEAR as error:
        text = str(error).strip()
    else:
        return ACCEPTED
    assert text, "an error without a word"
    return text
