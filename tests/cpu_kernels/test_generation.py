"""A model that generates through the C++ code against the torch backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import VOCAB, method_config, small_model

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.storage.view import record_paths


@pytest.fixture(autouse=True)
def poison() -> None:
    """Override the poisoning of memory: the model's own code may read uninitialised numbers."""


METHODS = ("turboquant", "kivi", "qjl", "polarquant_rope", "polarquant_recursive", "commvq")


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("method", "changes", "dtype"),
    [
        *((method, {}, torch.float32) for method in METHODS),
        *((method, {"max_cache_len": 160}, torch.bfloat16) for method in METHODS),
        ("kivi", {"layers": [{"match": [0], "keys": "none"}]}, torch.float32),
    ],
)
def test_generation_equals_the_torch_backend(method: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    model = small_model().to(dtype)
    enable_fused_attention(model)
    ids = torch.randint(1, VOCAB, (2, 120), generator=torch.Generator().manual_seed(3))
    padding = torch.ones_like(ids)
    ids[1, :31], padding[1, :31] = 0, 0
    logits = {}
    for backend in ("torch", "auto"):
        config = {**method_config(method), "sink_tokens": 4, "recent_tokens": 8, "backend": backend, **changes}
        cache = CompressedCache(model.config, config)
        with record_paths() as taken:
            output = model.generate(
                ids,
                attention_mask=padding,
                **with_cache(cache),
                max_new_tokens=6,
                do_sample=False,
                disable_compile=True,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits[backend] = torch.stack(output.logits)
        path = "torch" if backend == "torch" else "cpp"
        assert [call for call in taken if call.path != "decode"] == [(path, 1)] * 10
        assert all(layer.packed_tokens > 0 for layer in cache.layers)
    bar = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits["auto"], logits["torch"], atol=bar, rtol=0)
