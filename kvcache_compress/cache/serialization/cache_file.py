"""Saving and loading caches: one safetensors file holds all that a cache needs to continue where it stopped.

Metadata: `format`, `version`, `header` (JSON, `Header`), and `sha256` of the header and of all tensors. Tensors, for
layer i and its sides `keys` and `values`, without unused capacity:

    layers.{i}.{side}.sinks, .tail         [B, H, T, D]      in the model's dtype
    layers.{i}.{side}.packed.{field}       [B, H, T / field.tokens, *field.shape]
    layers.{i}.{side}.statistics.{name}    the codec's statistics, measured on the first tokens
    layers.{i}.{side}.check                [1, H, up to 8, D] the first packed tokens decoded, float32
    layers.{i}.{attribute}                 layers that are Transformers' own
    rope.{first}.{stride}                  [B, groups, 2 * rotary] cos and sin of the tokens `first + g * stride`, if a
                                           codec needs them; in version 1 `rope`, of all tokens
    padding                                int64 [B] or [1], the rows' left padding, if they have any

Rotations are made anew from their seeds, and files of calibration (CommVQ's, spectral's) stay where they are; `check`
reveals codecs that differ from those of the saving process. The version is raised when older releases would misread the
file; all older versions stay readable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from pydantic import NonNegativeInt, ValidationError
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, LinearAttentionAndFullAttentionLayer

from kvcache_compress._version import __version__
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.config import CompressionConfig, load_config
from kvcache_compress.files.tensors import open_tensors, write_tensors
from kvcache_compress.files.text import is_file, is_folder
from kvcache_compress.modeling.facts import head_shape, rope_record, same_model
from kvcache_compress.modeling.foreign_layer import read_attributes, set_attributes
from kvcache_compress.storage.padding import PaddingRecord
from kvcache_compress.storage.rope_track import RopeTrack
from kvcache_compress.validation.arguments import usable_device
from kvcache_compress.validation.messages import on_one_line, quoted

from .layer_state import LayerState, StrictModel, expect, layer_state, layer_tensors, not_finite, restore_layer
from .shapes import Share, check_share, disagreement, misfit, share_held

C = TypeVar("C", bound="SavableCache")
FORMAT, VERSION = "kvcache_compress.cache", 4
"""In version 1 the tensor `rope` had the cos and sin of all tokens; now there is a tensor of each track. Before
version 3 the `codebook` of TurboQuant was always named, and before version 4 padding was not recorded."""


class SavableCache(Cache):
    """Parts of a cache that its file describes."""

    compression: CompressionConfig
    decoder_config: PreTrainedConfig
    padding: PaddingRecord
    rope_tracks: list[RopeTrack]
    """Cos and sin for the layers that need them: one track unless these have other sinks or groups."""

    @property
    def compressed_layers(self) -> dict[int, CompressedLayer]:
        """Compressed layers by index."""
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, CompressedLayer)}


class ModelFacts(StrictModel):
    """Facts of the model that must be the same in the model that loads the cache."""

    model_type: str
    name: str
    hidden_size: int
    kv_heads: int
    head_dim: int
    layer_types: list[str]
    rope: dict[str, Any]


class LayerHeader(StrictModel):
    """Header of one layer: `state` if it is compressed and not empty, `attributes` if it is Transformers' own."""

    kind: str
    state: LayerState | None = None
    attributes: dict[str, Any] | None = None


class Header(StrictModel):
    """Contents of the file that are not tensors.

    share: the share of the model's heads that the cache holds: all of them, except with tensor parallelism.
    rope: in files of version 1, batch size and tokens of the tensor `rope`.
    """

    release: str
    transformers: str
    model: ModelFacts
    config: dict[str, Any]
    layers: list[LayerHeader]
    share: Share
    rope: tuple[NonNegativeInt, NonNegativeInt] | None = None


