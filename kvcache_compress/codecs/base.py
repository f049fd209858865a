"""Contract of a compression method: a codec for one side (keys or values) of one layer."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import torch

from kvcache_compress.modeling.rope import Rope, RopeLayout
from kvcache_compress.validation import StrictOptions

from .layout import Field, group_tokens
from .mask import AttentionCall
from .padding import LeftPadding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Side: TypeAlias = Literal["keys", "values"]
SIDES: tuple[Side, ...] = ("keys", "values")
Fields: TypeAlias = tuple[torch.Tensor, ...]
"""Stored tensors of a run of tokens, one per entry of `Codec.fields`, each `[B, H, tokens / field.tokens,
*field.shape]`."""
Statistics: TypeAlias = dict[str, torch.Tensor]
"""A codec's measurements of cached tokens, by name. Its options alone fix their names, shapes and dtypes."""
RopeUse: TypeAlias = Literal["none", "pairs", "factors"]
"""A codec's use of RoPE: none, the pairing of channels, or also cos and sin of each group's first token."""

HOOKS = ("kernel_side", "kernel_encoder", "cpu_side")
"""Optional parts of a codec for fast back ends, each a `cached_property`; `set_statistics` drops the cached values.

Their types belong to the kernels, which import this module."""


LEAST_TOKENS, LEAST_IN_STEPS = 256, 512
"""Fewest tokens to measure well, sinks left out: of a prompt, and of generated text, which waits dense until then."""


class MethodOptions(StrictOptions):
    """Base class of a method's options."""

    def idle(self) -> dict[str, str]:
        """Options that have no effect in this combination, each with the setting it needs; a config refuses them."""
        return {}


def hashed_seed(*parts: int | str) -> int:
    """32-bit seed for a torch generator, independent for different `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


@dataclass(frozen=True)
class CodecContext:
    """The side, layer, sizes, dtype and device that a codec is made for."""

    side: Side
    head_dim: int
    heads: int
    layer: int
    seed: int
    sink_tokens: int
    dtype: torch.dtype
    device: torch.device
    rope: RopeLayout | None = None
    """The model's rotary channel pairs; None without RoPE, or if no codec of the cache needs them."""

    def seed_of(self, part: str, shared: bool = False) -> int:
        """Seed for a random part of the codec, different per layer and side unless `shared` by the whole cache."""
        return hashed_seed(self.seed, part) if shared else hashed_seed(self.seed, part, self.layer, self.side)


@dataclass(frozen=True)
class Prompt:
    """Tokens of a layer, for codecs whose statistics also depend on queries.

    Attributes:
        sinks: keys of the sinks, `[B, H, S, head_dim]`.
        keys: keys after the sinks, `[B, H, T, head_dim]`.
        recent: number of tokens that the recent window will hold.
        rope: cos and sin of the first token of each group of `keys` (the last group may be incomplete); None without
            RoPE.
        offsets: cos and sin of positions 0 to group - 1, `[1, group, rotary]`.
        queries: the last tokens' queries, with a mask over tokens in their order; None if they were not seen.
        padding: left padding of the rows, whose first tokens have swapped with it; None if there is none.
        at: positions of the queries in `sinks | keys`, int64 `[n]`; None if they belong to the last n tokens.
    """

    sinks: torch.Tensor
    keys: torch.Tensor
    recent: int
    rope: Rope | None = None
    offsets: Rope | None = None
    queries: AttentionCall | None = None
    padding: LeftPadding | None = None
    at: torch.Tensor | None = None


