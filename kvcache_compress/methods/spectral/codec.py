"""Spectral keys: codes along the directions in which errors cost attention most, anchored against RoPE.

Keys come in groups. A key k_t = R_t z_t is coded as `x_t = R_(t - t0) (z_t - μ)`, t0 the first token of its group, R
the rotation of RoPE and μ the mean before it. That is exact, since `q·k_t = (R_t0ᵀ q) · (x_t + R_(t - t0) μ)`, and its
statistics are the same wherever the group stands. x is mapped into spectral channels y (`transform.py`), which are
quantized with the bits of their class, and one scalar per token, whose scale is searched for when encoding.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import ClassVar

import torch
from pydantic import field_validator
from transformers import PreTrainedConfig

from kvcache_compress.codecs.base import Codec, CodecContext, Fields, MethodOptions, Rope, RopeUse, Side
from kvcache_compress.codecs.layout import Field, check_head_dim
from kvcache_compress.codecs.lloyd_max import boundaries, lloyd_max_levels
from kvcache_compress.codecs.scalar import SCALE_MAX
from kvcache_compress.modeling.model_file import ModelFile
from kvcache_compress.modeling.rope import rotary_embedding
from kvcache_compress.registry import register_method

from .statistics_file import ADVICE, PARTS, check_model, group_size, load_layer, read_statistics
from .transform import CLASS, MOST_BITS, allocate_bits

GROUP = 64
"""Tokens with one anchor."""
SEARCHED = (0.6, 0.75, 0.9, 1.0, 1.15, 1.35, 1.6, 2.0, 2.6, 3.5)
"""Scales that are tried for a token, in units of its channels' RMS; without them outlying tokens saturate."""
_GAUSSIAN_DIM = 1 << 16
"""Dimension in which a coordinate on the sphere is as good as Gaussian."""


class SpectralOptions(MethodOptions):
    """Options of `spectral`, for keys.

    bits: code bits per number, on average over the channels; 0.5 to 6, a whole number of bytes per token and head.
    statistics: path of the model's file, which `kvcache-compress calibrate --method spectral` writes.
    any_model: accept a file for a model of another name, as long as dimensions and RoPE agree.
    """

    bits: float = 2.0
    statistics: str | None = None
    any_model: bool = False

    @field_validator("bits")
    @classmethod
    def _check_bits(cls, bits: float) -> float:
        if not 0.5 <= bits <= MOST_BITS:
            raise ValueError(f"bits={bits:g} for spectral: allowed 0.5–{MOST_BITS}")
        return bits


