"""NVIDIA's memory checker and profiler: how a worker runs under them, and what their logs say."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats",
)  # fmt: skip
COUNTERS = re.compile(
    r"gpu__time_duration\.sum|dram__throughput.*pct_of_peak|sm__throughput.*pct_of_peak|inst_executed_pipe_\w+.*pct"
    r"|issue_stalled_\w+\.ratio|sm__warps_active.*pct|registers_per_thread$"
)
"""Counters that a row keeps: time, shares of the peak rates of memory, processor and pipes, reasons of stalls."""


class MissingToolError(Exception):
    """A tool is not installed, with its name."""


@dataclass(frozen=True)
class Tool:
    """Command that runs another one, in which `{log}` stands for its log; `parallel` if several may run at once."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    parallel: bool = False


TOOLS = {
    "memory": Tool(
        ("compute-sanitizer", "--tool", "memcheck", "--log-file", "{log}"),
        # Out of bounds is out of an allocation: the caching allocator would hide it in blocks that it keeps.
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        parallel=True,
    ),
    "profile": Tool(
        (
            "ncu", "--clock-control", "none", "--csv", "--page", "raw", "--kernel-name", "attend_kernel",
            "--launch-skip", "1", "--launch-count", "1", "--log-file", "{log}",
            *(word for section in SECTIONS for word in ("--section", section)),
        )
    ),
}  # fmt: skip
"""Tools by the part whose workers run under them."""


def find_tool(part: str) -> Tool:
    """Tool of a part.

    Raises:
        MissingToolError: it is not installed.
    """
    tool = TOOLS[part]
    if shutil.which(tool.command[0]) is None:
        raise MissingToolError(f"{tool.command[0]} is not installed")
    return tool


def read_log(part: str, text: str) -> dict[str, Any]:
    """Fields of a row from its tool's log: counters of the profiler, or an `error` if memory was used wrongly."""
    if part == "profile":
        counters = read_counters(text)
        return {"counters": counters} if counters else {"error": f"no counters: {text.strip()[-200:]}"}
    summary = re.search(r"ERROR SUMMARY: (\d+) error", text)
    if summary is None:
        return {"error": f"no summary of the memory checker: {text.strip()[-200:]}"}
    first = re.search(r"^=+ ((?:Invalid|Misaligned|Program hit|Out-of-range).*)$", text, re.MULTILINE)
    return {"error": f"{summary[1]} errors of memory: {first[1] if first else ''}"} if int(summary[1]) else {}


def read_counters(text: str) -> dict[str, float]:
    """Counters of the last kernel in the profiler's comma-separated table, whose second line has the units."""
    table = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(table) < 3:
        return {}
    pairs = zip(table[0], table[-1], strict=False)
    numbers = {name: value.replace(",", "") for name, value in pairs if COUNTERS.search(name)}
    return {name: float(value) for name, value in numbers.items() if re.fullmatch(r"-?\d+(\.\d+)?", value)}
