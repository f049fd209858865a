"""`kvcache-compress build`."""

from __future__ import annotations

from .console import console, fail


def build() -> None:
    """Compile the CPU kernels now, once for this machine, instead of at their first use."""
    from kvcache_compress.cpu_kernels.build import problem

    if reason := problem():
        fail(f"the CPU kernels are unavailable: {reason}")
    console.print("the CPU kernels are built")
