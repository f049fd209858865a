"""Format GPU measurements as text: a line for each row, and tables of a complete result file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from .jobs import KEYS, PARALLEL, Job
from .predicted import KERNEL, predicted_ms
from .result_file import measured

TITLES = {
    "bandwidth": "copy within the device's memory",
    "memory": "kernels under the memory checker, tiny",
    "check": "kernels against PyTorch's operators",
    "decode": "decode attention of one layer",
    "profile": "counters of attention kernels",
    "tile": "tiles of the attention kernel",
    "models": "a whole model",
    "graph": "steps of a static cache, replayed from a CUDA graph",
    "longest": "the longest context that fits beside the weights",
    "prefill": "a whole model's prompt",
    "encode": "encoding a prompt's keys and values, one layer",
}
SECONDS = {
    "bandwidth": 15, "memory": 45, "check": 10, "decode": 1, "profile": 30, "tile": 8, "models": 8, "graph": 8,
    "longest": 20, "prefill": 6, "encode": 1,
}  # fmt: skip
"""Seconds that a row is expected to take, one after the other: estimates, of which none was measured."""


def line(part: str, row: Mapping[str, Any]) -> str:
    """Format a row of a part as one line."""
    where = f"{part:9} {row['cache']:26} {row.get('shape', ''):13}"
    if "batch" in row:
        where += f" B {row['batch']:2}"
    if "tokens" in row:
        where += f" x {row['tokens']:7}"
    if row.get("call", "plain") != "plain" or "loop" in row:
        where += f" {row.get('loop') or row['call']}"
    text = row["error"] if row.get("error") is not None else _figures(part, row)
    return f"{where}: {text}" + (f", INVALID: {row['invalid']}" if row.get("invalid") else "")


def _figures(part: str, row: Mapping[str, Any]) -> str:
    peak = "" if row.get("peak_gib") is None else f", peak {row['peak_gib']:.1f} GiB"
    speedup = "" if row.get("speedup") is None else f", {row['speedup']:.2f}x"
    if part in ("check", "memory"):
        return f"attention differs by {row['attention_error']:.1e}, codes by {row['differing_codes']:.1e}"
    if part == "bandwidth":
        return f"{row['gigabytes_per_second']:.1f} GB/s, read and written"
    if part == "decode":
        times = f"{row['milliseconds']:8.3f} ms, {row['gigabytes_per_second']:7.1f} GB/s at {row['bits']:.2f} bits"
        kernels = ", ".join(f"{name} {time:.3f}" for name, time in (row.get("kernels") or {}).items())
        libraries = "; ".join(f"{name} {_short(found)}" for name, found in (row.get("libraries") or {}).items())
        return f"{times}{speedup}, bound {16 / row['bits']:.2f}x" + "".join(
            f" [{text}]" for text in (kernels, libraries) if text
        )
    if part == "profile":
        return ", ".join(f"{name} {value:g}" for name, value in row["counters"].items())
    if part == "tile":
        tile = f"{row['block']} tokens, {row['warps']} warps, {row['stages']} stages"
        return f"{tile}: {row['milliseconds']:.3f} ms, by rule {row['rule_milliseconds']:.3f} ms"
    if part == "encode":
        return f"{row['milliseconds']:8.3f} ms, {row['gigabytes_per_second']:7.1f} GB/s of input"
    if part == "models":
        filled = f"cache {row['cache_gib']:.2f} GiB{peak}, filled in {row['fill_seconds']:.2f} s"
        return f"{row['tokens_per_second']:8.1f} tokens/s{speedup}, {filled}"
    if part == "prefill":
        compared = row.get("ratio") is not None and row["cache"] != "full"
        added = f", {row['ratio'] - 1:+.1%} beside full" if compared else ""
        return f"{row['seconds']:8.3f} s in chunks of {row['chunk']}{added}{peak}"
    if part == "graph":
        return f"attention differs by {row['attention_error']:.1e} at most"
    return f"cache {row['cache_gib']:.2f} GiB; then: {row['end']}"


def _short(found: float | str) -> str:
    return found[:60] if isinstance(found, str) else f"{found:.3f}"


def tables(contents: Mapping[str, Any]) -> str:
    """Format a result file: decoding as a table per shape, other parts line by line, then what was not measured."""
    texts = []
    copied = next((row.get("gigabytes_per_second") for row in contents["bandwidth"]), None)
    for part in KEYS:
        rows = [row for row in contents[part] if measured(row)]
        if rows:
            texts.append(f"\n{TITLES[part]}")
            texts += _decode_table(rows, copied) if part == "decode" else [line(part, row) for row in rows]
    left = [(part, row) for part in KEYS for row in contents[part] if not measured(row)]
    if left:
        texts += [
            "\nnot measured, and why",
            *(f"{Job.of(part, row)}{row['error'].partition(':')[2]}" for part, row in left),
        ]
    return "\n".join(texts)


HEADINGS = ("ms", "speed-up", "bound", "GB/s", "of copy", "kernel ms", "predicted", "bound by")


def _decode_table(rows: Sequence[Mapping[str, Any]], copied: float | None) -> list[str]:
    """A line per row: time, speed-up over full and its bound, bandwidth, and the kernel beside its prediction."""
    texts = []
    for place in dict.fromkeys((row["shape"], row["batch"], row["tokens"]) for row in rows):
        shape, batch, tokens = place
        texts.append(f"{f'{shape}, {batch} x {tokens}':34}" + "".join(f"{heading:>11}" for heading in HEADINGS))
        for row in rows:
            if (row["shape"], row["batch"], row["tokens"]) != place:
                continue
            name = row["cache"] + ("" if row["call"] == "plain" else f", {row['call']}")
            if row.get("error") is not None:
                texts.append(f"{name:34} {row['error']}")
                continue
            note = f"  INVALID: {row['invalid']}" if row.get("invalid") else ""
            texts.append(f"{name:34}" + "".join(f"{cell:>11}" for cell in _cells(row, copied)) + note)
    return texts


def _cells(row: Mapping[str, Any], copied: float | None) -> tuple[str, ...]:
    kernel = (row.get("kernels") or {}).get(KERNEL)
    return (
        f"{row['milliseconds']:.3f}",
        "-" if row.get("speedup") is None else f"{row['speedup']:.2f}x",
        f"{16 / row['bits']:.2f}x",
        f"{row['gigabytes_per_second']:.1f}",
        "-" if copied is None else f"{row['gigabytes_per_second'] / copied:.0%}",
        "-" if kernel is None else f"{kernel:.3f}",
        "-" if row.get("predicted_ms") is None else f"{row['predicted_ms']:.3f}",
        row.get("predicted_bound", "-"),
    )


def plan_text(jobs: Sequence[Job], processes: int) -> str:
    """The time plan, stage by stage, and the predictions for the decode rows, with nothing measured."""
    texts = [f"{processes} processes compile; seconds are estimates, predictions for the H200: nothing is measured\n"]
    seconds = 0.0
    for part, group in groupby(jobs, key=lambda job: job.part):
        rows = list(group)
        at_once = min(processes, len(rows)) if part in PARALLEL else 1
        cost = SECONDS[part] * math.ceil(len(rows) / at_once)
        seconds += cost
        which = f"{rows[0]}{'' if len(rows) == 1 else f' ... {rows[-1]}'}"
        texts.append(f"{part:9} {len(rows):4} rows {cost:5} s, until {seconds / 60:5.1f} min: {which}")
    texts.append(f"\n{'attention kernel, ms':62} {'predicted':>9}  bound by")
    for job in (job for job in jobs if job.part == "decode"):
        if (found := predicted_ms(job.named)) is not None:
            texts.append(f"{job!s:62} {found[0]:9.4f}  {found[1]}")
    return "\n".join(texts)
