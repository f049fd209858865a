"""SmolLM2 under load on this CPU: `kvcache-compress serve` beside `transformers serve`, at equal memory.

    python benchmarks/serving.py --text FILE --memory 64MiB --output results.jsonl

Every cache answers the same prompts, asked by many clients at once, as streams of greedy tokens. Prints and appends one
JSON line per cache. With `--leaving`, clients leave at random.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml

from kvcache_compress import load_config
from kvcache_compress.eval.provenance.results import circumstances
from kvcache_compress.modeling.decoder import head_dim_of, kv_heads_of
from kvcache_compress.modeling.loading import load_model
from kvcache_compress.serving.engine.plan import bytes_of

PAGE, PORT = 64, 8123
CACHES = ("dense", "turboquant-4bit", "turboquant-3bit", "turboquant-2bit", "best-3bit")
TOOLS = Path(sys.executable).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="text file that prompts are cut from")
    parser.add_argument("--memory", default="64MiB")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--shortest", type=int, default=200)
    parser.add_argument("--longest", type=int, default=2000)
    parser.add_argument("--new", type=int, default=128, help="most new tokens of a request")
    parser.add_argument("--recent", type=int, default=32, help="recent window of the pages")
    parser.add_argument("--leaving", type=float, default=0, help="share of the clients that leave before the end")
    parser.add_argument("--cache", action="append", help="a preset or 'dense'")
    parser.add_argument("--output")
    args = parser.parse_args()
    model, tokenizer = load_model(dtype=torch.bfloat16)
    ids = tokenizer(Path(args.text).read_text(encoding="utf-8"), verbose=False)["input_ids"]
    chosen = random.Random(0)
    lengths = [chosen.randrange(args.shortest, args.longest) for _ in range(args.requests)]
    starts = [chosen.randrange(1024, len(ids) - args.longest) for _ in range(args.requests)]
    prompts = [tokenizer.decode(ids[i : i + count]) for i, count in zip(starts, lengths, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        token = 4 * model.config.num_hidden_layers * kv_heads_of(model.config) * head_dim_of(model.config)
        del model
        for name in args.cache or CACHES:
            with serving(command(name, folder, token, args)) as process:
                before = resident(process)
                row = {"cache": name, "memory": args.memory, **asyncio.run(load(prompts, folder, args))}
                row["resident MiB"] = {"before": before, "after": resident(process)}
            print(row, flush=True)
            if args.output:
                with open(args.output, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row | circumstances(torch.device("cpu"))) + "\n")


def command(name: str, folder: str, token: int, args: Any) -> list[str]:
    """Command of a cache's server; `token` is the size of a dense token in bytes."""
    common = [folder, "--port", str(PORT), "--dtype", "bfloat16"]
    if name == "dense":
        blocks = ["--cb-block-size", str(PAGE), "--cb-num-blocks", str(bytes_of(args.memory) // (token * PAGE))]
        return [str(TOOLS / "transformers"), "serve", *common, "--continuous-batching", *blocks]
    config = Path(folder) / "cache.yaml"
    config.write_text(yaml.safe_dump(load_config(name).changed(recent_tokens=args.recent).model_dump(mode="json")))
    return [str(TOOLS / "kvcache-compress"), "serve", *common, "--cache", str(config), "--memory", args.memory]


@contextmanager
def serving(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server from its first answer to the end of the block."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            time.sleep(0.2)
            try:
                if httpx.get(f"http://localhost:{PORT}/health").status_code == 200:
                    break
            except httpx.TransportError:
                if process.poll() is not None:
                    raise RuntimeError(f"the server has stopped: {' '.join(words)}") from None
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def resident(process: subprocess.Popen[bytes]) -> int:
    """Memory of a server's process, in MiB."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


async def load(prompts: list[str], model: str, args: Any) -> dict[str, Any]:
    """Ask for all answers, `args.clients` at once, and measure them."""
    chosen, errors = random.Random(1), dict[str, int]()
    stamps: list[list[float]] = []
    tokens = left = 0
    firsts: list[float] = []

    async def ask(client: httpx.AsyncClient, prompt: str) -> None:
        nonlocal tokens, left
        leaves = chosen.randrange(1, args.new) if chosen.random() < args.leaving else None
        body = {"model": model, "prompt": prompt, "max_tokens": args.new, "temperature": 0, "stream": True}
        begin, own = time.perf_counter(), list[float]()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if response.status_code != 200 or '"error"' in line:
                    errors[line[:80]] = errors.get(line[:80], 0) + 1
                    return
                if not line.startswith("data: {"):
                    continue
                if (usage := json.loads(line[6:]).get("usage")) is not None:
                    tokens += usage["completion_tokens"]
                else:
                    own.append(time.perf_counter())
                if leaves is not None and len(own) >= leaves:
                    left, tokens = left + 1, tokens + len(own)
                    break
        firsts.append(own[0] - begin)
        stamps.append(own)

    async def work(client: httpx.AsyncClient, queue: Iterator[str]) -> None:
        for prompt in queue:
            await ask(client, prompt)

    limits = httpx.Limits(max_connections=args.clients)
    begin = time.perf_counter()
    async with httpx.AsyncClient(base_url=f"http://localhost:{PORT}", timeout=None, limits=limits) as client:
        await asyncio.wait_for(client.get("/health"), 60)
        queue = iter(prompts)
        await asyncio.gather(*(work(client, queue) for _ in range(args.clients)))
    seconds = time.perf_counter() - begin
    ends = sorted([(one[0], 1) for one in stamps] + [(one[-1], -1) for one in stamps])
    gaps = statistics.quantiles([1e3 * (b - a) for one in stamps for a, b in itertools.pairwise(one)], n=100)
    return {
        "seconds": round(seconds, 1), "tokens/s": round(tokens / seconds, 2), "answers": len(stamps), "left": left,
        "errors": errors, "requests": max(itertools.accumulate(step for _, step in ends)),
        "first token s": {"median": round(statistics.median(firsts), 1), "last": round(max(firsts), 1)},
        "next token ms": {"median": round(gaps[49]), "p95": round(gaps[94]), "p99": round(gaps[98])},
    }  # fmt: skip


if __name__ == "__main__":
    main()
