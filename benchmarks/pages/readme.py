"""Write the tables and the plot of the README and the pages from the committed results; `--check` only compares.

python benchmarks/pages/readme.py
"""

import bisect
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import losses
from losses import RESULTS, cells_of, figure, mean_kl, table_of, tail_kl
from tables import MISSING, Table, bits_text, markdown_table

from kvcache_compress.cache.estimate import BF16_BYTES, MODELS, total_bytes
from kvcache_compress.config import load_config
from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.validation import parse_size, size_text

ROOT = Path(__file__).resolve().parents[2]
TUNED = ROOT / "benchmarks" / "comparisons" / "tuned"
LOSSES = ROOT / "configs" / "measured.json"
LADDER = {
    "hqq-4": "to compare: Transformers' `QuantizedCache`",
    "kivi-4bit@sinks=16,recent=64": "to compare: the usual baseline",
    "turboquant-4bit": "speed on a GPU",
    "best-4bit": "no visible loss",
    "best-3bit": "the best trade-off",
    "best-2bit": "about half of `best-4bit` at long contexts",
    "best-1.6bit": "the smallest without calibration",
    "turboquant-2bit": "to compare: a published method at the size of `best-2bit`",
}
"""Caches of the README's first table, and what each is good for."""
PEER_BITS = {"fp8": 8.0, "hqq-4": 4.5}
"""Bits per number of peers without dense windows or tables of their own."""
SENTENCED = ("best-3bit", "turboquant-4bit", "kivi-4bit", "hqq-4")
"""Caches whose decode step on a CPU is in the README's sentence."""
LLAMA, CONTEXTS = "llama-3.1-8b", ("8K", "32K", "128K")
SHOWN = {"smollm2-135m": "SmolLM2", LLAMA: "8B"}
SIZED = ("best-4bit", "best-3bit", "best-2bit", "best-1.6bit", "turboquant-4bit", "turboquant-2bit", "kivi-4bit")
"""Presets and contexts on the page about presets."""


def sizes_of(model: str) -> tuple[int, int, int]:
    """Numbers of layers and key/value heads, and the head dimension."""
    shape = MODELS[model]
    return shape.layers, shape.kv_heads, shape.head_dim


def llama_sizes(context: str) -> dict[str, float]:
    """Bytes of Llama-3.1-8B's cache by preset; the full cache has the key ''."""
    tokens = parse_size(context, "context")
    full = {"": 2 * BF16_BYTES * math.prod(sizes_of(LLAMA)) * tokens}
    return full | {name: total_bytes(load_config(name), *sizes_of(LLAMA), tokens) for name in SIZED}


def headline(held_out: Table) -> str:
    """The sentences on the README's first screen."""
    size = {name: f"{size / 2**30:.{2 if name else 0}f}" for name, size in llama_sizes("128K").items()}
    kl = {name: f"{cell.score:.4f}" for name, cell in cells_of(held_out, "1k").items()}
    return (
        f"At 128K tokens the key/value cache of Llama-3.1-8B takes {size['']} GiB in bfloat16, more than its "
        f"weights, and every decode step reads all of it; `best-3bit` keeps it in {size['best-3bit']} GiB "
        f"and `best-2bit` in {size['best-2bit']}. The loss of `best-3bit`, measured on SmolLM2-135M-Instruct (4-bit "
        f"GGUF weights) over six kinds of text, is a KL divergence of {kl['best-3bit']} nats per token, "
        f"against {kl['hqq-4']} for Transformers' own 4-bit cache (hqq)."
    )


def whole_bits(cache: str, model: str, tokens: int) -> float:
    """Bits per number of all that a cache holds after a prompt: of a preset, or of a peer.

    A preset with `@` has the dense windows of `best-*`.
    """
    name, _, windows = cache.partition("@")
    if name in PEER_BITS:
        return PEER_BITS[name]
    config = load_config(name).changed(sink_tokens=16, recent_tokens=64) if windows else load_config(name)
    return 8 * total_bytes(config, *sizes_of(model), tokens) / (2 * math.prod(sizes_of(model)) * tokens)


