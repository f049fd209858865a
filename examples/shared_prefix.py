"""Compress a prefix once, save it, and load it for one question after another: `python examples/shared_prefix.py`."""

import tempfile
from pathlib import Path

import torch

from kvcache_compress import CompressedCache, TurboQuantCache, enable_fused_attention
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

model, tokenizer = load_model("smollm2-135m")
enable_fused_attention(model)

text = "The lighthouse on the cape was built of granite in 1841, and its keeper was called Amos.\n" * 12
prefix = tokenizer(text, return_tensors="pt").input_ids
questions = ["The lighthouse was built of", "The lighthouse was built in the year", "Its keeper's name was"]

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "prefix.safetensors"

    cache = TurboQuantCache(model.config, bits=4)
    with torch.no_grad():
        model(prefix, **{cache_argument(): cache})
    cache.save(path)
    tokens, size = cache.get_seq_length(), path.stat().st_size / 1024
    print(f"{tokens} tokens, {cache.packed_tokens} of them packed, in a file of {size:.0f} KiB")

    # Each question gets a cache of its own; generate feeds only what follows the prefix.
    for question in questions:
        cache = CompressedCache.load(path, model.config)
        new = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
        output = model.generate(
            torch.cat([prefix, new], 1), **{cache_argument(): cache}, max_new_tokens=6, do_sample=False
        )
        print(question, "...", tokenizer.decode(output[0, tokens + new.shape[1] :]).strip())