@register_method
class SpectralCodec(Codec):
    """The keys of a layer under `spectral`; see the module's docstring."""

    name: ClassVar[str] = "spectral"
    Options: ClassVar[type[MethodOptions]] = SpectralOptions
    options: SpectralOptions

    def __init__(self, options: SpectralOptions, context: CodecContext) -> None:
        super().__init__(options, context)
        file = _file(options)
        try:
            heads = file.facts.local_heads(context.heads, context.head_dim)
        except ValueError as error:
            raise file.refusal(str(error)) from None
        tensors = load_layer(file, context.layer, context.device)
        basis, deviation, mean, inverse = (tensors[part][heads] for part in (*PARTS, "inverse"))
        by_class = allocate_bits(deviation, code_bytes(options.bits, context.head_dim))
        self.bits = by_class.repeat_interleave(CLASS, -1)
        """int64 `[H, D]`, bits of each channel."""
        self.deviation = deviation
        coded = (self.bits > 0)[:, None]
        self.encoding = torch.where(coded, basis, 0.0)
        """float32 `[H, D, D]`, x to its channels; zero to those without bits."""
        self.decoding = inverse
        """float32 `[H, D, D]`, its inverse but for those."""
        self.means = mean[:, None].expand(-1, self.group, -1)
        """float32 `[H, group, D]`, the mean turned to each place in a group."""
        if "turns" in tensors:
            if context.rope is None:
                raise ValueError("spectral needs the model's rotary position embeddings, with which it was calibrated")
            cos, sin = tensors["turns"][:, None]
            self.means = context.rope.rotate(self.means[None], (cos, sin))[0]
        self._classes, self._places = _bytes_of(by_class)
        self._levels, self._bounds = _codebooks(context.device)

    @classmethod
    def layout(cls, options: SpectralOptions, side: Side, head_dim: int) -> tuple[Field, ...]:
        if side == "values":
            raise ValueError("spectral for values: allowed for keys; values have nothing to gain from it")
        check_head_dim(cls.name, head_dim, CLASS, 2 * CLASS)
        group = GROUP if options.statistics is None else group_size(read_statistics(options.statistics))
        count = code_bytes(options.bits, head_dim)
        return Field("codes", torch.uint8, (count,)), Field("scale", torch.float16, (group,), tokens=group)

    @classmethod
    def rope_use(cls, options: SpectralOptions, side: Side) -> RopeUse:
        return "factors" if options.statistics is None or _file(options).facts.rope else "none"

    @classmethod
    def check_model(cls, options: SpectralOptions, side: Side, config: PreTrainedConfig, layer: int) -> None:
        file = _file(options)
        if not file.facts.rope and rotary_embedding(config) is not None:
            raise ValueError(
                f"spectral for keys: {config.model_type} has rotary position embeddings of an unknown kind"
            )
        check_model(file, config, layer, options.any_model)

    @classmethod
    def constant_size(cls, options: SpectralOptions, side: Side, head_dim: int, heads: int) -> int:
        """Bytes of one layer's bases, mean and tables."""
        group = cls.layout(options, side, head_dim)[1].tokens
        numbers = heads * (2 * head_dim * head_dim + head_dim + group * head_dim)
        tables = sum(x.nbytes for x in _codebooks(torch.device("cpu")))
        integers = heads * (head_dim + 2 * code_bytes(options.bits, head_dim))
        return torch.float32.itemsize * numbers + torch.int64.itemsize * integers + tables

    def _anchors(self, rope: Rope | None) -> Rope | None:
        """cos and sin of each group's first token, `[B, groups, rotary]`, of those of all tokens."""
        if self.context.rope is None:
            return None
        if rope is None:
            raise RuntimeError("spectral needs the RoPE factors of the tokens to encode and decode keys")
        cos, sin = (factor[:, :: self.group] for factor in rope)
        return cos, sin

    def _by_token(self, anchors: Rope) -> Rope:
        cos, sin = (factor.repeat_interleave(self.group, 1) for factor in anchors)
        return cos, sin

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        x, anchors = x.float(), self._anchors(rope)
        if anchors is not None and self.context.rope is not None:
            x = self.context.rope.unrotate(x, self._by_token(anchors))
        x = (x.unflatten(2, (-1, self.group)) - self.means[:, None]).flatten(2, 3)
        y = x @ self.encoding
        z = y / self.deviation[:, None]
        coded = (self.bits > 0).sum(-1).clamp_min(1)
        spread = (z.square().sum(-1) / coded[:, None]).sqrt().clamp_min(1e-12)
        bounds, energy = self._bounds[self.bits], y.square().sum(-1)
        best: list[torch.Tensor] = []
        for factor in SEARCHED:
            codes = _nearest(z / (spread * factor)[..., None], bounds)
            point = self._points(codes)
            product, square = (y * point).sum(-1), point.square().sum(-1).clamp_min(1e-30)
            error = energy - product.square() / square
            scale = energy / product.clamp_min(1e-30)
            found = [error, scale, codes]
            if not best:
                best = found
                continue
            better = error < best[0]
            best = [
                torch.where(better if new.ndim == better.ndim else better[..., None], new, old)
                for new, old in zip(found, best, strict=True)
            ]
        _, scale, codes = best
        packed = self._pack(codes)
        return packed, scale.clamp(max=SCALE_MAX).to(torch.float16).unflatten(2, (-1, self.group))

    def _points(self, codes: torch.Tensor) -> torch.Tensor:
        """Channels `[B, H, T, D]` that codes stand for, for a token of scale 1."""
        return self._levels[self.bits[:, None], codes] * self.deviation[:, None]

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes `[B, H, T, D]` in bytes `[B, H, T, code bytes]`: one bit of the eight codes of a class each."""
        classes = codes.unflatten(-1, (-1, CLASS))
        index = self._classes[:, None, :, None].expand(*codes.shape[:3], -1, CLASS)
        bits = classes.gather(3, index) >> self._places[:, None, :, None] & 1
        return (bits << torch.arange(CLASS, device=codes.device)).sum(-1).to(torch.uint8)

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        bits = packed.long()[..., None] >> torch.arange(CLASS, device=packed.device) & 1
        parts = bits << self._places[:, None, :, None]
        codes = parts.new_zeros(*packed.shape[:3], self.context.head_dim // CLASS, CLASS)
        return codes.scatter_add_(3, self._classes[:, None, :, None].expand_as(parts), parts).flatten(3)

    def _channels(self, fields: Fields) -> torch.Tensor:
        """Stored tokens in spectral channels, float32 `[B, H, T, D]`."""
        packed, scale = fields
        return self._points(self._unpack(packed)) * scale.float().flatten(2)[..., None]

    def decode(self, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        x = self._channels(fields) @ self.decoding
        x = (x.unflatten(2, (-1, self.group)) + self.means[:, None]).flatten(2, 3)
        anchors = self._anchors(rope)
        if anchors is None or self.context.rope is None:
            return x
        return self.context.rope.rotate(x, self._by_token(anchors))

    def score(self, mapped: torch.Tensor, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        """Inner products `[B, H, R, T]`: queries are turned to each group's anchor and mapped there."""
        channels = self._channels(fields).unflatten(2, (-1, self.group))
        groups, anchors = channels.shape[2], self._anchors(rope)
        turned = mapped[:, :, :, None].expand(-1, -1, -1, groups, -1)
        if anchors is not None and self.context.rope is not None:
            turned = self.context.rope.rotate_query(turned.flatten(1, 2), anchors).view(turned.shape)
        turned = turned.transpose(2, 3)
        scores = turned @ self.decoding[:, None].mT @ channels.mT + turned @ self.means[:, None].mT
        return scores.transpose(2, 3).flatten(3)


