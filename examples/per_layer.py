"""Give layers methods and bits of their own by a YAML file: `python examples/per_layer.py`."""

import argparse
from pathlib import Path

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="hub id, folder or .gguf file")
parser.add_argument("--config", default=Path(__file__).with_name("mixed.yaml"), help="YAML file or preset")
arguments = parser.parse_args()

model, tokenizer = load_model(arguments.model)
enable_fused_attention(model)
cache = CompressedCache(model.config, arguments.config)
prompt = "The lighthouse on the cape was built of granite. " * 30 + "The lighthouse on the cape was built of"
inputs = tokenizer(prompt, return_tensors="pt")
output = model.generate(**inputs, **{cache_argument(): cache}, max_new_tokens=4, do_sample=False)
print("..." + tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))
print(cache.memory_report())
