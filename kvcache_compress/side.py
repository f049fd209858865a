"""Keys or values of one layer: the codec and its three segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from .backend import load_part, on_device
from .checks import LONGEST, PackableChecks, one_prompt
from .codec import Backend, Codec, Fields, Side
from .rope import Rope
from .rope_track import RopeTrack
from .store import PackedStore, TailBuffer
from .view import MAX_DECODE_TOKENS, SideSegments

if TYPE_CHECKING:
    from .triton_kernels.operands import KernelEncoder

CHUNK_TOKENS = 4096
"""Tokens encoded at a time, so that a long prompt needs little memory beside itself; a multiple of every group."""


class SideState:
    """`sinks | packed | tail` of one side."""

    def __init__(self, codec: Codec, like: torch.Tensor, usual_tail: int, track: RopeTrack | None) -> None:
        self.codec = codec
        self.track = track
        self.sinks = like.new_empty(*like.shape[:2], 0, like.shape[3])
        self.store = PackedStore(codec.fields, like.shape[0], like.shape[1], like.device)
        self.tail = TailBuffer(like, usual_tail)
        self.prepared = False

    def pack(self, x: torch.Tensor, tokens: int, growing: bool) -> None:
        """Encodes the first `tokens` of `x` into the store; what depends on data is set from all of the first `x`."""
        self.prepare(x)
        self.store.reserve(tokens, growing)
        for start in range(0, tokens, CHUNK_TOKENS):
            part = x[:, :, start : min(start + CHUNK_TOKENS, tokens)]
            count, done = part.shape[2], self.store.tokens
            with on_device(part):
                if encoder := triton_encoder(self.codec):
                    load_part(".triton_kernels.encode").encode(encoder, part, self.store.room(count, growing), done)
                    self.store.tokens += count
                else:
                    encoded = self.codec.encode(part, self._rope(done, done + count))
                    self.store.append(encoded, count, growing)

    def prepare(self, x: torch.Tensor) -> None:
        """Sets what depends on data, unless it is set."""
        if not self.prepared:
            with on_device(x):
                self.codec.prepare(x[:1] if self.codec.of_one_prompt else x)
            self.prepared = True

    def _rope(self, start: int, stop: int) -> Rope | None:
        first = self.sinks.shape[2]
        return None if self.track is None else self.track.read(first + start, first + stop)

    def decode(self, start: int, stop: int) -> torch.Tensor:
        """Packed tokens `[start, stop)`, whole groups, decoded: float32 `[B, H, stop - start, D]`."""
        device = self.codec.context.device
        fields = tuple(field.to(device) for field in self.store.read(start, stop))
        with on_device(fields[0]):
            return self.codec.decode(fields, self._rope(start, stop))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that this side holds, by name: its tokens without spare room, and the codec's statistics."""
        fields = zip(self.store.fields, self.store.read(0, self.store.tokens), strict=True)
        held = {"sinks": self.sinks, "tail": self.tail.view()}
        held |= {f"packed.{field.name}": stored for field, stored in fields}
        return held | {f"statistics.{name}": x for name, x in self.codec.statistics.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor], packed: int, prepared: bool) -> None:
        """Makes a new side what the one was whose `tensors` these are; they are copied."""
        device = self.sinks.device
        self.sinks = tensors["sinks"].to(device, copy=True)
        self.store.append(tuple(tensors[f"packed.{field.name}"] for field in self.store.fields), packed, growing=False)
        self.tail.replace(tensors["tail"])
        self.prepared = prepared
        if prepared:
            own = {name: x for name, x in tensors.items() if name.startswith("statistics.")}
            self.codec.set_statistics(
                {name.removeprefix("statistics."): x.to(device, copy=True) for name, x in own.items()}
            )

    def widen(self, dtype: torch.dtype) -> None:
        """Holds dense tokens in a dtype that loses nothing of `dtype` either, as concatenation would."""
        if dtype == self.sinks.dtype:
            return
        wider = torch.promote_types(self.sinks.dtype, dtype)
        if wider != self.sinks.dtype:
            self.sinks = self.sinks.to(wider)
            self.tail.apply(lambda x: x.to(wider))

    def segments(self, packed: int, tail: torch.Tensor, tokens: int) -> SideSegments:
        """With the first `packed` tokens of the store, and the first `tokens` of a contiguous `tail`."""
        return SideSegments(self.sinks, self.store, packed, tail, tokens, self.codec, self.track)

    def everything(self) -> SideSegments:
        """All that the side holds."""
        return self.segments(self.store.tokens, self.tail.buffer, self.tail.tokens)

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.sinks = change(self.sinks)
        self.store.apply(change)
        self.tail.apply(change)

    def crop(self, sinks: int, packed: int, group: int) -> None:
        """Keeps the first `sinks` and `packed` tokens; a group that is cut is decoded back into the tail."""
        whole = packed // group * group
        cut = self.tail.buffer
        if packed > whole:
            cut = self.decode(whole, whole + group)
        self.tail.replace(cut[:, :, : packed - whole].to(self.tail.buffer.dtype))
        self.store.truncate(whole)
        self.sinks = self.sinks[:, :, :sinks]


