"""`CompressedCache`: a `transformers.Cache` whose full-attention layers are compressed as a config says."""

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionAndFullAttentionLayer,
    StaticLayer,
)

from kvcache_compress.attention.position_hooks import ModelListener
from kvcache_compress.backends.choice import check_backend
from kvcache_compress.codecs.base import SIDES
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.config import CompressionConfig, LayerPlan, load_config
from kvcache_compress.modeling.decoder import decoder_layers, head_dim_of, is_full_attention, layer_types
from kvcache_compress.modeling.rope import RopeLayout, layer_has_rope, rope_layout
from kvcache_compress.storage.adaptive.bit_budget import BitBudget
from kvcache_compress.storage.checks import CROPS_TO_LENGTH, check_croppable, tokens_after_crop
from kvcache_compress.storage.shared.padding import PaddingRecord
from kvcache_compress.storage.shared.rope_track import RopeTrack
from kvcache_compress.validation import quoted

from .cache_file import load_cache, save_cache
from .hybrid_layer import HybridCompressedLayer
from .layer import CompressedLayer
from .memory_report import MemoryReport, memory_report
from .offloading import Offloading


class CompressedCache(Cache, ModelListener):
    """A key/value cache that stores older tokens compressed.

    Args:
        config: the model's config. Layers without full attention of their own (sliding, linear, shared ...) stay
            Transformers' own, as do layers whose keys and values both have the method `none`.
        compression: methods, windows and per-layer rules: a preset's name, the path of a YAML file, a dictionary or a
            `CompressionConfig`.

    Raises:
        ValueError: the compression config is wrong or does not fit the model, the model is an encoder-decoder or has no
            full attention, a method does not support its head dimension, or the back end is unavailable.
    """

    methods: ClassVar[frozenset[str] | None] = None
    """Keys or values of this class use at least one of these methods; None allows any."""

    rope_tracks: list[RopeTrack]
    """Cos and sin for the layers that need them: one track per number of sinks and group size."""

    def __init__(
        self, config: PreTrainedConfig, compression: CompressionConfig | str | Path | Mapping[str, Any]
    ) -> None:
        self.compression = load_config(compression)
        self.decoder_config, layers = decoder_layers(config, self.compression.max_cache_len)
        plans = self.compression.plan(layer_types(self.decoder_config, layers))
        chosen = {
            index: plans[index]
            for index, layer in enumerate(layers)
            if is_full_attention(layer) and plans[index].compresses
        }
        rope = _check_plans(chosen, self.decoder_config)
        used = ((plan.side(side), side) for plan in chosen.values() for side in SIDES)
        check_backend(self.compression.backend, ((one.codec(), one.options(), side) for one, side in used))
        tracks: dict[tuple[int, int], RopeTrack] = {}
        self.padding = padding = PaddingRecord()
        budget = _budget(chosen, self.decoder_config, self.compression)
        for index, plan in chosen.items():
            layer_rope = rope if rope and layer_has_rope(self.decoder_config, index) else None
            track = None
            if layer_rope is not None and (groups := plan.rope_groups(2 * layer_rope.pairs)) is not None:
                if groups not in tracks:
                    tracks[groups] = RopeTrack(self.decoder_config, layer_rope, *groups)
                track = tracks[groups]
            kind: Callable[..., CompressedLayer] = CompressedLayer
            if self.compression.max_cache_len is None and isinstance(
                layers[index], LinearAttentionAndFullAttentionLayer
            ):
                kind = partial(HybridCompressedLayer, number_of_states=layers[index].number_of_states)
            layers[index] = kind(
                index, plan, self.compression, self.decoder_config, layer_rope, track, padding,
                budget if budget is not None and index in budget.layers else None,
            )  # fmt: skip
        super().__init__(layers=layers)
        self.rope_tracks = list(tracks.values())
        self._followed = self.decoder_config
        self._offloading = Offloading() if self.compression.offloading else None

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file; after an error, what was at `path` is unchanged.

        Raises:
            ValueError: a layer cannot be saved.
            OSError: the file cannot be written.
        """
        self._synchronize()
        save_cache(self, path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: PreTrainedConfig,
        *,
        codebooks: str | Path | None = None,
        statistics: str | Path | None = None,
        device: torch.device | str | None = None,
        any_model: bool = False,
    ) -> Self:
        """Read a cache that `save` wrote; it continues as the saved one would have, bit for bit.

        Args:
            path: the file.
            config: config of the model that filled the cache; its name and shape are compared with the saved ones.
            codebooks: CommVQ's file, if it has moved since the cache was saved.
            statistics: spectral's file, if it has moved since the cache was saved.
            device: device of the loaded cache, by default the CPU.
            any_model: accept a model of another name.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, of a newer release, of another format or of another model, or its methods
                are not those of this class.
        """
        files = {"codebooks": codebooks, "statistics": statistics}
        return load_cache(path, partial(cls._of_file, config), files, device, any_model)

    @classmethod
    def _of_file(cls, config: PreTrainedConfig, compression: CompressionConfig) -> Self:
        """Create an empty cache of this class without calling its constructor, whose arguments differ by class."""
        methods = compression.keys.method, compression.values.method
        if cls.methods is not None and cls.methods.isdisjoint(methods):
            raise ValueError(f"its keys are {methods[0]} and its values {methods[1]}; use CompressedCache.load")
        cache = cls.__new__(cls)
        CompressedCache.__init__(cache, config, compression)
        return cache

    def follow(self, decoder_config: PreTrainedConfig) -> None:
        """Read the fused-attention switch from this config, the model's own, from now on.

        A model's hooks call it in each step.
        """
        if decoder_config is self._followed:
            return
        self._followed = decoder_config
        for layer in self.compressed_layers.values():
            layer.decoder_config = decoder_config

    def receive_mask(self, mask: Any) -> None:
        """Read from a forward's attention mask which tokens are left padding, if that is not known yet."""
        first = next((layer for layer in self.layers if isinstance(layer, CompressedLayer)), None)
        if first is not None and (self.padding.awaited or first.storage is None or first.storage.empty):
            self.padding.receive(mask, self._tokens())

    def receive_positions(self, layer: int, embeddings: Any, tokens: int) -> None:
        """Keep cos and sin of a step's tokens for layers that need them.

        Args:
            layer: index of the layer whose attention runs.
            embeddings: the model's `(cos, sin)`, each `[B, T, C]`, of the step or of all cached tokens; anything else
                counts as unknown.
            tokens: new tokens of the step, the last of `T`.
        """
        receiver = self.layers[layer]
        if isinstance(receiver, CompressedLayer) and receiver.track is not None:
            known = isinstance(embeddings, tuple)
            if known and embeddings[0].shape[1] != tokens:
                embeddings = tuple(x[:, -tokens:] for x in embeddings)
            receiver.track.inputs = embeddings if known else None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Store keys and values of a layer, as in `transformers.Cache`; if it raises, earlier layers drop the step."""
        if torch.compiler.is_compiling():
            if self._offloading is not None:
                raise ValueError("offloading must be False in a compiled model (got True)")
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        try:
            if self._offloading is None:  # same as the base class, with one call less per layer
                return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
            with self._offloading.at_work(self.layers, layer_idx):
                return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except Exception:
            self._step_back(layer_idx)
            raise

    def _step_back(self, failed: int) -> None:
        """Drop a step that layer `failed` refused from the layers before it, if all of them can be cropped."""
        length, before = int(self.layers[failed].get_seq_length()), self.layers[:failed]
        self.padding.truncate(length)
        try:
            check_croppable(before)
        except ValueError:
            return
        ahead = [layer for layer in before if int(layer.get_seq_length()) > length]
        if not all(layer.is_croppable for layer in ahead):
            return
        for layer in ahead:
            if length:
                layer.crop(length - int(layer.get_seq_length()))
            else:
                layer.reset()
        for track in self.rope_tracks:
            track.truncate(length)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield per layer what `DynamicCache` yields: keys, values, and the sliding window or None."""
        return DynamicCache.__iter__(self)

    @property
    def compressed_layers(self) -> dict[int, CompressedLayer]:
        """Compressed layers by index."""
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, CompressedLayer)}

    @property
    def packed_tokens(self) -> int:
        """Packed tokens per sequence, the largest number of any layer."""
        return max((layer.packed_tokens for layer in self.compressed_layers.values()), default=0)

    def memory_report(self) -> MemoryReport:
        """Count bytes and bits of every layer; the report prints as a table."""
        return memory_report(self.layers)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        if not CROPS_TO_LENGTH and any(isinstance(count, int) and count == 0 for count in (*args, *kwargs.values())):
            # `generate` calls this after it accepts a whole draft. Only uncompressed layers, which may hold more than
            # their window, have something to do.
            layers = [layer for layer in self.layers if type(layer) is not CompressedLayer]
            check_croppable(layers)
            for layer in layers:
                layer.crop(*args, **kwargs)
            return
        self._synchronize()
        self._refuse_static("cropped")
        check_croppable(self.layers)
        for count in (*args, *kwargs.values()):  # the argument's name depends on Transformers' version
            tokens_after_crop(count, self.get_seq_length())
        super().crop(*args, **kwargs)
        left = self._tokens()
        self.padding.truncate(left)
        for track in self.rope_tracks:
            track.truncate(left)

    def reset(self) -> None:
        self._synchronize()
        super().reset()
        self.padding.reset()
        for track in self.rope_tracks:
            track.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(super().reorder_cache, "beam_idx", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        repeats = operator.index(repeats)
        if repeats < 1:
            raise ValueError(f"repeats={repeats}: must be at least 1")
        self._synchronize()
        self._refuse_static("repeated")
        if self._empty():
            return
        self._apply_to_shared(lambda x: x.repeat_interleave(repeats, dim=0))
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse_static("selected from")
        self._select(super().batch_select_indices, "indices", indices)

    def _select(self, select: Callable[[Any], Any], name: str, rows: Any) -> None:
        if held := [batch for layer in self.layers if (batch := _rows_held(layer)) is not None]:
            rows = _row_numbers(name, rows, held[0])
        if self._empty():
            return
        self._synchronize()
        self._apply_to_shared(lambda x: x.index_select(0, rows.to(x.device)))
        select(rows)

    def _synchronize(self) -> None:
        if self._offloading is not None:
            self._offloading.synchronize()

    def _refuse_static(self, change: str) -> None:
        """Raise `ValueError` if a layer is Transformers' `StaticLayer`, which does not support this operation."""
        if static := [layer for layer in self.layers if isinstance(layer, StaticLayer)]:
            raise ValueError(
                f"a cache with max_cache_len and a {type(static[0]).__name__} cannot be {change}; drop max_cache_len"
            )

    def _empty(self) -> bool:
        """True if no layer holds tokens, as after a reset; the next batch may then have any size."""
        return not any(int(layer.get_seq_length()) for layer in self.layers if isinstance(layer, CacheLayerMixin))

    def _tokens(self) -> int:
        """Tokens per sequence, the largest number of any compressed layer."""
        return max((int(layer.get_seq_length()) for layer in self.compressed_layers.values()), default=0)

    def _apply_to_shared(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change the rows of what layers share, before the layers change: they may encode tokens with it."""
        self.padding.apply(change)
        for layer in self.compressed_layers.values():
            if layer.track is not None:
                layer.handed_out.release()
        for track in self.rope_tracks:
            track.apply(change)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressedCache":
        """Copy the cache but share the model's config, which holds the fused-attention switch."""
        self._synchronize()
        memo |= {id(config): config for config in (self.decoder_config, self._followed)}
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return twin


def _row_numbers(name: str, rows: Any, batch: int) -> torch.Tensor:
    """Convert row numbers or a boolean mask, a tensor or a list, to a tensor of row numbers `[n]`."""
    chosen = torch.tensor(rows) if isinstance(rows, (list, tuple)) else rows
    if not isinstance(chosen, torch.Tensor) or chosen.ndim != 1:
        raise ValueError(f"{name}={quoted(rows)}: must be a tensor or list of row numbers, or a boolean mask")
    return torch.arange(batch, device=chosen.device)[chosen]


def _rows_held(layer: Any) -> int | None:
    """Batch size of a layer's keys and values; None before its first tokens, and for layers without keys."""
    if isinstance(layer, CompressedLayer):
        return layer.batch_size if layer.is_initialized else None
    keys = getattr(layer, "keys", None)
    return keys.shape[0] if isinstance(keys, torch.Tensor) and keys.ndim == 4 else None


def _budget(
    plans: Mapping[int, LayerPlan], config: PreTrainedConfig, compression: CompressionConfig
) -> BitBudget | None:
    """Budget of the layers that have the config's own keys and values, if their bits can change; None for fixed bits.

    A layer that a rule gives another method or other bits keeps these.
    """
    if compression.bits_by_layer is None or compression.max_cache_len is not None:
        return None
    own = {i: plan for i, plan in plans.items() if all(plan.side(side) == getattr(compression, side) for side in SIDES)}
    if not own or not all(getattr(compression, side).codec().bit_choices for side in SIDES):
        raise ValueError(
            f"bits_by_layer={compression.bits_by_layer!r} has no effect: no layer has a method for keys and one for "
            "values whose bits can change (spectral, turboquant); drop it"
        )
    plan, dim = next(iter(own.values())), head_dim_of(config)
    return BitBudget(own, sum(bytes_per_token(plan.layout(side, dim)) for side in SIDES))


def _check_plans(plans: dict[int, LayerPlan], config: PreTrainedConfig) -> RopeLayout | None:
    """Check methods against the model's config, and return the model's RoPE layout if a method needs it."""
    head_dim = None if getattr(config, "kv_lora_rank", None) is not None else head_dim_of(config)
    uses = {plan.rope_use(side) for plan in plans.values() for side in SIDES}
    rope = rope_layout(config, head_dim) if head_dim and uses - {"none"} else None
    for index, plan in plans.items():
        for side in SIDES:
            chosen = plan.side(side)
            if head_dim is not None:
                plan.layout(side, head_dim)
            rotates = rope is not None and layer_has_rope(config, index)
            if not rotates and chosen.codec().needs_rope(chosen.options(), side):
                raise ValueError(
                    f"{chosen.method} for {side} needs rotary position embeddings, and none were found in layer "
                    f"{index} of {config.model_type}"
                )
            chosen.codec().check_model(chosen.options(), side, config, index, rope)
    return rope