def ladder(held_out: Table) -> str:
    """Table of a few caches by falling size, and what each is good for."""
    short, long = cells_of(held_out, "1k"), cells_of(held_out, "8k")
    lines = [
        [
            name.partition("@")[0],
            bits_text(short[name].packed_bits),
            *(bits_text(cells[name].all_bits) for cells in (short, long)),
            bits_text(whole_bits(name, LLAMA, 32768)),
            *(figure(cells[name], mean_kl) for cells in (short, long)),
            figure(short[name], tail_kl),
            LADDER[name],
        ]
        for name in sorted(LADDER, key=lambda name: -(long[name].all_bits or 0))
    ]
    heads = [
        "cache", "bits", "held, 1K", "held, 8K", "held, 8B at 32K", "KL, 1K", "KL, 8K", "99.9 %, 1K", "take it for",
    ]  # fmt: skip
    return (
        f"{markdown_table(heads, lines, (0, -1))}\n\nSmolLM2-135M-Instruct, {short['hqq-4'].samples} prompts of 1,024 "
        f"tokens and {long['hqq-4'].samples} of 8,000, of [held-out "
        "texts](docs/results.md#held-out-texts). "
        "16 sinks and 64 recent tokens stay dense, also in `kivi-4bit` here, but not in Transformers' own caches."
    )


def whole_sizes() -> str:
    """Table of bits per number of whole caches of two models, and from which length on they are smaller than others."""

    def first(name: str, peer: str) -> str:
        if name in PEER_BITS:
            return MISSING
        lengths = range(144, 32768, 64)  # tokens have just been packed, and room is held for the next
        at = bisect.bisect_left(lengths, True, key=lambda n: whole_bits(name, LLAMA, n) < PEER_BITS[peer])
        return f"{lengths[at]:,}" if at < len(lengths) else MISSING

    lines = []
    for name in ("fp8", "hqq-4", *SIZED[:-1], "kivi-4bit@sinks=16,recent=64"):
        sizes = [whole_bits(name, model, tokens) for model in SHOWN for tokens in (1024, 8192, 32768)]
        lines.append([name, *map(bits_text, sizes), *(first(name, peer) for peer in ("fp8", "hqq-4"))])
    heads = [f"{model}, {length}" for model in SHOWN.values() for length in ("1K", "8K", "32K")]
    return markdown_table(["cache", *heads, "8B: below fp8 from", "below hqq-4 from"], lines)


def tuned_table() -> str:
    """Table of losses from the headers of tuned configs: tuned, and the best config without a file."""
    lines = []
    for path in sorted(TUNED.glob("*.yaml"), key=lambda path: -float(path.stem.rpartition("-")[2])):
        header = path.read_text("utf-8")
        figures = re.findall(r"  (.*): ([\d.]+) bits .*?, KL ([\d.]+ ± [\d.]+) \(99.9 %: ([\d.]+)\)", header)
        (_, *tuned), *others = figures
        best = min(others, key=lambda row: float(row[2].split()[0]))
        share = re.findall(r"KL ([\d.]+) times", header)
        lines.append([path.stem.rpartition("-")[2], *tuned, *best[1:], *share, best[0]])
    heads = ["budget", "tuned: bits", "KL", "99.9 %", "best without a file: bits", "KL", "99.9 %"]
    heads += ["tuned / best", "the best"]
    return markdown_table(heads, lines, (0, -1))


def memory_table() -> str:
    """Table of one model's estimated cache sizes, by preset and context."""
    sizes = [llama_sizes(context) for context in CONTEXTS]
    lines = [[f"`{name}`" if name else "bfloat16", *(size_text(of[name]) for of in sizes)] for name in sizes[0]]
    return markdown_table([LLAMA, *CONTEXTS], lines)


def cpu_sentence(result: dict[str, Any]) -> str:
    """Paragraph on times of a decode step at the longest context, and of the shortest prompt."""
    tokens, short = (end(row["tokens"] for row in result["rows"]) for end in (max, min))
    prompts = {row["cache"]: row["prefill_ratio"] for row in result["rows"] if row["tokens"] == short}
    rows = {row["cache"]: row for row in result["rows"] if row["tokens"] == tokens}
    others = ", ".join(f"{rows[name]['step_ms']:.0f} with `{name}`" for name in SENTENCED)
    model, _, dtype = result["model"].partition(", ")
    return (
        f"**On a CPU** a decode step of {model} in {dtype} takes {rows['full']['step_ms']:.0f} ms with the full cache "
        f"at {tokens:,} tokens, {others} ({result['hardware']['threads']} threads; [table](docs/guides/cpu.md)). "
        f"A prompt of {short:,} tokens takes {prompts['best-3bit']:.1f} times as long with `best-3bit` "
        "([more](docs/guides/cpu.md#prompts))."
    )


