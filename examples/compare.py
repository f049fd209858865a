"""Read a text with the full cache and with a compressed one: `python examples/compare.py`.

The loss is the KL divergence of the next-token distribution, on the 32 tokens after the prompt (nats per token).
"""

import torch
from transformers import Cache, DynamicCache

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

model, tokenizer = load_model("smollm2-135m")  # or a hub id
enable_fused_attention(model)  # attend over the codes instead of decoding them each step
text = DEFAULT_TEXT.read_text(encoding="utf-8")
inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=512)
following = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, 512:544]


@torch.no_grad()
def log_probs(cache: Cache) -> torch.Tensor:
    model(**inputs, **{cache_argument(): cache}, logits_to_keep=1)
    return model(following, **{cache_argument(): cache}).logits.log_softmax(-1)[0]


full, compressed = DynamicCache(config=model.config), CompressedCache(model.config, "turboquant-4bit")
for cache in (full, compressed):
    output = model.generate(**inputs, **{cache_argument(): cache}, max_new_tokens=8, do_sample=False)
    print(repr(tokenizer.decode(output[0, inputs.input_ids.shape[1] :])))
print(compressed.memory_report())

reference = log_probs(DynamicCache(config=model.config))
for preset in ("turboquant-4bit", "kivi-2bit"):
    lossy = log_probs(CompressedCache(model.config, preset))
    kl = (reference.exp() * (reference - lossy)).sum(-1).mean()
    print(f"{preset} loses {kl:.4f} nats per token")
