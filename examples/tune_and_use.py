"""Tune a cache for a model and a budget, then use the file: `python examples/tune_and_use.py`.

The command line does the first part: `kvcache-compress tune --model MODEL --text TEXT.txt --bits 2.5 --output my.yaml`.
"""

import argparse
import tempfile
from pathlib import Path

import yaml

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT
from kvcache_compress.eval.tuning.run import tune_config
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="hub id or folder")
parser.add_argument("--text", type=Path, default=DEFAULT_TEXT)
parser.add_argument("--bits", type=float, default=2.5)
parser.add_argument("--base", default="best-2bit", help="preset or YAML file: methods and dense tokens")
parser.add_argument("--level", type=float, action="append", help="bits that a side may have; repeatable")
parser.add_argument("--windows", type=int, default=2, help="windows of text to measure on")
parser.add_argument("--prefix", type=int, default=1024, help="tokens of a window that are compressed")
parser.add_argument("--scored", type=int, default=96, help="tokens of a window whose loss is measured")
arguments = parser.parse_args()
options = {name: getattr(arguments, name) for name in ("bits", "base", "windows", "prefix", "scored")}
options |= {"levels": arguments.level} if arguments.level else {}

with tempfile.TemporaryDirectory() as folder:
    output = Path(folder) / "my.yaml"
    tune_config(arguments.model, [arguments.text], output, **options)
    print("".join(line for line in output.open(encoding="utf-8") if line.startswith("#")), end="")
    print(f"{len(yaml.safe_load(output.read_text(encoding='utf-8'))['layers'])} rules for single layers")

    model, tokenizer = load_model(arguments.model)
    enable_fused_attention(model)
    cache = CompressedCache(model.config, output)
    prompt = "The lighthouse on the cape was built of granite. " * 40 + "The lighthouse on the cape was built of"
    inputs = tokenizer(prompt, return_tensors="pt")
    output_ids = model.generate(**inputs, **{cache_argument(): cache}, max_new_tokens=4, do_sample=False)
    print("..." + tokenizer.decode(output_ids[0, inputs.input_ids.shape[1] :]))
    print(f"{cache.packed_tokens} tokens packed, {cache.memory_report().packed_bits_per_number:.2f} bits per number")
