"""Settings of the whole test run, made before Triton is imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
