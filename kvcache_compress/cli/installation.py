"""`kvcache-compress build` and `kvcache-compress doctor`: the CPU kernels, and what is installed."""

import platform
from importlib.metadata import PackageNotFoundError, version

from rich.table import Table

from .console import console, fail


def build() -> None:
    """Compile the CPU kernels now, once for this machine, instead of at their first use."""
    from kvcache_compress.cpu_kernels.build import problem

    if reason := problem():
        fail(f"the CPU kernels are unavailable: {reason}")
    console.print("the CPU kernels are built")


def doctor() -> None:
    """Show versions, devices and the backend that would run."""
    import torch

    from kvcache_compress.backends.choice import resolve_backend
    from kvcache_compress.codecs.device import interpreting
    from kvcache_compress.cpu_kernels.build import built

    table = Table(title="kvcache-compress doctor", show_header=False)
    table.add_row("python", platform.python_version())
    packages = ("kvcache-compress", "torch", "transformers", "triton", "accelerate", "hqq", "optimum-quanto", "gguf")
    for package in packages:
        try:
            table.add_row(package, version(package))
        except PackageNotFoundError:
            table.add_row(package, "not installed")
    cuda = torch.cuda.is_available()
    table.add_row("GPU", torch.cuda.get_device_name() if cuda else "none")
    table.add_row("Triton interpreter", "on" if interpreting() else "off")
    compiled = built()
    table.add_row("CPU kernels", "built" if compiled else "not built: kvcache-compress build")
    # On a CPU this question would compile them.
    asked = cuda or interpreting() or compiled
    device = torch.device("cuda" if cuda else "cpu")
    found = resolve_backend("auto", device).name if asked else "torch, until the CPU kernels are built"
    table.add_row("backend", found)
    console.print(table)
