"""CommVQ (Li et al., ICML 2025): its codec, its codebook file and its calibration."""

from . import codec as codec
