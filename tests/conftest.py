"""Settings of the whole test run, made before Triton and torch are imported."""

import os

import pytest

if "KVCACHE_COMPRESS_TEST_DEVICE" not in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Workers and the processes that they start share the cores: threads beyond those would wait for each other, spinning.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _share)))


@pytest.fixture
def static_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of fixed capacity do on the CPU what they do elsewhere: steps whose shapes do not change."""
    from kvcache_compress.cache import layer

    monkeypatch.setattr(layer, "has_static_steps", lambda backend, device: True)
