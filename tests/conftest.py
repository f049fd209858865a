"""Settings of the whole test run, made before Triton and torch are imported."""

import os

if "KVCACHE_COMPRESS_TEST_DEVICE" not in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Workers and the processes that they start share the cores: threads beyond those would wait for each other, spinning.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))