class Codec(ABC):
    """Base class of codecs, which encode tokens `[B, H, T, head_dim]` to fields and attend over the fields.

    Codes live in a *code space*. Queries are mapped into it once per step (`map_query`), and stored tokens are scored
    and summed there. The sum is mapped back once (`map_output`), so no cached vector is ever rotated back. The torch
    methods here are the reference for the kernels, which `kernel_side` and `cpu_side` provide with operands.
    """

    name: ClassVar[str]
    Options: ClassVar[type[MethodOptions]] = MethodOptions

    fields: tuple[Field, ...]
    """The stored fields, as `layout` returns them; every byte count comes from here."""
    group: int
    """Number of tokens that are encoded together, because some fields have one entry for all of them."""
    native: Any = None
    """A back end's functions that replace parts of `encode`, by name, such as `quantize_levels`; None for PyTorch
    alone."""
    chunks_on_cpp: bool = True
    """True if prompt chunks may use C++ attention; False if code space is much wider than a head."""
    bit_choices: ClassVar[tuple[float, ...]] = ()
    """Values of the option `bits` that a `BitBudget` chooses among; empty if it cannot change the method's bits."""

    def __init__(self, options: Any, context: CodecContext) -> None:
        self.options = options
        self.context = context
        self.statistics: Statistics = {}
        self.fields = self.layout(options, context.side, context.head_dim)
        self.group = group_tokens(self.fields)

    @classmethod
    @abstractmethod
    def layout(cls, options: Any, side: Side, head_dim: int) -> tuple[Field, ...]:
        """Stored fields for this head dimension; raises `ValueError` if the method does not support it."""

    @classmethod
    def rope_use(cls, options: Any, side: Side) -> RopeUse:
        """This side's use of RoPE, in layers that have RoPE."""
        return "none"

    @classmethod
    def needs_rope(cls, options: Any, side: Side) -> bool:
        """True if layers without RoPE are refused; False if the codec works without what `rope_use` asks for."""
        return cls.rope_use(options, side) != "none"

    def least_tokens(self, in_step: bool = False) -> int:
        """Fewest tokens from which statistics that depend on queries are measured; 0 if queries do not matter.

        Fewer may suffice once there are statistics, and generated text (`in_step`) may wait for more.
        """
        return 0

    @classmethod
    def check_model(
        cls, options: Any, side: Side, config: PreTrainedConfig, layer: int, rope: RopeLayout | None
    ) -> None:
        """Raise `ValueError` if the method does not support this decoder layer; `layout` checks the head dimension.

        `rope` is the model's, or None if it has none that is known or if no method needs it (`rope_use`).
        """
        return

    def prepare(self, x: torch.Tensor, may_wait: bool = False) -> bool:
        """Measure and set the statistics on the first tokens `[B, H, T, head_dim]`, without queries.

        With `may_wait`, a codec that needs queries too sets nothing and returns False; `observe` follows.
        """
        self.set_statistics(self.measure(x))
        return True

    def ready(self) -> None:
        """Make what steps keep, once the statistics are set: a step that a CUDA graph records may keep no memory."""
        return

    def observe(self, prompt: Prompt) -> None:
        """Measure and set the statistics on keys and queries, and blend in those that the codec has, if it likes.

        Called if `prepare` returned False, and on a copy whenever new statistics are tried.
        """
        keys, sinks = prompt.keys, prompt.sinks.shape[2]
        if prompt.padding is not None:
            keys = prompt.padding.without(keys, sinks, sinks)
        self.set_statistics(self.measure(keys, None if prompt.queries is None else prompt.queries.query))

    def measure(self, x: torch.Tensor, queries: torch.Tensor | None = None) -> Statistics:
        """Measure the statistics of tokens `x` `[B, H, T, head_dim]`, without changing the codec.

        `queries` `[B, Hq, n, head_dim]` are queries that attend to these tokens, if known.
        """
        return {}

    def set_statistics(self, statistics: Statistics) -> None:
        """Set up everything that depends on the statistics, from `measure` or a file."""
        self.statistics = statistics
        for hook in HOOKS:
            self.__dict__.pop(hook, None)

    @abstractmethod
    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        """Encode tokens `[B, H, T, head_dim]`, `T` a multiple of `group`.

        If `rope_use` is `factors`, `rope` here and below is cos and sin of each group's first token, each `[B, T /
        group, rotary]`; else None.
        """

    @abstractmethod
    def decode(self, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        """Decode fields to float32 tokens `[B, H, T, head_dim]`."""

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        """Map float32 queries `[B, H, R, head_dim]` into code space `[B, H, R, W]`."""
        return query

    def score(self, mapped: torch.Tensor, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        """Inner products `[B, H, R, T]`, float32, of mapped queries with the stored tokens."""
        return mapped @ self.decode(fields, rope).mT

    def accumulate(self, weights: torch.Tensor, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        """Sum stored tokens, weighted by `weights` `[B, H, R, T]`, in code space: float32 `[B, H, R, W]`."""
        return weights @ self.decode(fields, rope)

    def map_output(self, accumulated: torch.Tensor) -> torch.Tensor:
        """Map the result of `accumulate` back to float32 `[B, H, R, head_dim]`."""
        return accumulated

    @cached_property
    def kernel_side(self) -> Any:
        """Device functions and operands for Triton attention (a `KernelSide`), or None."""
        return None

    @cached_property
    def kernel_encoder(self) -> Any:
        """Triton encoder that encodes and stores tokens in one launch (a `KernelEncoder`); None to use `encode`."""
        return None

    @cached_property
    def cpu_side(self) -> Any:
        """Operands for C++ attention (a `CPUSide`), or None."""
        return None

    def with_bits(self, bits: float) -> Self:
        """Return this codec with other `bits` and the same statistics."""
        if bits == self.options.bits:
            return self
        twin = type(self)(self.options.model_copy(update={"bits": bits}), self.context).with_native(self.native)
        if self.statistics:
            twin.set_statistics(self.statistics)
        return twin

    def with_native(self, native: Any) -> Self:
        """Copy the codec with another `native`; the copy shares all tensors, which no codec changes in place."""
        twin = copy.copy(self)
        twin.native = native
        return twin

    @classmethod
    def has_kernels(cls, hook: str, options: Any, side: Side) -> bool:
        """True if codecs with these options have this hook of `HOOKS`; by default, if the class defines it."""
        return getattr(cls, hook) is not getattr(Codec, hook)

    def constant_bytes(self, counted: set[int] | None = None) -> int:
        """Bytes of all tensors that the codec and its kernels keep.

        Shared memory counts once, and not at all if its address is in `counted`, which receives all addresses.
        """
        counted = set() if counted is None else counted
        side = vars(self).get("kernel_side")
        held = [*_tensors_in(vars(self)), *(side.tensors() if side else ())]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
        found = sum(size for address, size in storages.items() if address not in counted)
        counted.update(storages)
        return found

    @classmethod
    def constant_size(cls, options: Any, side: Side, head_dim: int, heads: int) -> int:
        """Estimate `constant_bytes` of one layer without a model, from a codec on the CPU."""
        half = head_dim // 2
        rope = RopeLayout(tuple(range(2 * half)), half, tuple(range(half)))
        context = CodecContext(
            side=side, head_dim=head_dim, heads=heads, layer=0, seed=0, sink_tokens=0, dtype=torch.float32,
            device=torch.device("cpu"), rope=rope,
        )  # fmt: skip
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


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a value, including those in containers and dataclasses."""
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item)
