"""Generate from prompts of different lengths in one batch: `python examples/batch.py`.

Short prompts are padded on the left, and the padding is masked, as with any other cache.
"""

import argparse

from transformers import DynamicCache

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

PROMPTS = (
    "The lighthouse on the cape was built of granite in 1841. " * 22 + "The lighthouse was built in the year",
    "One, two, three, four, five, six, seven, eight, nine, ten. " * 9 + "One, two, three,",
    "Amos kept the light for forty years, and his daughter Ruth after him. " * 9 + "His daughter was called",
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="hub id, folder or .gguf file")
parser.add_argument("--preset", default="turboquant-4bit")
arguments = parser.parse_args()

model, tokenizer = load_model(arguments.model)
enable_fused_attention(model)
inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
compressed = CompressedCache(model.config, arguments.preset)
answers = []
for cache in (DynamicCache(config=model.config), compressed):
    output = model.generate(**inputs, **{cache_argument(): cache}, max_new_tokens=6, do_sample=False)
    answers.append(tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True))

for tokens, full, packed in zip(inputs.attention_mask.sum(1).tolist(), *answers, strict=True):
    print(f"{tokens:4} tokens, full cache: {full!r}, {arguments.preset}: {packed!r}")
report = compressed.memory_report()
print(f"{report.packed_tokens} tokens of each row packed, {report.packed_bits_per_number:.2f} bits per number")
