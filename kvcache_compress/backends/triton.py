"""Back end for GPUs: Triton kernels. They are imported when first used, because Triton may not be installed."""

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from kvcache_compress.codecs.base import Codec, Fields, Side
from kvcache_compress.codecs.device import interpreting, on_device
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.modeling.rope import Rope
from kvcache_compress.storage.paged import PagedStorage, Step
from kvcache_compress.storage.side import SideState
from kvcache_compress.storage.static import StaticStorage
from kvcache_compress.storage.view import View

from .torch import TorchBackend


class TritonBackend(TorchBackend):
    """Attention, encoders and static steps in Triton; codecs without a kernel encoder are encoded by PyTorch."""

    name = "triton"
    takes_token_masks = True
    attends_to_pages = True

    @cached_property
    def _kernels(self) -> SimpleNamespace:
        """The kernels' launchers, imported once so that steps pay nothing for the import."""
        from kvcache_compress.triton_kernels.attention import launch as attention
        from kvcache_compress.triton_kernels.encode import launch as encoding
        from kvcache_compress.triton_kernels.update import step

        return SimpleNamespace(attention=attention, encoding=encoding, step=step)

    def problem(self) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed"
        if not torch.cuda.is_available() and not interpreting():
            return "there is no GPU (and TRITON_INTERPRET=1 is not set)"
        return None

    def runs_on(self, device: torch.device, asked: bool = False) -> bool:
        return device.type == "cuda" or (asked and interpreting())

    def supports(self, codec: type[Codec], options: Any, side: Side) -> bool:
        return codec.has_kernels("kernel_side", options, side)

    def encoded(self, codec: Codec, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        if codec.kernel_encoder is None:
            return super().encoded(codec, x, rope)
        with on_device(x):
            rows = None if rope is None else torch.cat(rope, -1)
            return self._kernels.encoding.encoded(codec.kernel_encoder, x, codec.fields, rows)

    def has_static_steps(self, device: torch.device) -> bool:
        return True

    def ready(self, sides: Mapping[Side, SideState]) -> None:
        super().ready(sides)
        for side, state in sides.items():
            with on_device(state.sinks):
                state.codec.kernel_side.ready(state.sinks.dtype, side)
                state.codec.kernel_encoder  # noqa: B018 - cached

    def step(
        self, storage: StaticStorage, fresh: Mapping[Side, torch.Tensor], counter: torch.Tensor | None,
        rope: Rope | None,
    ) -> None:  # fmt: skip
        """Run a static step in one kernel; PyTorch packs the sides whose codec has no kernel encoder."""
        with on_device(storage.counts):
            storage.pack(*(side for side, codec in storage.codecs.items() if codec.kernel_encoder is None))
            self._kernels.step.step(storage, fresh, storage.counts, storage.faults, counter, rope)

    def step_pages(self, storage: PagedStorage, step: Step, fresh: Mapping[Side, torch.Tensor]) -> None:
        """Store decode steps' tokens in one kernel; PyTorch packs the sides whose codec has no kernel encoder."""
        faults = step.faults(2 * storage.sinks["keys"].shape[1])
        with on_device(faults):
            for side, codec in storage.codecs.items():
                if codec.kernel_encoder is None:
                    storage.pack(step, side)
            own = {side: step.of_decodes(x) for side, x in fresh.items()}
            self._kernels.step.step(storage, own, step.rows_before, faults)

    def attend(self, call: AttentionCall, keys: View, values: View) -> torch.Tensor:
        if not keys.packed:  # codecs may lack their statistics
            return super().attend(call, keys, values)
        return self._kernels.attention.attend(call, keys, values)

    def attend_to_pages(
        self, call: AttentionCall, keys: View, values: View, rows: torch.Tensor, page: int
    ) -> torch.Tensor:
        return self._kernels.attention.attend(call, keys, values, rows, page)
