"""Contract of a method: one codec per side (keys or values) and layer."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import torch

from kvcache_compress.modeling.rope import Rope, RopeLayout
from kvcache_compress.validation import StrictOptions

from . import layout
from .layout import Field
from .mask import AttentionCall
from .padding import LeftPadding
from .rotation import hashed_seed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Side: TypeAlias = Literal["keys", "values"]
SIDES: tuple[Side, ...] = ("keys", "values")
Fields: TypeAlias = tuple[torch.Tensor, ...]
"""Stored tensors of a run of tokens, in the order of `Codec.fields`,
each `[B, H, tokens / field.tokens, *field.shape]`."""
Statistics: TypeAlias = dict[str, torch.Tensor]
"""Data-dependent tensors of a codec by name, measured on the first tokens; their names, shapes and dtypes follow from
its options alone."""
RopeUse: TypeAlias = Literal["none", "pairs", "factors"]
"""A codec's need for RoPE: nothing, the pairing of channels, or also the cos and sin of each group's first token."""

HOOKS = ("kernel_side", "kernel_encoder", "cpu_side")
"""Optional parts of a codec for fast backends, each a `cached_property`; `set_statistics` drops the cached values.

Their types belong to the kernels, which are built on this module."""


class MethodOptions(StrictOptions):
    """Options of a method; a subclass adds its own."""

    def idle(self) -> dict[str, str]:
        """Options that have no effect in this combination, each with the setting it needs; a config refuses them."""
        return {}


@dataclass(frozen=True)
class CodecContext:
    """Layer, side and sizes that a codec is made for."""

    side: Side
    head_dim: int
    heads: int
    layer: int
    seed: int
    sink_tokens: int
    dtype: torch.dtype
    device: torch.device
    rope: RopeLayout | None = None
    """The model's rotary pairs of channels; None without RoPE, or if no codec of the cache needs it."""

    def seed_of(self, part: str, shared: bool = False) -> int:
        """Seed of a random part of the codec, different per layer and side, or `shared` by the whole cache."""
        return hashed_seed(self.seed, part) if shared else hashed_seed(self.seed, part, self.layer, self.side)


@dataclass(frozen=True)
class Prompt:
    """First tokens of a layer, from which a codec takes its statistics if they follow from queries too.

    sinks, keys: keys that stay dense `[B, H, S, head_dim]`, and those after them `[B, H, T, head_dim]`.
    recent: number of tokens that the recent window will hold.
    rope: cos and sin of the first token of each group of `keys`, the last of which may be cut; None without RoPE.
    places: cos and sin of the positions in a group, `[1, group, rotary]`.
    queries: the last tokens' queries, with a mask over tokens in their order; None if nobody has seen them.
    padding: left padding of the rows, whose first tokens have changed places with it; None if there is none.
    """

    sinks: torch.Tensor
    keys: torch.Tensor
    recent: int
    rope: Rope | None = None
    places: Rope | None = None
    queries: AttentionCall | None = None
    padding: LeftPadding | None = None