def save_cache(cache: SavableCache, path: str | Path) -> None:
    """Write a cache to `path`; see `CompressedCache.save`."""
    path = Path(path).expanduser()
    if is_folder(path):
        raise ValueError(f"path={quoted(str(path))}: a folder; the name of a file is needed")
    tensors: dict[str, torch.Tensor] = {}
    layers = []
    compressed = cache.compressed_layers
    for index, layer in enumerate(cache.layers):
        kind, prefix = type(layer).__name__, f"layers.{index}."
        if index in compressed and isinstance(layer, LinearAttentionAndFullAttentionLayer):
            raise ValueError(f"layer {index}, with a recurrent state beside its keys and values, cannot be saved")
        if index not in compressed:
            attributes, held = read_attributes(layer, index)
            layers.append(LayerHeader(kind=kind, attributes=attributes))
        else:
            state, held = layer_state(layer), layer_tensors(layer)
            layers.append(LayerHeader(kind=kind, state=state))
            track = layer.track
            if state and state.tokens and track is not None and track.name not in tensors:
                tensors[track.name] = _on_cpu(track.name, track.buffer[:, : track.rows(state.tokens)])
        tensors |= {prefix + name: _on_cpu(prefix + name, tensor) for name, tensor in held.items()}
        if index in compressed:
            layer.raise_for_known()
    if (rows := cache.padding.rows) is not None:
        tensors["padding"] = _on_cpu("padding", rows.tokens)
    share = share_held(cache.layers, cache.decoder_config)
    if problem := disagreement(cache.layers) or misfit(cache.layers, cache.decoder_config, share):
        raise ValueError(f"the cache cannot be saved: {problem}")
    if broken := not_finite(tensors):
        raise ValueError(f"the cache cannot be saved: {broken} holds NaN or infinity")
    header = Header(
        release=__version__,
        transformers=transformers.__version__,
        model=_facts(cache),
        config=cache.compression.model_dump(mode="json", exclude_none=True),
        layers=layers,
        share=share,
    ).model_dump_json(exclude={"rope"})
    metadata = {"format": FORMAT, "version": str(VERSION), "header": header, "sha256": _digest(header, tensors)}
    write_tensors(path, tensors, metadata)


