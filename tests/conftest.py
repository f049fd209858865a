"""Settings of the whole test run, made before Triton and torch are imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
    from support.models.fake_hub import FakeHub
    from transformers import LlamaForCausalLM

if "KVCACHE_COMPRESS_TEST_DEVICE" not in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are so small that more threads would only wait for each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first: a worker that began one last would leave the others idle."""
    longest = (
        "test_aot.py",
        "test_compiled.py",
        "test_attention.py",
        "test_step.py",
        "test_operations.py",
        "test_commands.py",
    )
    items.sort(key=lambda item: longest.index(item.path.name) if item.path.name in longest else len(longest))


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from support.kernels.interpreter import patch

        patch()


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A new small model for each test."""
    from support.models.small_model import small_model

    return small_model()


@pytest.fixture
def prompt() -> torch.Tensor:
    """Token ids `[2, 60]` for the small model."""
    import torch

    return torch.randint(1, 64, (2, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def static_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make static layers run steps of static shapes on the CPU, as they do on other devices."""
    from kvcache_compress.storage.backend import Backend

    monkeypatch.setattr(Backend, "has_static_steps", lambda backend, device: True)


@pytest.fixture
def one_era(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of the first tokens that are packed, however few, with their queries alone; never of later tokens."""
    from kvcache_compress.codecs import base
    from kvcache_compress.storage import side
    from kvcache_compress.storage.adaptive import eras

    for name in ("LEAST_TOKENS", "LEAST_IN_STEPS"):
        monkeypatch.setattr(base, name, 1)
    monkeypatch.setattr(eras.Watch, "samples", lambda *_: False)
    monkeypatch.setattr(side, "renewed", lambda codec, prompt: None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """An imitated hub in place of the real one."""
    from support.models.fake_hub import FakeHub

    found = FakeHub()
    found.install(monkeypatch)
    return found


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, as with `HF_HUB_OFFLINE=1`, which is read when the hub's client is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
