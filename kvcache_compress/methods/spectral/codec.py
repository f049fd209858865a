"""Spectral keys: codes along the directions in which errors cost attention most, relative to an anchor under RoPE.

Keys come in groups. A key k_t = R_t z_t is coded as `x_t = R_(t - t0) (z_t - μ)`. R is the rotation of RoPE, t0 the
first token of the group (its anchor) and μ the mean key before RoPE. Scores stay exact, since `q·k_t = (R_t0ᵀ q) · (x_t
+ R_(t - t0) μ)`, and the statistics of x do not depend on the group's position. x is mapped to spectral channels y
(`transform.py`), which are quantized with different numbers of bits (`codecs/quantizers/digits.py`). Each token
stores one scalar, whose scale the encoder searches for.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator
from pydantic import Field as Limits

from kvcache_compress.codecs import base, packing
from kvcache_compress.codecs.base import CodecContext, Fields, MethodOptions, Prompt, Rope, RopeUse, Side, Statistics
from kvcache_compress.codecs.device import on_cpu
from kvcache_compress.codecs.layout import CODES_PER_WORD, Field, check_head_dim, code_fields
from kvcache_compress.codecs.linear import LinearCodec, Part
from kvcache_compress.codecs.quantizers.digits import (
    MOST_BITS,
    DigitCodes,
    digit_codes,
    digit_counts,
    quantize,
    tables,
    two_bit_levels,
)
from kvcache_compress.codecs.quantizers.scalar import SCALE_MAX
from kvcache_compress.cpu_kernels.common.operands import CPUSide
from kvcache_compress.files.model_file import ModelFile
from kvcache_compress.methods.registry import register_method
from kvcache_compress.modeling.facts import model_facts
from kvcache_compress.modeling.rope import RopeLayout, rotary_embedding

from . import prefill
from .moments import GroupRope, attention_costs, unit_rotations
from .prefill import Prior, prompt_statistics
from .statistics_file import PARTS, read_statistics

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MEAN_UNIT = 64.0
"""Divides one factor of the table of means and multiplies the other, so that both fit 16 bits."""
GROUP = 64
"""Default number of tokens per anchor."""
MAX_KERNEL_DIM = 256
"""Largest head dimension of the Triton encoder."""
TEXT = "text"
"""Value of the option `statistics` that measures them on the cached text."""


class SpectralOptions(MethodOptions):
    """Options of `spectral`, for keys.

    Attributes:
        bits: code bits per number, averaged over the channels, 0.5 to 6; they must make whole bytes.
        statistics: `text` to measure them on the cached text, or the path of the model's file from
            `kvcache-compress calibrate --method spectral`.
        any_model: accept a file of a model with another name if dimensions and RoPE agree.
        group: tokens per anchor with `text`: 32, 64 (default) or 128; a file has its own.
    """

    bits: Annotated[float, Limits(ge=0.5, le=MOST_BITS)] = 2.0
    statistics: Annotated[str, BeforeValidator(lambda given: TEXT if given is None else given)] = TEXT
    any_model: bool = False
    group: Literal[32, 64, 128] | None = None

    def idle(self) -> dict[str, str]:
        return {"any_model": "a file of statistics"} if self.statistics == TEXT else {"group": "statistics='text'"}


@register_method
class SpectralCodec(LinearCodec):
    """Keys of a layer under `spectral`."""

    name: ClassVar[str] = "spectral"
    Options: ClassVar[type[MethodOptions]] = SpectralOptions
    options: SpectralOptions
    in_memory_order: ClassVar[bool] = True
    bit_choices: ClassVar[tuple[float, ...]] = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6)
    digits: DigitCodes

    def __init__(self, options: SpectralOptions, context: CodecContext) -> None:
        super().__init__(options, context)
        self.counts = digit_counts(options.bits, context.head_dim)
        device = context.device
        self.digit_levels, self._tables = _level_tables(device)
        rope = context.rope
        self._order = torch.tensor(range(context.head_dim) if rope is None else rope.order, device=device)
        """Channels in the order of `RopeLayout.order`, int64 `[D]`."""
        file = _file(options)
        if file is not None:
            heads = file.local_heads(context.heads, context.head_dim)
            self._use(_of_file(file, context.layer, device, heads.start, heads.stop))

    def _use(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set everything that depends on a layer's tensors, as `_coded` makes them."""
        self.deviation, self.means, self.places = (tensors[name] for name in ("deviation", "means", "places"))
        self.digits = digit_codes(self.deviation, self.counts)
        self.directions, self.lengths = tensors["directions"], tensors["lengths"]
        self._encode_basis: torch.Tensor | None = None

    @property
    def inverse(self) -> torch.Tensor:
        """Maps channels, in units of their deviation, back to x, float32 `[H, D, D]`, exact in 11 bits."""
        return self.directions.float() * self.lengths[..., None]

    @property
    def encode_basis(self) -> torch.Tensor:
        """Maps x to its channels, float32 `[H, D, D]`; zero for channels without bits.

        It is computed at each use, because it is larger than all that attention reads, and kept only for heads that no
        kernel encodes, since a CUDA graph cannot compute it.
        """
        if self._encode_basis is not None:
            return self._encode_basis
        coded = self.deviation * (self.digits.kind > 0)
        basis = (torch.linalg.inv(self.inverse.double()) * coded[:, None]).float()
        self._encode_basis = basis if self.context.head_dim > MAX_KERNEL_DIM else None
        return basis

    def ready(self) -> None:
        if self.context.head_dim > MAX_KERNEL_DIM:
            self.encode_basis  # noqa: B018 - cached

    def measure(self, x: torch.Tensor, queries: torch.Tensor | None = None) -> Statistics:
        """Measure statistics of keys alone, as if all were at the first position of a model without RoPE."""
        return self._measured(Prompt(x[:, :, :0], x, 0), None, None, quiet=True) if _file(self.options) is None else {}

    def observe(self, prompt: Prompt) -> None:
        rope = None
        if self.context.rope is not None and prompt.rope is not None:
            assert prompt.offsets is not None
            rope = GroupRope(self.context.rope, prompt.rope, unit_rotations(prompt.offsets))
        self.set_statistics(self._measured(prompt, rope, self._prior() if self.statistics else None))

    def _prior(self) -> Prior:
        """The moments from which the statistics come."""
        rows = self.inverse.double()
        basis = torch.linalg.inv(rows) * self.deviation[:, None]
        mean = self._mean_table()[:, 0].double()
        return Prior(mean, rows.mT @ rows, basis @ basis.mT, self.statistics["queried"] > 0)

    def _measured(self, prompt: Prompt, rope: GroupRope | None, prior: Prior | None, quiet: bool = False) -> Statistics:
        costs = getattr(self.native, "attention_costs", attention_costs)
        found = prompt_statistics(prompt, self.group, rope, prior, costs, quiet)
        return _coded(found) | {"queried": found["queried"]}

    def set_statistics(self, statistics: Statistics) -> None:
        if _file(self.options) is None:
            super().set_statistics(statistics)
            self._use(statistics)

    @classmethod
    def layout(cls, options: SpectralOptions, side: Side, head_dim: int) -> tuple[Field, ...]:
        if side == "values":
            raise ValueError("spectral for values: values gain nothing from it; choose another method for them")
        check_head_dim(cls.name, head_dim, CODES_PER_WORD, 2 * CODES_PER_WORD)
        file = _file(options)
        group = options.group or GROUP if file is None else file.header["group"]
        counts = digit_counts(options.bits, head_dim)
        twos = code_fields(2, counts.twos, "two_bit_") if counts.twos else ()
        return *twos, *code_fields(1, counts.ones, "one_bit_"), Field("scale", torch.float16, (group,), tokens=group)

    @classmethod
    def rope_use(cls, options: SpectralOptions, side: Side) -> RopeUse:
        file = _file(options)
        return "factors" if file is None or file.facts.rope else "none"

    @classmethod
    def needs_rope(cls, options: SpectralOptions, side: Side) -> bool:
        file = _file(options)
        return file is not None and bool(file.facts.rope)

    def least_tokens(self, in_step: bool = False) -> int:
        if _file(self.options) is not None:
            return 0
        if in_step:
            return base.LEAST_IN_STEPS
        return max(prefill.LEAST_LATER, 2 * self.group) if self.statistics else base.LEAST_TOKENS

    def prepare(self, x: torch.Tensor, may_wait: bool = False) -> bool:
        return not (may_wait and self.least_tokens()) and super().prepare(x)

    @classmethod
    def check_model(
        cls, options: SpectralOptions, side: Side, config: "PreTrainedConfig", layer: int, rope: RopeLayout | None
    ) -> None:
        file = _file(options)
        known = rope if file is None else file.facts.rope
        if not known and (rotary_embedding(config) is not None or getattr(config, "rotary_dim", None) is not None):
            raise ValueError(
                f"spectral for keys: {config.model_type} has rotary position embeddings of an unknown kind"
            )
        if file is not None:
            file.check_model(model_facts(config), any_model=options.any_model)
            if missing := [part for part in PARTS if f"keys.{layer}.{part}" not in file.shapes]:
                raise file.refusal(f"it holds no keys of layer {layer} ({missing[0]})")

    @classmethod
    def constant_size(cls, options: SpectralOptions, side: Side, head_dim: int, heads: int) -> int:
        """Bytes of one layer's bases, means and tables, which are the same with a file of statistics."""
        group = cls.layout(options, side, head_dim)[-1].tokens
        plain = options.model_copy(update={"statistics": TEXT, "group": group})
        return super().constant_size(plain, side, head_dim, heads)

    def ready_basis(self) -> torch.Tensor:
        """Rows of the digits, float32 `[H, W, D]`; rebuilt at each call, because no kernel keeps them."""
        digits = self.digits
        rows = digits.channels.long()[..., None].expand(digits.channels.shape + self.directions.shape[-1:])
        return self.inverse.gather(1, rows) * digits.weights[..., None]

    def _mean_table(self) -> torch.Tensor:
        """Mean key at each position in a group, float32 `[H, group, D]`."""
        return self.places.float() @ self.means.float()

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        x, means = x.float().unflatten(2, (-1, self.group)), self._mean_table()[:, None]
        if rope is not None and self.context.rope is not None:
            cos, sin = (factor[:, :, None] for factor in rope)
            x = self.context.rope.unrotate(x, (cos, sin)).sub_(means)
        else:
            x = x - means
        y = x.flatten(2, 3) @ self.encode_basis
        encode = getattr(self.native, "quantize_digits", quantize)
        *planes, scale = encode(y, self.deviation, self.digits, tables(y.device))
        return *planes, scale.clamp(max=SCALE_MAX).to(torch.float16).unflatten(2, (-1, self.group))

    def parts(self, fields: Fields) -> Iterator[Part]:
        """2-bit digits, then 1-bit digits, along their rows of the basis."""
        scale, twos = fields[-1].float().flatten(2), self.counts.twos
        rows = (slice(0, twos), 2), (slice(twos, twos + self.counts.ones), 1)
        for (part, bits), planes in zip(rows[-len(fields) + 1 :], fields[:-1], strict=True):
            yield Part(part, packing.look_up((planes,), bits, self._tables[bits == 1]), scale)

    @cached_property
    def cpu_side(self) -> CPUSide:
        digits = self.digits
        maps = [self.directions, self.means]
        if self._order.diff().ne(1).any():
            maps = [x[..., self._order] for x in maps]
        weights = digits.weights * self.lengths.gather(1, digits.channels.long())
        tables = (*self.digit_levels, *maps, self.places, self._order, digits.channels, weights)
        return CPUSide("digits", (self.group, *self.counts), tables)

    def decode(self, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        x = super().decode(fields)
        x = (x.unflatten(2, (-1, self.group)) + self._mean_table()[:, None]).flatten(2, 3)
        if rope is None or self.context.rope is None:
            return x
        cos, sin = (factor.repeat_interleave(self.group, 1) for factor in rope)
        return self.context.rope.rotate(x, (cos, sin))

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        """Return the queries unchanged; `score` maps them per group, relative to its anchor."""
        return query

    def score(self, mapped: torch.Tensor, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        """Inner products `[B, H, R, T]`; queries are rotated to each group's anchor and mapped there."""
        groups = fields[-1].shape[2]
        turned = mapped[:, :, :, None].expand(-1, -1, -1, groups, -1)
        if rope is not None and self.context.rope is not None:
            turned = self.context.rope.rotate_query(turned.flatten(1, 2), rope).view(turned.shape)
        turned = turned.transpose(2, 3)
        # Treat groups as heads, because each has queries of its own.
        planes = (x.unflatten(2, (groups, -1)).flatten(1, 2) for x in fields[:-1])
        by_group = (*planes, fields[-1].flatten(1, 2)[:, :, None])
        scores = super().score((turned @ self.ready_basis()[:, None].mT).flatten(1, 2), by_group)
        scores = scores.view(*turned.shape[:-1], self.group) + turned @ self._mean_table()[:, None].mT
        return scores.transpose(2, 3).flatten(3)

    @cached_property
    def kernel_side(self) -> Any:
        from kvcache_compress.triton_kernels.decode.spectral import spectral_side

        levels, means = self.digit_levels[0], (self.means.float(), self.places.float())
        return spectral_side(self.context, self.group, self.digits, levels, self.inverse, *means)

    @cached_property
    def kernel_encoder(self) -> Any:
        from kvcache_compress.triton_kernels.encode.spectral import spectral_encoder

        keys, means = (self.encode_basis, self.deviation), (self.means.float(), self.places.float())
        return spectral_encoder(self.context, self.group, self.digits, *keys, *means)


def _coded(tensors: Mapping[str, torch.Tensor]) -> Statistics:
    """Convert a layer's statistics to what attention reads, mostly in 16 bits.

    `directions` are inverse-basis rows times their deviations, divided by `lengths` (powers of two).
    """
    rows = tensors["inverse"] * tensors["deviation"][..., None]
    lengths = torch.ldexp(torch.ones_like(rows[..., 0]), torch.frexp(rows.abs().amax(-1)).exponent)
    return {
        "directions": (rows / lengths[..., None]).half().contiguous(),
        "lengths": lengths,
        "deviation": tensors["deviation"],
        "means": (tensors["means"] * MEAN_UNIT).half(),
        "places": (tensors["places"] / MEAN_UNIT).half(),
    }


@lru_cache(maxsize=256)
def _of_file(file: ModelFile, layer: int, device: torch.device, start: int, stop: int) -> Statistics:
    """Tensors of some heads of a layer, shared by all caches that use the file."""
    return {part: x[start:stop].clone() for part, x in file.load(f"keys.{layer}.", device).items()}


@lru_cache(maxsize=8)
@on_cpu()
def _level_tables(device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
    """Levels of digits of two bits and of one, and their tables for `packing.look_up`."""
    with torch.inference_mode(False):  # the cached tables must also work outside of inference mode
        levels = two_bit_levels().to(device), torch.tensor([-1.0, 1.0]).to(device)
        return levels, tuple(packing.level_table(x, bits) for x, bits in zip(levels, (2, 1), strict=True))


def _file(options: SpectralOptions) -> ModelFile | None:
    """The statistics file, or None if statistics are measured on the first prompt."""
    return None if options.statistics == TEXT else read_statistics(options.statistics)
