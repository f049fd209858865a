"""A model that generates through the C++ code against the torch backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_model import VOCAB, method_config, small_model

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.cpu_kernels import launch


@pytest.fixture(autouse=True)
def poison() -> None:
    """Not here: the model's own code may read what it left uninitialised."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("method", ["turboquant", "kivi", "qjl", "polarquant_rope", "polarquant_recursive", "commvq"])
@pytest.mark.parametrize("changes", [{}, {"max_cache_len": 160}, {"layers": [{"match": [0], "keys": "none"}]}])
def test_generation_equals_the_torch_backend(
    method: str, changes: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model().to(dtype)
    enable_fused_attention(model)
    ids = torch.randint(1, VOCAB, (2, 120), generator=torch.Generator().manual_seed(3))
    padding = torch.ones_like(ids)
    ids[1, :31], padding[1, :31] = 0, 0
    calls = []
    attend = launch.attend
    monkeypatch.setattr("kvcache_compress.view.attention", lambda backend: _attention(backend, calls, attend))
    logits = {}
    for backend in ("torch", "auto"):
        config = {**method_config(method), "sink_tokens": 4, "recent_tokens": 8, "backend": backend, **changes}
        cache = CompressedCache(model.config, config)
        logits[backend] = torch.stack(
            model.generate(
                ids,
                attention_mask=padding,
                past_key_values=cache,
                max_new_tokens=6,
                do_sample=False,
                disable_compile=True,
                output_logits=True,
                return_dict_in_generate=True,
            ).logits
        )
        assert all(layer.packed_tokens > 0 for layer in cache.layers)
    assert calls == ["torch"] * 10 + ["cpp"] * 10
    bar = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits["auto"], logits["torch"], atol=bar, rtol=0)


def _attention(backend: str, calls: list[str], attend: Any) -> Any:
    from kvcache_compress import reference

    calls.append(backend)
    return {"torch": reference.attend, "cpp": attend}[backend]