def _nearest(z: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest levels of `z` `[B, H, T, D]`, int64, by the `bounds` `[H, D, 63]` between them."""
    columns = z.permute(1, 3, 0, 2)
    found = torch.searchsorted(bounds, columns.flatten(2).contiguous())
    return found.unflatten(2, columns.shape[2:]).permute(2, 0, 3, 1)


def code_bytes(bits: float, head_dim: int) -> int:
    """Bytes of codes per token and head; raises `ValueError` if `bits` leave a part of one."""
    count = bits * head_dim / 8
    if count % 1:
        raise ValueError(
            f"bits={bits:g} for spectral: allowed multiples of {8 / head_dim:g} for a head dimension of {head_dim}"
        )
    return int(count)


def _file(options: SpectralOptions) -> ModelFile:
    if options.statistics is None:
        raise ValueError(f"statistics=None for spectral: the statistics of the model are needed. {ADVICE}")
    return read_statistics(options.statistics)


def _bytes_of(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Class and bit of each byte of codes, int64 `[H, bytes]`, of classes with `bits` `[H, classes]`."""
    place = torch.arange(MOST_BITS, device=bits.device)
    used = place < bits[..., None]
    classes = torch.arange(bits.shape[-1], device=bits.device)[:, None].expand_as(used[0])
    heads = len(bits)
    return (
        torch.stack([classes[head] for head in used]).view(heads, -1),
        torch.stack([place.expand_as(head)[head] for head in used]).view(heads, -1),
    )


@lru_cache(maxsize=8)
def _codebooks(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels `[7, 64]` of 0 to 6 bits for a standard Gaussian, and the bounds between them, `[7, 63]`."""
    with torch.inference_mode(False):  # of use outside of it as well, wherever they are first asked for
        levels = torch.zeros(MOST_BITS + 1, 2**MOST_BITS)
        bounds = torch.full((MOST_BITS + 1, 2**MOST_BITS - 1), torch.inf)
        for bits in range(1, MOST_BITS + 1):
            found = (lloyd_max_levels(_GAUSSIAN_DIM, bits) * math.sqrt(_GAUSSIAN_DIM)).float()
            levels[bits, : len(found)] = found
            bounds[bits, : len(found) - 1] = boundaries(found)
        return levels.to(device), bounds.to(device)
