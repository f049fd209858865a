"""Working folder of a calibration, to resume an interrupted one: finished layers and collected states."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from kvcache_compress.files.atomic import whole_file
from kvcache_compress.files.model_file import write_tensors


class Parts:
    """Folder `<output>.<digest of the settings>.parts/` of a calibration.

    It holds `settings.json`, `states/` and `held_out/` with collected keys and values, and one file per finished layer.
    `others` are folders of other settings for the same output, which are left alone.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        described = json.dumps(settings, sort_keys=True, indent=1)
        self.digest = hashlib.sha256(described.encode()).hexdigest()
        self.folder = output.with_name(f"{output.name}.{self.digest[:12]}.parts")
        self.states, self.held_out = self.folder / "states", self.folder / "held_out"
        self._weights = self.folder / "weights.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.others = [
            folder for folder in output.parent.glob(f"{escape(output.name)}.*.parts") if folder != self.folder
        ]
        with whole_file(self.folder / "settings.json") as unfinished:
            unfinished.write_text(described)

    def _file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:03d}.safetensors"

    def save_weights(self, weights: Mapping[int, torch.Tensor]) -> None:
        """Save the weights of the pairs of keys, which also marks the collection as complete."""
        write_tensors(self._weights, {str(layer): tensor.contiguous() for layer, tensor in weights.items()}, {})

    def load_weights(self) -> dict[int, torch.Tensor]:
        """Load the weights by layer; empty until the collection is complete."""
        if not self._weights.exists():
            return {}
        return {int(layer): tensor for layer, tensor in load_file(self._weights).items()}

    def save(self, layer: int, tensors: dict[str, torch.Tensor], losses: Mapping[str, Any]) -> None:
        """Save a finished layer; its file appears only once it is complete."""
        halves = {name: tensor.to("cpu", torch.float16).contiguous() for name, tensor in tensors.items()}
        write_tensors(self._file(layer), halves, {"settings": self.digest, "losses": json.dumps(losses)})

    def load(self, layer: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Load a finished layer's tensors and losses; None if it is missing or damaged."""
        if not self._file(layer).exists():
            return None
        try:
            with safe_open(self._file(layer), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        except SafetensorError:
            return None
        return (tensors, json.loads(metadata["losses"])) if metadata.get("settings") == self.digest else None

    def remove(self) -> None:
        shutil.rmtree(self.folder)
