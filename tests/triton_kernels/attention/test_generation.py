"""A model that generates through the kernels, in the interpreter, against the torch backend."""

import gc
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import small_model
from support.recorded_paths import PathTaken, record_paths

from kvcache_compress import CompressedCache, enable_fused_attention

# The interpreter takes minutes to search trellis codes, so the keys of one case have them.
_SCALAR = {"method": "turboquant", "bits": 2.5, "codebook": "lloyd_max"}
_TURBOQUANT = {"keys": {"method": "turboquant", "bits": 4}, "values": _SCALAR}
_KIVI = {"keys": {"method": "kivi", "bits": 4}, "values": _SCALAR}
_SPECTRAL = {"keys": {"method": "spectral", "bits": 3, "group": 32}, "values": _SCALAR}


@pytest.mark.parametrize(
    ("sides", "capacity", "layers"),
    [(_TURBOQUANT, None, 2), (_KIVI, 80, 2), (_SPECTRAL, None, 1), (_SPECTRAL, 96, 1)],
    ids=["turboquant", "static", "spectral", "spectral-static"],
)
def test_generation_equals_the_torch_backend(sides: Any, capacity: int | None, layers: int, one_era: None) -> None:
    """Growing and static caches: with a static capacity, kernels read the number of tokens from memory.

    The second step after a prompt of 75 tokens packs more, and a third attends to it.
    """
    prompt, new = (72, 3) if layers == 2 else (75, 4)
    model = small_model(layers, vocab_size=96, hidden_size=96, num_attention_heads=6, head_dim=64)
    enable_fused_attention(model)
    ids = torch.randint(1, 96, (2, prompt), generator=torch.Generator(torch.get_default_device()).manual_seed(3))
    padding = torch.ones_like(ids)
    ids[1, :11], padding[1, :11] = 0, 0
    runs = {}
    for backend in ("torch", "triton"):
        config = {**sides, "sink_tokens": 4, "recent_tokens": 8, "backend": backend, "max_cache_len": capacity}
        cache = CompressedCache(model.config, config)
        with record_paths() as taken:
            runs[backend] = model.generate(
                ids, attention_mask=padding, **with_cache(cache), max_new_tokens=new, do_sample=False,
                disable_compile=True, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        assert taken.count(PathTaken(backend, 1)) == layers * (new - 1)
        assert all(layer.packed_tokens == (32 if new == 3 else 64) for layer in cache.layers)
    assert torch.equal(runs["torch"].sequences, runs["triton"].sequences)
    torch.testing.assert_close(torch.stack(runs["torch"].logits), torch.stack(runs["triton"].logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("sides", "backend"),
    [(_TURBOQUANT, "triton"), (_SPECTRAL, "triton"), (_TURBOQUANT, "torch")],
    ids=["turboquant", "spectral", "torch"],
)
def test_a_static_step_keeps_no_memory(sides: dict[str, Any], backend: str, one_era: None, static_shapes: None) -> None:
    """CUDA graphs that `generate` records for static caches refuse it; masks of left-padded rows count, too."""
    model = small_model(1).to(torch.bfloat16)
    model.model.layers[0].self_attn.k_proj.weight.data[5] *= 64  # outlier channels have factors in the basis
    enable_fused_attention(model)
    cache = CompressedCache(
        model.config, {**sides, "sink_tokens": 4, "recent_tokens": 8, "max_cache_len": 112, "backend": backend}
    )
    ids, padding = torch.randint(1, 64, (2, 98)), torch.ones(2, 98, dtype=torch.long)
    padding[1, :11] = 0

    def memory() -> dict[int, torch.Tensor]:
        """Tensors by address; they stay alive, so that no later one gets an address again."""
        gc.collect()
        return {x.untyped_storage().data_ptr(): x for x in gc.get_objects() if type(x) is torch.Tensor}

    held = []
    with torch.no_grad():
        for start, stop in ((0, 96), (96, 97), (97, 98)):
            model(ids[:, start:stop], attention_mask=padding[:, :stop], **with_cache(cache))
            held.append(memory())
    assert held[0].keys() >= held[1].keys() >= held[2].keys()
