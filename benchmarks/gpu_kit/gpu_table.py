"""Format GPU measurements as text: a line for each row, and tables of a complete result file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .jobs import KEYS, Job
from .result_file import measured

TITLES = {
    "check": "kernels against PyTorch's operators",
    "bandwidth": "copy within the device's memory",
    "decode": "decode attention of one layer",
    "encode": "encoding a prompt's keys and values, one layer",
    "models": "a whole model",
    "prefill": "a whole model's prompt",
    "longest": "the longest context that fits beside the weights",
    "graph": "steps of a static cache, replayed from a CUDA graph",
}


def line(part: str, row: Mapping[str, Any]) -> str:
    """Format a row of a part as one line."""
    where = f"{part:9} {row['cache']:26} {row.get('shape', ''):13}"
    if "batch" in row:
        where += f" B {row['batch']:2}"
    if "tokens" in row:
        where += f" x {row['tokens']:7}"
    return f"{where}: {row['error'] if row.get('error') is not None else _figures(part, row)}"


def _figures(part: str, row: Mapping[str, Any]) -> str:
    peak = "" if row.get("peak_gib") is None else f", peak {row['peak_gib']:.1f} GiB"
    if part == "check":
        return f"attention differs by {row['attention_error']:.1e}, codes by {row['differing_codes']:.1e}"
    if part == "bandwidth":
        return f"{row['gigabytes_per_second']:.1f} GB/s, read and written"
    if part == "decode":
        times = f"{row['milliseconds']:8.3f} ms, {row['gigabytes_per_second']:7.1f} GB/s at {row['bits']:.2f} bits"
        speedup = "" if row.get("speedup") is None else f", {row['speedup']:.2f}x"
        return f"{times}{speedup}, bound {16 / row['bits']:.2f}x"
    if part == "encode":
        return f"{row['milliseconds']:8.3f} ms, {row['gigabytes_per_second']:7.1f} GB/s of input"
    if part == "models":
        filled = f"cache {row['cache_gib']:.2f} GiB{peak}, filled in {row['fill_seconds']:.2f} s"
        return f"{row['tokens_per_second']:8.1f} tokens/s, {filled}"
    if part == "prefill":
        compared = row.get("ratio") is not None and row["cache"] != "full"
        added = f", {row['ratio'] - 1:+.1%} beside full" if compared else ""
        return f"{row['seconds']:8.3f} s in chunks of {row['chunk']}{added}{peak}"
    if part == "graph":
        return f"attention differs by {row['attention_error']:.1e} at most"
    return f"cache {row['cache_gib']:.2f} GiB; then: {row['end']}"


def tables(contents: Mapping[str, Any]) -> str:
    """Format a result file: decoding as a table per shape, other parts line by line, then what was not measured."""
    texts = []
    copied = next((row.get("gigabytes_per_second") for row in contents["bandwidth"]), None)
    for part in KEYS:
        rows = [row for row in contents[part] if measured(row)]
        if rows:
            texts.append(f"\n{TITLES[part]}")
            texts += _decode_tables(rows, copied) if part == "decode" else [line(part, row) for row in rows]
    left = [(part, row) for part in KEYS for row in contents[part] if not measured(row)]
    if left:
        texts += [
            "\nnot measured, and why",
            *(f"{Job.of(part, row)}{row['error'].partition(':')[2]}" for part, row in left),
        ]
    return "\n".join(texts)


def _decode_tables(rows: Sequence[Mapping[str, Any]], copied: float | None) -> list[str]:
    """Tables per shape and batch, with a row per cache and a column per length."""
    texts = ["each: ms, times full's speed, of what the smaller number of bytes allows, GB/s, share of a copy's"]
    for shape, batch in dict.fromkeys((row["shape"], row["batch"]) for row in rows):
        mine = [row for row in rows if (row["shape"], row["batch"]) == (shape, batch)]
        cells = {(row["cache"], row["tokens"]): _cell(row, copied) for row in mine}
        lengths = sorted({row["tokens"] for row in mine})
        texts.append(f"{f'{shape}, batch {batch}':28}" + "".join(f"{tokens:>42}" for tokens in lengths))
        for cache in dict.fromkeys(row["cache"] for row in mine):
            texts.append(f"{cache:28}" + "".join(f"{cells.get((cache, tokens), '-'):>42}" for tokens in lengths))
        texts += [line("decode", row) for row in mine if row.get("error") is not None]
    return texts


def _cell(row: Mapping[str, Any], copied: float | None) -> str:
    if row.get("error") is not None:
        return "failed"
    speedup = "" if row.get("speedup") is None else f"{row['speedup']:.2f}x of "
    share = "" if copied is None else f" {row['gigabytes_per_second'] / copied:4.0%}"
    figures = f"{row['milliseconds']:.3f} {speedup}{16 / row['bits']:.2f}x"
    return f"{figures} {row['gigabytes_per_second']:.1f} GB/s{share}"
