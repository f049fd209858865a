"""Generate from two prompts of different length with a compressed cache: `python examples/generate.py`."""

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.modeling.loading import load_model

model, tokenizer = load_model("smollm2-135m")
enable_fused_attention(model)

# The second prompt is padded on the left; its padding is masked as with any other cache.
prompts = ["The lighthouse on the cape was built of granite. " * 30, "Once upon a time there was a harbour town. " * 20]
inputs = tokenizer(prompts, return_tensors="pt", padding=True)

cache = CompressedCache(model.config, "examples/mixed.yaml")
output = model.generate(**inputs, past_key_values=cache, max_new_tokens=24, do_sample=False)
for row in output:
    print(repr(tokenizer.decode(row[-24:], skip_special_tokens=True)))
print(cache.memory_report())
