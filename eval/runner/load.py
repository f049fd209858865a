"""Load models to evaluate."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress import enable_fused_attention
from kvcache_compress.modeling.loading import load_model
from kvcache_compress.validation import quoted

DTYPES = ("float32", "bfloat16", "float16")


def load(
    model: str, dtype: str, device: str | None, *, fused: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer; the default device is the accelerator.

    Raises:
        ValueError: There is no such dtype or model.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={quoted(dtype)}: must be one of {', '.join(DTYPES)}")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    loaded, tokenizer = load_model(model, dtype=getattr(torch, dtype), device=device or accelerator)
    if fused:
        enable_fused_attention(loaded)
    return loaded, tokenizer
