"""Saving and loading caches: one file holds all that a cache needs to continue where it stopped.

A `ModelFile` of the kind `cache`. Its header has the cache's config, the kind of each layer with the attributes of
those that are Transformers' own, and the share of the model's heads. Tensors, for layer i and its sides `keys` and
`values`, without unused capacity:

    layers.{i}.{side}.sinks, .tail         [B, H, T, D]      in the model's dtype
    layers.{i}.{side}.packed.{field}       [B, H, T / field.tokens, *field.shape]
    layers.{i}.{side}.statistics.{t}.{name}  the codec's statistics from packed token t on, until the next era
    layers.{i}.{side}.check                [1, H, up to 8, D] the first packed tokens decoded, float32
    layers.{i}.watch, .watch.at, .watch.queries      when statistics are due, and the queries kept for them
    layers.{i}.{attribute}                 layers that are Transformers' own
    rope.{first}.{stride}                  [B, groups, 2 * rotary] cos and sin of the tokens `first + g * stride`, if a
                                           codec needs them
    padding                                int64 [B] or [1], the rows' left padding, if they have any
    tokens                                 int64 [T] the ids of all tokens, if given

The header has the bits of layers whose `BitBudget` has chosen them.
Rotations are made anew from their seeds, and files of calibration (CommVQ's, spectral's) stay where they are; `check`
reveals codecs that differ from those of the saving process.
"""

from collections.abc import Callable, Iterator, Mapping
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from kvcache_compress import __version__
from kvcache_compress.codecs.base import SIDES
from kvcache_compress.config import CompressionConfig, load_config
from kvcache_compress.files.model_file import not_finite, process_rank, read_model_file, write_model_file
from kvcache_compress.modeling.facts import head_shape, model_facts
from kvcache_compress.modeling.foreign_layer import read_attributes, set_attributes
from kvcache_compress.storage.side import SideState
from kvcache_compress.validation import quoted, usable_device

from .layer import CompressedLayer

KIND, VERSION = "cache", 1
CHECKED_TOKENS = 8
CHECK_TOLERANCE = 1e-3
"""Relative error (RMS) up to which decoded tokens count as equal: devices and releases of torch round differently."""


def save_cache(cache: Any, path: str | Path, tokens: torch.Tensor | None = None) -> None:
    """Write a cache to `path`, with its tokens `[T]` if given; see `CompressedCache.save`."""
    path = Path(path).expanduser()
    if isdir(path):
        raise ValueError(f"path={quoted(str(path))} is a folder; pass the name of a file")
    tensors: dict[str, torch.Tensor] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        described: dict[str, Any] = {"kind": type(layer).__name__}
        if not isinstance(layer, CompressedLayer):
            described["attributes"], held = read_attributes(layer, index)
        elif isinstance(layer, LinearAttentionAndFullAttentionLayer):
            raise ValueError(f"layer {index}, with a recurrent state beside its keys and values, cannot be saved")
        else:
            held = dict(_layer_tensors(layer))
            if layer.budget is not None and index in layer.budget.spent:
                described["bits"] = {side: state.codec.options.bits for side, state in layer.sides.items()}
            described["prepared"] = bool(layer.sides) and layer.sides["keys"].prepared
            if layer.sides and (track := layer.track) is not None:
                tensors[track.name] = track.buffer[:, : track.rows(int(layer.get_seq_length()))]
            layer.checks.raise_for_known()
        layers.append(described)
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in held.items()}
    if (rows := cache.padding.rows) is not None:
        tensors["padding"] = rows.tokens
    if tokens is not None:
        tensors["tokens"] = tokens
    if unreal := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(f"the cache cannot be saved: {unreal[0]} is on the meta device")
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    if broken := not_finite(tensors):
        raise ValueError(f"the cache cannot be saved: {broken} holds NaN or infinity")
    write_model_file(
        path, KIND, VERSION, model_facts(cache.decoder_config), tensors,
        release=__version__, transformers=transformers.__version__, layers=layers, share=_share(cache),
        config=cache.compression.model_dump(mode="json", exclude_none=True),
    )  # fmt: skip


def load_cache(
    path: str | Path, new_cache: Callable[[CompressionConfig], Any], files: Mapping[str, str | Path | None],
    device: torch.device | str | None = None, any_model: bool = False,
) -> Any:  # fmt: skip
    """Read a cache from `path`; see `CompressedCache.load`. `new_cache` makes an empty cache of a config."""
    place = Path(path).expanduser()
    if not isfile(place):
        raise FileNotFoundError(f"cache file {quoted(str(place))}: no such file")
    file, tensors = read_model_file(str(place), f"cache file {str(place)!r}", KIND, VERSION)
    try:
        if broken := not_finite(tensors):
            raise ValueError(f"damaged: {broken} holds NaN or infinity")
        target = usable_device(device)
        cache = new_cache(_config(file.header["config"], files))
        if problem := file.facts.mismatch(model_facts(cache.decoder_config), any_model=any_model):
            raise ValueError(problem)
        _check_fit(cache, file.header)
        _restore(cache, file.header["layers"], tensors, target)
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        known = isinstance(error, ValueError)
        raise file.refusal(str(error) if known else f"damaged, or too large for this memory: {error}") from error
    return cache


