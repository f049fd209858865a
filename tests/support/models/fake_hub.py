"""An imitation of the Hugging Face hub, for code that would reach for it."""

from dataclasses import dataclass, field
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
        dataset: what `load_dataset` returns; a function is called with its arguments, an exception raised.
        configurations: of each data set.
        folder: where files are downloaded from.
        error: raised by requests for information about a repository, as without a network.
        asked: positional and keyword arguments of each `load_dataset`.
    """

    dataset: Any = None
    configurations: list[str] = field(default_factory=list)
    folder: Path | None = None
    error: Exception | None = None
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def load_dataset(self, *arguments: Any, **options: Any) -> Any:
        self.asked.append((arguments, options))
        if isinstance(self.dataset, Exception):
            raise self.dataset
        return self.dataset(*arguments, **options) if callable(self.dataset) else self.dataset

    def info(self, *_: Any, **__: Any) -> None:
        if self.error is not None:
            raise self.error

    def download(self, _: str, name: str, **__: Any) -> str:
        assert self.folder is not None
        return str(self.folder / name)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in place of the clients of the hub, and go online."""
        for owner, name, answer in (
            (datasets, "load_dataset", self.load_dataset),
            (datasets, "get_dataset_config_names", lambda _: self.configurations),
            (huggingface_hub, "hf_hub_download", self.download),
            (HfApi, "dataset_info", self.info),
            (HfApi, "model_info", self.info),
            (constants, "HF_HUB_OFFLINE", False),
        ):
            monkeypatch.setattr(owner, name, answer)
