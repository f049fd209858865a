"""All benchmarks that come with the package; importing this registers them."""

from . import gsm8k, needle, perplexity, ruler
from .longbench import benchmark as longbench

__all__ = ["gsm8k", "longbench", "needle", "perplexity", "ruler"]
