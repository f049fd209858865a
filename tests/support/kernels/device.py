"""The device of the kernels' tests, from `KVCACHE_COMPRESS_TEST_DEVICE`.

Without it Triton's interpreter runs them; `cuda` compiles them for a GPU, and `ptx:sm_90` executes what is compiled for
such a GPU in an emulator, which also checks every access to memory.
"""

import os

import torch

_GIVEN = os.environ.get("KVCACHE_COMPRESS_TEST_DEVICE", "cpu")
EMULATED = _GIVEN.removeprefix("ptx:") if _GIVEN.startswith("ptx:") else None
"""The GPU that is emulated, such as `sm_90`."""
DEVICE = torch.device("cpu" if EMULATED else _GIVEN)
INTERPRETED = DEVICE.type == "cpu" and EMULATED is None
