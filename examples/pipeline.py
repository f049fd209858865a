"""Compress what a pipeline generates, without a change to its call: `python examples/pipeline.py`."""

import argparse

from transformers import GenerationConfig, pipeline

from kvcache_compress import compress
from kvcache_compress.modeling.loading import load_model

TEXT = "The lighthouse on the cape was built of granite in 1841, and its keeper was called Amos. " * 16
PROMPTS = [f"{TEXT}The lighthouse was built of", f"{TEXT}Its keeper was called"]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="hub id, folder or .gguf file")
parser.add_argument("--preset", default="best-2bit")
arguments = parser.parse_args()

model, tokenizer = load_model(arguments.model)
generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
short = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.pad_token_id)

with compress(model, arguments.preset) as compression:  # fused attention is on within the block
    results = generator(PROMPTS, batch_size=2, return_full_text=False, generation_config=short)

for prompt, (result,) in zip(PROMPTS, results, strict=True):
    print(f"...{prompt[len(TEXT) :]} -> {result['generated_text']!r}")
report = compression.last_cache.memory_report()
print(f"{report.packed_tokens} tokens packed, {report.packed_bits_per_number:.2f} bits per number")
