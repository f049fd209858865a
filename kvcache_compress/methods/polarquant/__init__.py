"""The two methods named PolarQuant: recursive (Han et al.) and on RoPE pairs (Wu et al.)."""

from . import recursive as recursive
from . import rope as rope