def cpu_table(result: dict[str, Any]) -> str:
    """Table of the time of a decode step, and of step and prompt relative to the full cache, by length."""
    counts = sorted({row["tokens"] for row in result["rows"]})
    rows: dict[str, list[str]] = {}
    for row in sorted(result["rows"], key=lambda row: row["tokens"]):
        times = f"{row['step_ms']:.0f} ms", f"{row['ratio']:.2f}x", f"{row['prefill_ratio']:.2f}x"
        rows.setdefault(row["cache"], []).extend(times)
    heads = [f"{head}, {count:,} tokens" for count in counts for head in ("step", "step / full", "prompt / full")]
    hardware = f"{result['hardware']['threads']} threads, {result['hardware']['cpu']}"
    where = f"{result['model']}, {hardware}, medians of {result['steps']} interleaved steps, {result['date'][:10]}"
    table = markdown_table(["cache", *heads], ([name, *times] for name, times in rows.items()))
    return f"{table}\n\n{where}; `{result['command']}`."


def serving_table() -> str:
    """Table of what a server with each cache holds and does, by memory."""
    lines, dense = [], 0.0
    for line in (RESULTS / "serving.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        dense = row["tokens/s"] if row["cache"] == "dense" else dense
        first, following = row["first token s"], row["next token ms"]
        lines.append([
            row["memory"], "`transformers serve`" if row["cache"] == "dense" else f"`{row['cache']}`",
            str(row["requests"]), f"{row['tokens/s']:.0f} ({row['tokens/s'] / dense:.1f}x)",
            f"{first['median']:.0f} / {first['last']:.0f} s",
            " / ".join(str(following[name]) for name in ("median", "p95", "p99")) + " ms",
        ])  # fmt: skip
    first, following = "first token, median / last", "next token, median / 95 % / 99 %"
    return markdown_table(["memory", "cache", "requests", "tokens/s", first, following], lines, (0, 1))


def render(page: str, texts: dict[str, str]) -> str:
    """The page with new text between its markers; raises ValueError unless each marker is there exactly once."""
    for name, text in texts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page must have the marker {begin} and its end exactly once")
        page = page[: page.index(begin)] + f"{begin}\n{text}\n" + page[page.index(end) :]
    return page


def pages() -> dict[Path, str]:
    """The pages by path, as the committed results have them."""
    table, budgets, held_out, answers, parts = map(table_of, ("smollm2", "budgets", "held-out", "tasks", "turns"))
    cpu = json.loads((RESULTS / "cpu.json").read_text("utf-8"))
    texts = {
        "README.md": {"headline": headline(held_out), "ladder": ladder(held_out), "cpu": cpu_sentence(cpu)},
        "docs/results.md": {
            "held-out": losses.held_out(held_out),
            "writing": losses.writing(held_out),
            "sizes": whole_sizes(),
            "peers": losses.peers(),
            "turns": losses.turns(parts),
            "long": losses.long_answers(table_of("long")),
            "perplexity": losses.perplexity(table),
            "keys": losses.keys(answers),
        },
        "docs/guides/presets.md": {"memory": memory_table()},
        "docs/guides/cpu.md": {"cpu": cpu_table(cpu)},
        "docs/guides/serve.md": {"serving": serving_table()},
        "docs/guides/tune.md": {"tuned": tuned_table()},
    }
    found = {ROOT / path: render((ROOT / path).read_text("utf-8"), parts) for path, parts in texts.items()}
    return found | {LOSSES: json.dumps(losses.losses(budgets), indent=1) + "\n"}


def check_or_write(found: dict[Path, str]) -> None:
    """Write pages or, with `--check`, exit with a message if they differ."""
    if "--check" not in sys.argv[1:]:
        for path, page in found.items():
            write_atomically(path, page)
    elif wrong := [str(path.relative_to(ROOT)) for path, page in found.items() if path.read_text("utf-8") != page]:
        sys.exit(
            f"not as the results have them; run python benchmarks/pages/{Path(sys.argv[0]).name}: {', '.join(wrong)}"
        )


def main() -> None:
    check_or_write(pages())
    if "--check" not in sys.argv[1:]:
        from pareto import plot_pareto

        plot_pareto(table_of("budgets"), "1k", ROOT / "docs" / "images" / "pareto.png")


if __name__ == "__main__":
    main()