class Codec(ABC):
    """Base class of codecs, which encode tokens `[B, H, T, head_dim]` to fields and attend over the fields.

    Codes live in a *code space*: queries are mapped into it once per step (`map_query`), stored tokens are scored and
    summed there, and the sum is mapped back once (`map_output`), so no cached vector is ever rotated back. The torch
    methods here are the reference; `kernel_side` hands the same arithmetic to the one Triton kernel.
    """

    name: ClassVar[str]
    Options: ClassVar[type[MethodOptions]] = MethodOptions

    fields: tuple[Field, ...]
    """Stored quantities, as `layout` returns them; every byte count comes from here."""
    group: int
    """Number of tokens that are encoded together, as some fields have one entry for all of them."""
    native: Any = None
    """The back end's functions for parts of `encode` by name, such as `quantize_levels`; PyTorch does the others."""
    chunks_on_cpp: bool = True
    """True if prompt chunks can use the C++ attention too; False if code space is much wider than a head."""
    per_prompt: bool = False
    """True if the statistics belong to a single prompt; batches of several prompts are then refused."""

    def __init__(self, options: Any, context: CodecContext) -> None:
        self.options = options
        self.context = context
        self.statistics: Statistics = {}
        self.fields = self.layout(options, context.side, context.head_dim)
        self.group = layout.group_tokens(self.fields)

    @classmethod
    @abstractmethod
    def layout(cls, options: Any, side: Side, head_dim: int) -> tuple[Field, ...]:
        """Fields for this head dimension; raises `ValueError` if the method does not support it."""

    @classmethod
    def rope_use(cls, options: Any, side: Side) -> RopeUse:
        """This side's need for RoPE, in layers that have it."""
        return "none"

    @classmethod
    def needs_rope(cls, options: Any, side: Side) -> bool:
        """True if layers without RoPE are refused; False if the codec does without what `rope_use` says there."""
        return cls.rope_use(options, side) != "none"

    @property
    def may_need_queries(self) -> bool:
        """True if statistics may follow from queries too, so that `learn` may return False."""
        return False

    @classmethod
    def check_model(cls, options: Any, side: Side, config: PreTrainedConfig, layer: int) -> None:
        """Raise `ValueError` if the method does not support this layer of the decoder, beyond its head dimension."""
        return

    def prepare(self, x: torch.Tensor) -> None:
        """Set the data-dependent parts, once, from the first tokens `[B, H, T, head_dim]`."""
        self.set_statistics(self.measure(x))

    def learn(self, x: torch.Tensor) -> bool:
        """Do what `prepare` does if `x` is enough; return False if `observe` must follow, with the last queries."""
        self.prepare(x)
        return True

    def observe(self, prompt: Prompt) -> None:
        """Set the data-dependent parts, once, from keys and queries."""
        keys, sinks = prompt.keys, prompt.sinks.shape[2]
        if prompt.padding is not None:
            keys = prompt.padding.without(keys, sinks, sinks)
        self.set_statistics(self.measure(keys, None if prompt.queries is None else prompt.queries.query))

    def measure(self, x: torch.Tensor, queries: torch.Tensor | None = None) -> Statistics:
        """Measure the statistics of tokens `x` `[B, H, T, head_dim]`, without changing the codec.

        `queries` `[B, Hq, n, head_dim]` are some that attend to them, if known.
        """
        return {}

    def set_statistics(self, statistics: Statistics) -> None:
        """Set the data-dependent parts from statistics, fresh from `measure` or loaded from a file."""
        self.statistics = statistics
        for hook in HOOKS:
            self.__dict__.pop(hook, None)

    @abstractmethod
    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        """Encode tokens `[B, H, T, head_dim]`, `T` a multiple of `group`.

        `rope` is set here and below if `rope_use` is `factors`: cos and sin of the first token of each group, each
        `[B, T / group, rotary]`.
        """

    @abstractmethod
    def decode(self, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        """Decode fields to float32 tokens `[B, H, T, head_dim]`."""

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        """Map float32 queries `[B, H, R, head_dim]` into code space `[B, H, R, W]`."""
        return query

    def score(self, mapped: torch.Tensor, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        """Compute inner products `[B, H, R, T]` of mapped queries with the stored tokens, float32."""
        return mapped @ self.decode(fields, rope).mT

    def accumulate(self, weights: torch.Tensor, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        """Sum stored tokens weighted by `weights` `[B, H, R, T]` in code space, float32 `[B, H, R, W]`."""
        return weights @ self.decode(fields, rope)

    def map_output(self, accumulated: torch.Tensor) -> torch.Tensor:
        """Map the result of `accumulate` back to float32 `[B, H, R, head_dim]`."""
        return accumulated

    @cached_property
    def kernel_side(self) -> Any:
        """Device functions and operands for attention in Triton, a `KernelSide`, or None."""
        return None

    @cached_property
    def kernel_encoder(self) -> Any:
        """Triton encoder that encodes and stores tokens in one launch, a `KernelEncoder`; if None, `encode` is used."""
        return None

    @cached_property
    def cpu_side(self) -> Any:
        """Operands for attention in C++, a `CPUSide`, or None."""
        return None

    def with_native(self, native: Any) -> Self:
        """Copy the codec for another `native`; the copy shares all tensors, which no codec changes in place."""
        twin = copy.copy(self)
        twin.native = native
        return twin

    @classmethod
    def has_kernels(cls, hook: str, options: Any, side: Side) -> bool:
        """True if codecs with these options have this one of the `HOOKS`, by default all of a class that defines it."""
        return getattr(cls, hook) is not getattr(Codec, hook)

    def constant_bytes(self) -> int:
        """Bytes of all tensors that the codec and its kernels keep; shared memory counts once."""
        side = vars(self).get("kernel_side")
        held = [*_tensors_in(vars(self)), *(side.tensors() if side else ())]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
        return sum(storages.values())

    @classmethod
    def constant_size(cls, options: Any, side: Side, head_dim: int, heads: int) -> int:
        """Estimate `constant_bytes` of one layer without a model, by a codec on the CPU."""
        half = head_dim // 2
        context = CodecContext(
            side=side,
            head_dim=head_dim,
            heads=heads,
            layer=0,
            seed=0,
            sink_tokens=0,
            dtype=torch.float32,
            device=torch.device("cpu"),
            rope=RopeLayout(tuple(range(2 * half)), half, tuple(range(half))),
        )
        codec = cls(options, context)
        codec.prepare(torch.randn(1, heads, 128, head_dim, generator=torch.Generator().manual_seed(0)))
        return codec.constant_bytes()

    def __getstate__(self) -> dict[str, Any]:
        """State without the hooks: they share the codec's tensors, and pickled copies would not."""
        return {name: value for name, value in self.__dict__.items() if name not in HOOKS}

    def __deepcopy__(self, memo: dict[int, Any]) -> Codec:
        """Copy the codec but share its tensors, which no codec changes in place; `prepare` affects one copy only."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def bits_per_number(self) -> float:
        """Stored bits per number, counting everything that is stored per token or group."""
        return 8 * layout.bytes_per_token(self.fields) / self.context.head_dim


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in an attribute: the value itself, or the items of containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors_in(vars(value))