def load_cache(
    path: str | Path,
    new_cache: Callable[[CompressionConfig], C],
    files: Mapping[str, str | Path | None],
    device: torch.device | str | None = None,
    any_model: bool = False,
) -> C:
    """Read a cache from `path`; see `CompressedCache.load`. `new_cache` makes an empty cache of a config.

    files: files that methods need, by option, if they have moved since the cache was saved.
    """
    path = Path(path).expanduser()
    if not is_file(path):
        raise FileNotFoundError(f"cache file {quoted(str(path))}: there is no such file")
    try:
        with open_tensors(path, "not readable") as file:
            metadata = file.metadata() or {}
            header = _read_header(metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        if _digest(metadata["header"], tensors) != metadata.get("sha256"):
            raise ValueError("damaged: its contents do not agree with its checksum")
        if broken := not_finite(tensors):
            raise ValueError(f"damaged: {broken} holds NaN or infinity")
        cache = new_cache(_config(header, files))
        _check_model(header, cache, any_model)
        check_share(header.share)
        _restore(cache, header, tensors, usable_device(device))
        _check_shapes(cache, header)
    except ValueError as error:
        # Texts quoted from the file may be long or have several lines.
        raise ValueError(f"cache file {str(path)!r}: {on_one_line(str(error), 600)}") from error
    return cache


def _on_cpu(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device: there is nothing to save")
    return tensor.detach().to("cpu").contiguous()


def _digest(header: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _facts(cache: SavableCache) -> ModelFacts:
    config = cache.decoder_config
    head_dim, kv_heads, _ = head_shape(config)
    parameters = getattr(config, "rope_parameters", None) or {}
    rope = {"parameters": json.loads(json.dumps(parameters, default=str))}
    if cache.rope_tracks:
        rope = rope_record(config, cache.rope_tracks[0].layout)
    kinds = getattr(config, "layer_types", None) or [type(layer).__name__ for layer in cache.layers]
    return ModelFacts(
        model_type=config.model_type, name=config._name_or_path or "", hidden_size=config.hidden_size,
        kv_heads=kv_heads, head_dim=head_dim, layer_types=list(kinds), rope=json.loads(json.dumps(rope)),
    )  # fmt: skip


def _check_model(header: Header, cache: SavableCache, any_model: bool) -> None:
    ours, saved = _facts(cache).model_dump(), header.model.model_dump()
    names = (saved.pop("name"), ours.pop("name"))
    start = f"made by another model, {names[0] or saved['model_type']!r}"
    if differing := [fact for fact in ours if ours[fact] != saved[fact]]:
        words = "; ".join(f"{fact} {saved[fact]} in the file, {ours[fact]} in the model" for fact in differing)
        raise ValueError(f"{start}: {words}")
    if not any_model and not same_model(*names):
        raise ValueError(f"{start}, not {names[1]!r}. If both have the same weights, say any_model=True")
    kinds = [layer.kind for layer in header.layers], [type(layer).__name__ for layer in cache.layers]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{start}: layers {kinds[0]} in the file (of Transformers {header.transformers}), {kinds[1]} in the model"
        )


def _check_shapes(cache: SavableCache, header: Header) -> None:
    if problem := disagreement(cache.layers) or misfit(cache.layers, cache.decoder_config, header.share):
        raise ValueError(f"damaged: {problem}")


def _read_header(metadata: Mapping[str, str]) -> Header:
    if metadata.get("format") != FORMAT:
        raise ValueError("not a cache file of kvcache-compress")
    version = metadata.get("version", "")
    if not version.isdecimal() or not 1 <= int(version[:9]) <= VERSION:
        raise ValueError(f"format version {version!r}: this release reads up to {VERSION}")
    try:
        return Header.model_validate_json(metadata.get("header", ""))
    except ValidationError as error:
        issue = error.errors()[0]
        place = ".".join(map(str, issue["loc"])) or "header"
        raise ValueError(f"damaged: {place}: {issue['msg']}") from None


def _config(header: Header, files: Mapping[str, str | Path | None]) -> CompressionConfig:
    """Config of the saved cache, with `files` in place of those that it names."""
    plain = json.loads(json.dumps(header.config))
    rules = plain.get("layers")
    for owner in (plain, *(rules if isinstance(rules, list) else ())):
        for side in ("keys", "values"):
            options = owner.get(side) if isinstance(owner, dict) else None
            for name, path in files.items():
                if path is not None and isinstance(options, dict) and options.get(name) not in (None, "prefill"):
                    options[name] = str(path)
    return load_config(plain)


def _restore_padding(cache: SavableCache, header: Header, padding: torch.Tensor | None, device: torch.device) -> None:
    states = [layer.state for layer in header.layers if layer.state is not None]
    batch = states[0].batch if states else 0
    if padding is None:
        pass
    elif padding.dtype != torch.int64 or padding.shape not in ((batch,), (1,)) or not padding.numel():
        raise ValueError(f"damaged: padding is {padding.dtype} {list(padding.shape)} for a batch of {batch}")
    elif (padding < 0).any():
        raise ValueError("damaged: padding is negative")
    cache.padding.restore(padding, device)
    cache.padding.truncate(max((state.tokens for state in states), default=0))


def _restore(cache: SavableCache, header: Header, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Fill a new cache from tensors, copied to `device`; raises `ValueError` for tensors that do not fit."""
    left, compressed = dict(tensors), cache.compressed_layers
    _restore_padding(cache, header, left.pop("padding", None), device)
    ropes = {track.name: left.pop(track.name, None) for track in cache.rope_tracks}
    if header.rope is not None and cache.rope_tracks:
        whole, like = left.pop("rope", None), cache.rope_tracks[0].buffer
        expect({"rope": (like.dtype, (*header.rope, like.shape[2]))}, {"rope": whole})
        assert whole is not None
        ropes = {track.name: whole[:, track.first :: track.stride] for track in cache.rope_tracks}
    for index, (layer, described) in enumerate(zip(cache.layers, header.layers, strict=True)):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): left.pop(name) for name in tensors if name.startswith(prefix)}
        try:
            if index in compressed and isinstance(layer, LinearAttentionAndFullAttentionLayer):
                raise ValueError("damaged: a layer with a recurrent state cannot be saved")
            if (index in compressed) != (described.attributes is None):
                raise ValueError("damaged: attributes are those of layers that are Transformers' own")
            if described.attributes is not None:
                if described.state is not None:
                    raise ValueError("damaged: the state of a compressed layer beside attributes")
                copied = {name: tensor.to(device, copy=True) for name, tensor in own.items()}
                set_attributes(layer, described.attributes, copied, device)
            elif described.state is not None:
                rope = None if layer.track is None else ropes[layer.track.name]
                restore_layer(layer, described.state, own, rope, device)
            elif own:
                raise ValueError(f"tensors of an empty layer: {', '.join(own)}")
        except ValueError as error:
            raise ValueError(f"layer {index}: {error}") from None
    if left:
        raise ValueError(f"damaged: an unknown tensor {next(iter(left))!r}")
