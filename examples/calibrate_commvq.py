"""Calibrate CommVQ's codebooks on a text, then use them: `python examples/calibrate_commvq.py`.

The command line does the first part: `kvcache-compress calibrate --model MODEL --text TEXT.txt --output FILE`.
The defaults only show the steps; good codebooks need 55,296 tokens and 21 rounds.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from kvcache_compress import CommVQCache, enable_fused_attention
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT
from kvcache_compress.methods.commvq.calibration import CommVQSettings, calibrate_commvq
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="hub id or folder")
parser.add_argument("--text", default=str(DEFAULT_TEXT), help="a text file")
parser.add_argument("--tokens", type=int, default=2048)
parser.add_argument("--rounds", type=int, default=3, help="rounds of keys and of values")
parser.add_argument("--centres", type=int, default=16, help="centres N of a round's codebook")
arguments = parser.parse_args()

model, tokenizer = load_model(arguments.model)
rounds = {"key_rounds": arguments.rounds, "value_rounds": arguments.rounds}
settings = CommVQSettings.quick(tokens=arguments.tokens, context=256, centres=arguments.centres, **rounds)

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "my.safetensors"
    losses = calibrate_commvq(model, tokenizer, [arguments.text], file, settings)
    print(f"{len(losses)} layers, {file.stat().st_size / 2**20:.1f} MiB; relative error of keys by round:")
    for windows, kind in (("trained on", "rounds"), ("held out", "held_out")):
        heads = [head for layer in losses.values() for head in layer["keys"][kind]]
        print(f"{windows:10}", " ".join(f"{statistics.fmean(errors):.3f}" for errors in zip(*heads, strict=True)))

    enable_fused_attention(model)
    cache = CommVQCache(model.config, codebooks=str(file))
    prompt = "The lighthouse on the cape was built of granite. " * 40 + "The lighthouse on the cape was built of"
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, **{cache_argument(): cache}, max_new_tokens=4, do_sample=False)
    print("..." + tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))
    print(f"{cache.packed_tokens} tokens packed, {cache.memory_report().packed_bits_per_number:.2f} bits per number")