def _layer_tensors(layer: CompressedLayer) -> Iterator[tuple[str, torch.Tensor]]:
    for side, state in layer.sides.items():
        for name, tensor in state.tensors().items():
            yield f"{side}.{name}", tensor
        if state.store.tokens:
            yield f"{side}.check", _first_decoded(state, layer.group)
    if layer.storage is not None:
        yield from layer.storage.as_dynamic().watch.tensors().items()


def _first_decoded(state: SideState, group: int) -> torch.Tensor:
    """Decode the first packed tokens of the first sequence, float32 `[1, H, up to 8, D]`."""
    whole = -(-CHECKED_TOKENS // group) * group
    return state.decode(0, min(state.store.tokens, whole))[:1, :, :CHECKED_TOKENS]


def _config(plain: dict[str, Any], files: Mapping[str, str | Path | None]) -> CompressionConfig:
    """Config of the saved cache, with `files` in place of those that it names."""
    for owner in (plain, *plain.get("layers", ())):
        for side in SIDES:
            options = owner.get(side) or {}
            for name, path in files.items():
                if path is not None and options.get(name) not in (None, "text"):
                    options[name] = str(path)
    return load_config(plain)


def _check_fit(cache: Any, header: Mapping[str, Any]) -> None:
    """Raise `ValueError` for layers of other kinds, or another share of the model's heads."""
    saved, ours = [layer["kind"] for layer in header["layers"]], [type(layer).__name__ for layer in cache.layers]
    if saved != ours:
        raise ValueError(
            f"its layers are {saved} (Transformers {header['transformers']}), but those of the model are {ours}"
        )
    (number, shares), (rank, processes) = header["share"], process_rank()
    if processes % shares or rank % shares != number:
        raise ValueError(
            f"it holds share {number} of the model's heads, which tensor parallelism divided into {shares} shares: "
            f"process {rank} of {processes} cannot load it"
        )


def _share(cache: Any) -> list[int]:
    """Number of this process's share of the model's heads, and number of shares.

    Under tensor parallelism each process holds a run of the heads of every layer, and shapes do not tell them apart.
    """
    rank, processes = process_rank()
    config: PreTrainedConfig = cache.decoder_config
    layer = next((layer for layer in cache.compressed_layers.values() if layer.sides), None)
    if processes == 1 or layer is None or getattr(config, "kv_lora_rank", None) is not None:
        return [0, 1]
    shares = head_shape(config)[1] // layer.sides["keys"].sinks.shape[1]
    return [rank % shares, shares]


def _restore(
    cache: Any, layers: list[dict[str, Any]], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Fill a new cache from tensors, copied to `device`."""
    left = dict(tensors)
    left.pop("tokens", None)
    cache.padding.restore(left.pop("padding", None), device)
    ropes = {track.name: left.pop(track.name, None) for track in cache.rope_tracks}
    for index, (layer, described) in enumerate(zip(cache.layers, layers, strict=True)):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): left.pop(name) for name in tensors if name.startswith(prefix)}
        try:
            if not isinstance(layer, CompressedLayer):
                copied = {name: tensor.to(device, copy=True) for name, tensor in own.items()}
                set_attributes(layer, described["attributes"], copied, device)
            elif own:
                rope = None if layer.track is None else ropes[layer.track.name]
                _restore_layer(layer, own, described, rope, device)
        except ValueError as error:
            raise ValueError(f"layer {index}: {error}") from None
    if left:
        raise ValueError(f"damaged: tensor {next(iter(left))!r} belongs to no layer")
    cache.padding.truncate(max((int(layer.get_seq_length()) for layer in cache.compressed_layers.values()), default=0))


def _restore_layer(
    layer: CompressedLayer, tensors: Mapping[str, torch.Tensor], described: Mapping[str, Any],
    rope: torch.Tensor | None, device: torch.device,
) -> None:  # fmt: skip
    """Fill a new layer from its tensors and what the header says of it; `rope` has the rows of the layer's track."""
    keys, values = (tensors[f"{side}.sinks"][:, :, :0].to(device) for side in SIDES)
    layer.lazy_initialization(keys, values)
    if layer.budget is not None and "bits" in described:
        codecs = {side: state.codec.with_bits(described["bits"][side]) for side, state in layer.sides.items()}
        layer.budget.spend(layer.index, codecs)
        with layer.edited() as storage:
            storage.use(codecs)
    first, *_ = layer.sides["keys"].store.fields
    packed = tensors[f"keys.packed.{first.name}"].shape[2] * first.tokens
    tokens = packed + sum(tensors[f"keys.{part}"].shape[2] for part in ("sinks", "tail"))
    with layer.edited() as storage:  # which first sets the track's count to that of the empty layer
        if layer.track is not None and tokens:
            if rope is None:
                raise ValueError(f"damaged: tensor {layer.track.name!r} is missing")
            layer.track.restore(rope.to(device), tokens)
        for side, state in storage.sides.items():
            own = {name.removeprefix(f"{side}."): x for name, x in tensors.items() if name.startswith(f"{side}.")}
            state.restore(own, packed, described["prepared"])
        storage.watch.restore(tensors, device)
    for side, state in layer.sides.items() if packed else ():
        # In float64, since numbers of a damaged file may overflow float32 when squared.
        saved, decoded = tensors[f"{side}.check"].double(), _first_decoded(state, layer.group).double().cpu()
        if not (decoded - saved).norm() <= CHECK_TOLERANCE * saved.norm():
            raise ValueError(
                f"its {side} do not decode as they did when it was saved: the codebooks have changed, or this "
                "release's codecs differ"
            )
