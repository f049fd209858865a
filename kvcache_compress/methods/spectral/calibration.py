"""Calibrate `spectral`: measure moments of a model's keys and queries on text, in two streaming passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.files.model_file import check_output
from kvcache_compress.modeling.calibration.observed_attention import RECENT, SINKS, observed_attention
from kvcache_compress.modeling.calibration.text import Report, read_windows
from kvcache_compress.modeling.facts import calibrated_layers, head_shape
from kvcache_compress.modeling.rope import Rope, RopeLayout, rope_layout, rotary_embedding

from .codec import GROUP
from .moments import SAMPLED, GroupRope, KeyMoments, MeanSums, Window, unit_rotations
from .statistics_file import PARTS, write_statistics
from .transform import spectral_basis


@dataclass(frozen=True)
class SpectralSettings:
    """Settings of a calibration.

    Attributes:
        tokens: calibration tokens, in windows of `context`.
        context: tokens per window.
    """

    tokens: int = 20_480
    context: int = 2048

    def __post_init__(self) -> None:
        least = SINKS + RECENT + 2 * GROUP
        if self.context < least:
            raise ValueError(f"context={self.context} for spectral must be at least {least}")
        if self.tokens < 2 * self.context:
            raise ValueError(f"tokens={self.tokens} for spectral must make at least two windows of {self.context}")


@torch.inference_mode()
def calibrate_spectral(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Sequence[str],
    output: str | Path,
    settings: SpectralSettings | None = None,
    *,
    report: Report = lambda doing, done, total: None,
) -> dict[int, float]:
    """Measure moments on text and write the statistics file.

    Returns, per layer, the coding gain of the transform in bits per number: half the mean log2 of the ratio of the
    channels' mean variance to their geometric mean.

    Raises:
        ValueError: the model's attention cannot be observed, or it has no full-attention layer; the text cannot be read
            or is too short; keys or queries are not finite; or the output cannot be a file.
    """
    settings, output = settings or SpectralSettings(), Path(output)
    check_output(output)
    config = model.config.get_text_config(decoder=True)
    windows, digest = read_windows(text, tokenizer, settings.tokens, settings.context)
    run = _Run(model, config, settings, calibrated_layers(config), report)
    tables = run.mean_tables(windows)
    tensors: dict[str, torch.Tensor] = {}
    gains = {}
    for layer, sums in run.moments(windows, tables).items():
        moments = sums.means()
        if not (moments.keys.isfinite().all() and moments.queries.isfinite().all()):
            raise ValueError(f"keys or queries of layer {layer} are not finite")
        basis, deviation = spectral_basis(*moments)
        variance = deviation.square()
        gains[layer] = float(0.5 * (variance.mean(-1).log2() - variance.log2().mean(-1)).mean())
        tensors |= {
            f"keys.{layer}.{name}": x for name, x in zip(PARTS, (basis, deviation, *tables[layer]), strict=True)
        }
    data = {"text": list(text), "tokens": windows.numel(), "context": settings.context, "sha256": digest}
    write_statistics(str(output), config, tensors, GROUP, data)
    return gains


class _Run:
    """Passes over the windows, with one window's keys and queries of one layer in memory at a time."""

    def __init__(
        self, model: PreTrainedModel, config: PreTrainedConfig, settings: SpectralSettings, layers: Sequence[int],
        report: Report,
    ) -> None:  # fmt: skip
        self.model, self.config, self.report = model, config, report
        self.layers = layers
        self.head_dim, self.heads, _ = head_shape(config)
        self.rope: GroupRope | None = None
        if (layout := rope_layout(config, self.head_dim)) is not None:
            anchors = self._factors(layout, torch.arange(SINKS, settings.context, GROUP))
            offsets = self._factors(layout, torch.arange(GROUP))
            self.rope = GroupRope(layout, anchors, unit_rotations(offsets))

    def _factors(self, layout: RopeLayout, positions: torch.Tensor) -> Rope:
        embed = rotary_embedding(self.config)
        assert embed is not None
        cos, sin = layout.factors(embed(torch.zeros(1), positions[None]))
        return cos.float().to(self.model.device), sin.float().to(self.model.device)

    def _pass(self, doing: str, windows: torch.Tensor, observer: Callable[..., None]) -> None:
        with observed_attention(self.model, observer) as observable:
            if not observable:
                raise ValueError(
                    f"the attention of {self.config.model_type} cannot be observed; load the model with an "
                    "implementation that Transformers looks up by name, such as sdpa"
                )
            for index, window in enumerate(windows):
                self.report(doing, index, len(windows))
                self.model.get_decoder()(input_ids=window[None].to(self.model.device), use_cache=False)
        self.report(doing, len(windows), len(windows))

    def mean_tables(self, windows: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Factors of each layer's table of mean keys, without the sinks; see `mean_table`."""
        sums = {layer: MeanSums.zeros(self.heads, self.head_dim) for layer in self.layers}

        def add(layer: int, query: torch.Tensor, key: torch.Tensor, options: Any) -> None:
            if layer in sums:
                sums[layer].add(self._window(query, key, options, torch.empty(0, dtype=torch.long)))

        self._pass("means", windows, add)
        return {layer: x.table(GROUP, self.rope) for layer, x in sums.items()}

    def moments(
        self, windows: torch.Tensor, tables: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[int, KeyMoments]:
        found = {layer: KeyMoments.zeros(self.heads, self.head_dim) for layer in sorted(tables)}
        generator = torch.Generator().manual_seed(0)

        def add(layer: int, query: torch.Tensor, key: torch.Tensor, options: Any) -> None:
            if layer in found:
                at = torch.randint(SINKS + RECENT, key.shape[2], (SAMPLED,), generator=generator)
                places, means = tables[layer]
                found[layer].add(self._window(query, key, options, at), (places @ means).float())

        self._pass("moments", windows, add)
        return found

    def _window(self, query: torch.Tensor, key: torch.Tensor, options: Any, at: torch.Tensor) -> Window:
        """A window's keys `[1, H, T, D]`, and its queries `[1, Hq, T, D]` at the positions `at`."""
        at = at.to(key.device)
        return Window(
            key[0], GROUP, SINKS, RECENT, self.rope, query[0, :, at], at,
            scaling=options.get("scaling") or self.head_dim**-0.5, softcap=options.get("softcap"),
            s_aux=options.get("s_aux"),
        )  # fmt: skip
