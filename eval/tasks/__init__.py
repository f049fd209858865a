"""Benchmarks: samples, and a score per sample and cache. Importing this registers them."""

from .longbench.benchmark import LongBench
from .needle import Needle
from .perplexity import Perplexity
from .ruler import Ruler
from .turns import Turns

BENCHMARKS = (Perplexity, Turns, LongBench, Needle, Ruler)
