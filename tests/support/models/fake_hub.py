"""An imitation of the Hugging Face hub, for code that would reach for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants


@dataclass
class FakeHub:
    """A hub that knows every name and answers with what a test gave it.

    Attributes:
        dataset: what `load_dataset` returns.
        folder: where files are downloaded from.
        error: raised by requests for information about a repository, as without a network.
    """

    dataset: Any = None
    folder: Path | None = None
    error: Exception | None = None

    def info(self, *_: Any, **__: Any) -> None:
        if self.error is not None:
            raise self.error

    def download(self, _: str, name: str, **__: Any) -> str:
        assert self.folder is not None
        return str(self.folder / name)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in place of the clients of the hub, and go online."""
        for owner, name, answer in (
            (datasets, "load_dataset", lambda *_, **__: self.dataset),
            (huggingface_hub, "hf_hub_download", self.download),
            (HfApi, "dataset_info", self.info),
            (HfApi, "model_info", self.info),
            (constants, "HF_HUB_OFFLINE", False),
        ):
            monkeypatch.setattr(owner, name, answer)
