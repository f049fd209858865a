"""Continuous batching of SmolLM2 on this CPU: compressed pages beside Transformers' own, at equal memory.

    python benchmarks/batching.py --text FILE --memory 64MiB --output results.jsonl

Each cache serves the same requests, greedy and of fixed lengths, which all wait from the start. Prints and appends one
JSON line per cache.
"""

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvcache_compress import compress, load_config
from kvcache_compress.eval.provenance.results import circumstances
from kvcache_compress.modeling.decoder import head_dim_of, kv_heads_of
from kvcache_compress.modeling.loading import load_model
from kvcache_compress.serving.plan import bytes_of

PAGE = 64
CACHES = ("dense", "turboquant-4bit", "turboquant-3bit", "turboquant-2bit", "best-3bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="text file that prompts are cut from")
    parser.add_argument("--memory", default="64MiB")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--shortest", type=int, default=200)
    parser.add_argument("--longest", type=int, default=900)
    parser.add_argument("--new", type=int, default=64, help="new tokens of a request")
    parser.add_argument("--recent", type=int, help="recent window of the pages")
    parser.add_argument("--cache", action="append", help="a preset or 'dense'")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(max_new_tokens=args.new, do_sample=False, eos_token_id=-1)
    ids = tokenizer(Path(args.text).read_text(encoding="utf-8"), verbose=False)["input_ids"]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(args.shortest, args.longest, (args.requests,), generator=generator).tolist()
    starts = torch.randint(1024, len(ids) - args.longest, (args.requests,), generator=generator).tolist()
    prompts = [ids[start : start + count] for start, count in zip(starts, lengths, strict=True)]
    for name in args.cache or CACHES:
        row = {"cache": name, "memory": args.memory, **served(model, name, prompts, ids[:1024], args)}
        print(row, flush=True)
        if args.output:
            with open(args.output, "a", encoding="utf-8") as file:
                file.write(json.dumps(row | circumstances(model.device)) + "\n")


def served(model: Any, name: str, prompts: list[list[int]], text: list[int], args: Any) -> dict[str, Any]:
    """Serve all prompts with a cache, and what that took."""
    memory = bytes_of(args.memory, model.device)
    batching: dict[str, Any] = {"page_size": PAGE, "max_batch_tokens": 1024, "allow_block_sharing": False}
    block: Any = nullcontext()
    if name == "dense":
        token = 4 * model.config.num_hidden_layers * kv_heads_of(model.config) * head_dim_of(model.config)
        batching["num_blocks"] = memory // (token * PAGE)
    else:
        config = load_config(name)
        config = config if args.recent is None else config.changed(recent_tokens=args.recent)
        block = compress(model, config, memory=memory, statistics=text)
    with (
        block,
        model.continuous_batching_context_manager(
            continuous_batching_config=ContinuousBatchingConfig(**batching)
        ) as manager,
    ):
        begin = time.perf_counter()
        names = manager.add_requests(prompts, max_new_tokens=args.new, record_timestamps=True)
        found: dict[str, Any] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=600)
            found[result.request_id] = result
        seconds = time.perf_counter() - begin
    outputs = [found[one] for one in names]
    assert not any(one.error for one in outputs), [one.error for one in outputs]
    return {"seconds": round(seconds, 2), "tokens/s": round(len(names) * args.new / seconds, 2), **held(outputs, begin)}


def held(outputs: list[Any], begin: float) -> dict[str, Any]:
    """Most requests and tokens at once, and percentiles of times in milliseconds."""
    most_requests = most_tokens = 0
    for moment in sorted(one.lifespan[0] for one in outputs):
        running = [one for one in outputs if one.lifespan[0] <= moment < one.lifespan[1]]
        most_requests = max(most_requests, len(running))
    for moment in sorted(stamp for one in outputs for stamp in one.timestamps):
        running = [one for one in outputs if one.lifespan[0] <= moment < one.lifespan[1]]
        written = sum(len(one.prompt_ids) + sum(stamp <= moment for stamp in one.timestamps) for one in running)
        most_tokens = max(most_tokens, written)
    first = sorted(1e3 * (one.timestamps[0] - begin) for one in outputs)
    steps = [1e3 * (b - a) for one in outputs for a, b in zip(one.timestamps, one.timestamps[1:], strict=False)]
    cuts = statistics.quantiles(steps, n=20)
    return {
        "requests": most_requests, "tokens": most_tokens,
        "first token ms": {"median": round(statistics.median(first)), "last": round(first[-1])},
        "next token ms": {"median": round(statistics.median(steps)), "p95": round(cuts[-1])},
    }  # fmt: skip


if __name__ == "__main__":
    main()
