"""Calibrate `spectral`: save the statistics that a cache measures in one prefill of text."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.attention.interface import enable_fused_attention
from kvcache_compress.files.model_file import check_output
from kvcache_compress.methods.spectral.codec import GROUP
from kvcache_compress.methods.spectral.statistics_file import write_statistics
from kvcache_compress.modeling.calibration_text import read_windows
from kvcache_compress.modeling.decoder import cache_argument

from .compressed_cache import CompressedCache

TOKENS, CONTEXT = 8192, 1024
"""Default number of tokens to measure, and how many of them make a row of the prefill."""


def calibrate_spectral(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: Sequence[str], output: Path, tokens: int = TOKENS
) -> None:
    """Measure the statistics of `tokens` tokens of text and write them to a file.

    The model's fused attention is on afterwards.

    Raises:
        ValueError: fused attention is impossible for the model, or it has no full-attention layer; the text cannot be
            read or is too short; keys or logits are not finite; or the output cannot be a file.
    """
    check_output(output)
    config = model.config.get_text_config(decoder=True)
    windows, digest = read_windows(text, tokenizer, tokens, CONTEXT)
    enable_fused_attention(model)
    cache = CompressedCache(model.config, {"keys": "spectral", "values": "none"})
    with torch.no_grad():
        logits = model(windows.to(model.device), logits_to_keep=1, **{cache_argument(): cache}).logits
    if not logits.isfinite().all():
        raise ValueError(f"the logits of {config.model_type} are not finite; try another dtype")
    found = {index: layer.sides["keys"].codec.statistics for index, layer in cache.compressed_layers.items()}
    data = {"text": list(text), "tokens": windows.numel(), "context": CONTEXT, "sha256": digest}
    write_statistics(str(output), config, found, GROUP, data)
