"""Collect a model's keys before RoPE and values on a text, in one file per layer and side."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.modeling.decoder import cache_argument, head_dim_of
from kvcache_compress.modeling.rope import rope_layout, rotary_embedding


def _layer_file(folder: Path, layer: int, side: Side) -> Path:
    return folder / f"{side}-{layer:03d}.f16"


@torch.inference_mode()
def collect(
    model: PreTrainedModel, windows: torch.Tensor, folder: Path, layers: Sequence[int], on_window: Callable[[], None]
) -> None:
    """Run `windows` `[W, T]` through the model, without its head, and write keys and values of `layers` to files.

    Keys come from an ordinary cache, after RoPE, which is then undone with the model's factors. A file holds float16
    `[W * T, H, head_dim]`; of keys, a head is `[real of pair 0, imaginary of pair 0, ...]`.
    """
    config = model.config.get_text_config(decoder=True)
    layout, embed = rope_layout(config, head_dim_of(config)), rotary_embedding(config)
    if layout is None or embed is None:
        raise RuntimeError("a model without RoPE has no keys before it")
    decoder = model.get_decoder()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = {
            (layer, side): stack.enter_context(_layer_file(folder, layer, side).open("wb"))
            for layer in layers
            for side in SIDES
        }
        cos, sin = embed(torch.zeros(1), torch.arange(windows.shape[1])[None])
        factors = layout.factors((cos.to(model.device), sin.to(model.device)))
        for window in windows:
            cache = DynamicCache(config=config)
            decoder(input_ids=window[None].to(model.device), **{cache_argument(): cache}, use_cache=True)
            for layer in layers:
                states = cache.layers[layer]
                unrotated = torch.stack(layout.split(layout.unrotate(states.keys, factors)), -1).flatten(-2)
                files[layer, "keys"].write(_bytes(unrotated, f"keys of layer {layer}"))
                files[layer, "values"].write(_bytes(states.values, f"values of layer {layer}"))
            on_window()


def _bytes(states: torch.Tensor, name: str) -> bytes:
    half = states[0].transpose(0, 1).to("cpu", torch.float16).contiguous()
    if not half.isfinite().all():
        raise ValueError(f"{name} must be finite in float16")
    return half.numpy().tobytes()


def read_layer(folder: Path, layer: int, side: Side, heads: int, head_dim: int) -> torch.Tensor:
    """Read the collected states of one side of a layer: float16 `[H, tokens, head_dim]`."""
    flat = torch.from_numpy(np.fromfile(_layer_file(folder, layer, side), dtype=np.float16))
    return flat.view(-1, heads, head_dim).transpose(0, 1)