def triton_encoder(codec: Codec) -> KernelEncoder | None:
    """The kernel that encodes this codec's tokens and stores them at once; None where its `encode` does."""
    return codec.kernel_encoder if codec.backend == "triton" else None


def encoded(codec: Codec, x: torch.Tensor, rope: Rope | None = None) -> Fields:
    """`x` `[B, H, T, D]`, whole groups, encoded as the codec's backend does it, but for what is stored at once."""
    with on_device(x):
        if encoder := triton_encoder(codec):
            found: Fields = load_part(".triton_kernels.encode").encoded(encoder, x, codec.fields)
            return found
        return codec.encode(x, rope)


def begin(
    sides: Mapping[Side, SideState],
    first: Mapping[Side, torch.Tensor],
    checks: PackableChecks,
    sinks: int,
    recent: int,
) -> None:
    """Sets what is to be one prompt's own, from the first tokens `[B, H, T, D]`: of both sides or of neither.

    Raises:
        ValueError: rows of several prompts, or what `checks` refuses.
    """
    own = {side: state for side, state in sides.items() if state.codec.of_one_prompt and first[side].shape[2]}
    for side, state in own.items():
        checks.add(side, first[side])
        if not one_prompt(first[side]):
            raise ValueError(
                f"codebook='online' for {side} of {state.codec.name}, with {len(first[side])} prompts in a batch: "
                "allowed one, alone or repeated for beams and samples, or codebook='offline'"
            )
    for side, state in own.items():
        if not state.prepared:
            state.prepare(measured(first[side], sinks, recent))


def measured(first: torch.Tensor, sinks: int, recent: int) -> torch.Tensor:
    """The first tokens that set what depends on data: without the sinks, unless there are few others."""
    others = first[:, :, sinks:]
    return others if others.shape[2] >= max(1, recent) else first


def append(
    sides: Mapping[Side, SideState], keys: torch.Tensor, values: torch.Tensor, sinks: int, backend: Backend
) -> None:
    """Adds new tokens `[B, H, n, D]`, the first `sinks` of them to the sinks of both sides, the others to the tails.

    Triton copies those of a step to the tails in one launch.
    """
    k_side, v_side = sides["keys"], sides["values"]
    k_tail, v_tail = k_side.tail, v_side.tail
    count = keys.shape[2] - sinks
    # For both before either has more tokens: there may be memory for one of them only.
    k_tail.reserve(count)
    v_tail.reserve(count)
    if sinks:
        k_side.sinks, v_side.sinks = (
            torch.cat([side.sinks, x[:, :, :sinks]], 2) for side, x in ((k_side, keys), (v_side, values))
        )
        keys, values = keys[:, :, sinks:], values[:, :, sinks:]
    if backend == "triton" and 0 < count <= MAX_DECODE_TOKENS and keys.stride(3) == values.stride(3) == 1:
        with on_device(keys):
            load_part(".triton_kernels.append").append(keys, values, k_tail.buffer, v_tail.buffer, k_tail.tokens)
        k_tail.tokens += count
        v_tail.tokens += count
    else:
        k_tail.append(keys)
        v_tail.append(values)


def pack(sides: Mapping[Side, SideState], tails: Mapping[Side, torch.Tensor], leaving: int, growing: bool) -> None:
    """Encodes the first `leaving` tokens of `tails` `[B, H, T, D]`; the others are the tails from now on."""
    for side, tail in tails.items():
        sides[side].pack(tail, leaving, growing)
        sides[side].tail.replace(tail[:, :, leaving:])


def flush(sides: Mapping[Side, SideState], leaving: int, checks: PackableChecks) -> None:
    """`pack` of the first `leaving` tokens of the tails in one launch per side, which checks them as well.

    For Triton, and sides that are prepared and have a `kernel_encoder`. Where `checks` raises at once nothing changes.
    """
    following = []
    for state, good in zip(sides.values(), checks.flags(sides["keys"].sinks.device), strict=True):
        tail, encoder = state.tail, state.codec.kernel_encoder
        kept = tail.tokens - leaving
        following.append(tail.another(kept))
        with on_device(tail.buffer):
            load_part(".triton_kernels.encode").flush(
                encoder, tail.buffer, leaving, kept, state.store.room(leaving, growing=True), state.store.tokens,
                following[-1], good, LONGEST,
            )  # fmt: skip
    checks.add_flags()
    for state, buffer in zip(sides.values(), following, strict=True):
        state.store.tokens += leaving
        state.tail.buffer = buffer
        state.tail.tokens -= leaving


def crop(sides: Mapping[Side, SideState], left: int, group: int) -> None:
    """Keeps the first `left` tokens. Exact within the tail; a packed group that is cut is decoded."""
    keys = sides["keys"]
    sinks = min(left, keys.sinks.shape[2])
    packed = min(left - sinks, keys.store.tokens)
    for state in sides.values():
        if packed < state.store.tokens or sinks < state.sinks.shape[2]:
            state.crop(sinks, packed, group)
        else:
            state.tail.truncate(left - sinks - packed)
