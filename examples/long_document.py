"""Read a long document and compare the peak memory with `DynamicCache`: `python examples/long_document.py`.

The document is read in chunks, so only the cache grows. Each cache runs in a process of its own. Its peak is the most
memory that the process holds beyond the loaded model, or on a GPU the most that PyTorch allocates.
"""

import argparse
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from transformers import DynamicCache

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="hub id, folder or .gguf file")
parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="a file, repeated if it is too short")
parser.add_argument("--tokens", type=int, default=4096)
parser.add_argument("--cache", help="one cache, in this process: full, or a preset or YAML file")
arguments = parser.parse_args()


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes held while `run` runs, beyond those held before."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    held, finished = [psutil.Process().memory_info().rss], threading.Event()

    def watch() -> None:
        while not finished.wait(0.002):
            held.append(psutil.Process().memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    finished.set()
    watcher.join()
    return max(held) - held[0]


def measure(name: str) -> None:
    model, tokenizer = load_model(arguments.model, device="cuda" if torch.cuda.is_available() else None)
    enable_fused_attention(model)
    ids = tokenizer(arguments.text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids
    ids = ids.repeat(1, -(-arguments.tokens // ids.shape[1]))[:, : arguments.tokens].to(model.device)

    def read(document: torch.Tensor) -> None:
        cache = DynamicCache(config=model.config) if name == "full" else CompressedCache(model.config, name)
        how = {"prefill_chunk_size": 256, "max_new_tokens": 4, "do_sample": False}
        model.generate(document, attention_mask=torch.ones_like(document), **{cache_argument(): cache}, **how)

    read(ids[:, :32])  # brings the weights into memory
    print(f"{name:16}{peak_bytes(lambda: read(ids)) / 2**20:6.1f} MiB")


if arguments.cache:
    measure(arguments.cache)
else:
    print(f"peak memory beyond the model, {arguments.tokens} tokens:")
    for name in ("full", "turboquant-4bit"):
        command = [sys.executable, __file__, *sys.argv[1:], "--cache", name]
        print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, end="")
