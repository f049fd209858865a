"""Growing storage of a compressed layer, whose token counts the host knows: `sinks | packed | tail` per side."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kvcache_compress.codecs.base import Side
from kvcache_compress.codecs.mask import AttentionCall

from .backend import Backend
from .checks import PackableChecks, same_prompt
from .rope_track import RopeTrack
from .side import MAX_DECODE_TOKENS, MAX_DRAFT_TOKENS, SideState, Windows, statistics_tokens
from .view import View


class DynamicStorage:
    """`sinks | packed | tail` of keys and values, in buffers that grow with the tokens.

    With `windows.capacity` the packed stores have their full capacity from the start, the layer checks tokens as they
    arrive, and codecs take their statistics from the first of them, so that a `StaticStorage` can take over any time.

    Args:
        sides: the two sides, empty.
        windows: numbers of tokens per segment.
        checks: of the vectors that are about to be packed.
        backend: the layer's.
        flushes_steps: True if steps and drafts pack earlier tokens, False if only prompts and their chunks do.
        track: cos and sin of the packed groups, if a codec needs them.
        leads_track: True for the layer that writes `track`.
    """

    def __init__(
        self,
        sides: dict[Side, SideState],
        windows: Windows,
        checks: PackableChecks,
        backend: Backend,
        *,
        flushes_steps: bool = True,
        track: RopeTrack | None = None,
        leads_track: bool = True,
    ) -> None:
        self.sides = sides
        self.windows = windows
        self.checks = checks
        self.backend = backend
        self.flushes_steps = flushes_steps
        self.track = track
        self.leads_track = leads_track
        self.due: int | None = None
        """Tokens that `close` packs after the step's attention, as a codec needs its queries; None if none waits."""
        if windows.capacity is not None:
            for state in sides.values():
                state.store.make_static(windows.packed_capacity + windows.group)
            if track is not None:
                track.make_static(windows.packed_capacity, sides["keys"].sinks)

    @property
    def tokens(self) -> int:
        """Tokens per sequence."""
        keys = self.sides["keys"]
        return int(keys.sinks.shape[2]) + keys.store.tokens + keys.tail.tokens

    @property
    def empty(self) -> bool:
        return not self.tokens

    @property
    def packed_tokens(self) -> int:
        return self.sides["keys"].store.tokens

    @property
    def dense_buffers(self) -> tuple[torch.Tensor, ...]:
        """The dense buffers of both sides with their spare capacity, in the model's dtype."""
        return tuple(x for state in self.sides.values() for x in (state.sinks, state.tail.buffer))

    def views(self) -> tuple[View, View]:
        """Views of keys and values over all their tokens."""
        k_side, v_side = self.sides.values()
        return k_side.view(), v_side.view()

    def as_dynamic(self) -> DynamicStorage:
        """Return the storage itself, for the interface of `StaticStorage.as_dynamic`."""
        return self

    @property
    def dense_parts(self) -> dict[Side, torch.Tensor]:
        """A dense tensor of each side, to read shape, dtype and device from."""
        return {side: state.sinks for side, state in self.sides.items()}

    def widen(self, keys: torch.dtype, values: torch.dtype) -> None:
        """Convert the dense tokens of keys and values to these dtypes."""
        for state, dtype in zip(self.sides.values(), (keys, values), strict=True):
            state.widen(dtype)

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, counter: torch.Tensor | None = None, held: int = 0
    ) -> tuple[View, View]:
        """Append new tokens `[B, H, n, D]`, in the dtypes that the storage holds.

        The first tokens are a prompt, and so is a later chunk of more than `MAX_DRAFT_TOKENS`. All of a prompt but the
        recent window is packed at once. A shorter chunk is a step or a draft, which packs only tokens that were due
        before it.

        Args:
            counter: int64 `[]`, receives the number of tokens.
            held: number of last tokens of a prompt that may be a draft; they and the window before them stay dense.

        Returns:
            What these tokens attend to: themselves and all that was dense before, in full precision even if packed by
            now.

        Raises:
            ValueError: a vector to be encoded is not finite.
        """
        length = self.tokens
        self.checks.raise_for_known()
        sinks_before = [state.sinks for state in self.sides.values()]
        try:
            keys, values = self._settled(keys, values, length)
            found = self._append(keys, values, length, held)
        except Exception:
            for state, sinks in zip(self.sides.values(), sinks_before, strict=True):
                state.sinks = sinks
            raise
        if self.windows.capacity is not None:
            self._prepare()
        if counter is not None:
            counter.fill_(self.tokens)
        return found

    def _append(self, keys: torch.Tensor, values: torch.Tensor, length: int, held: int) -> tuple[View, View]:
        count = keys.shape[2]
        if not length:
            self._begin({"keys": keys, "values": values})
        if self.track is not None:
            self.track.extend(length, keys, again=not self.leads_track)
        prompt = count > (MAX_DRAFT_TOKENS if length else MAX_DECODE_TOKENS)
        if not prompt and (self.flushes_steps or (count > MAX_DECODE_TOKENS and not held)):
            self._flush()
        k_side, v_side = self.sides.values()
        sinks = min(self.windows.sinks - k_side.sinks.shape[2], count)
        packed = k_side.store.tokens
        if prompt:
            k_tail, v_tail = self._add_prompt(keys, values, sinks, held)
            return k_side.view(packed, k_tail), v_side.view(packed, v_tail)
        self._add(keys, values, sinks)
        return self.views()

    def _settled(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Let new tokens that are sinks of left-padded rows change places with the padding there."""
        record, sinks = self.sides["keys"].padding, self.windows.sinks
        if not length:
            record.begin(keys)
        rows = record.rows
        if rows is None or length >= rows.longest + sinks:
            return keys, values
        k_side, v_side = self.sides.values()
        k_side.sinks, keys = rows.settle(k_side.sinks, keys, length, sinks)
        v_side.sinks, values = rows.settle(v_side.sinks, values, length, sinks)
        return keys, values

    def close(self, call: AttentionCall | None) -> None:
        """End a step after its attention: pack what is due, with statistics from its queries, if these were seen."""
        if self.due is None:
            return
        tails, due = self._tails(), self.due
        self._check_packable(tails, due)
        for state in self.sides.values():
            if state.codec.may_need_queries:
                state.observe(call, self.windows.recent)
        self.due = None
        self._flush_tails(tails, due, growing=self.flushes_steps)

    def _tails(self) -> dict[Side, torch.Tensor]:
        return {side: state.tail.view() for side, state in self.sides.items()}

    def _learn(self, tails: Mapping[Side, torch.Tensor], first: int) -> bool:
        """Take statistics from tails whose first token has index `first`; False if a codec needs queries as well.

        The other side then waits too.
        """
        return all(self.sides[side].prepare(tails[side], first) for side in self._sides_by_need())

    def _sides_by_need(self) -> list[Side]:
        """Sides that may need queries come first."""
        return sorted(self.sides, key=lambda side: not self.sides[side].codec.may_need_queries)

    def _check_packable(self, tails: Mapping[Side, torch.Tensor], leaving: int) -> None:
        """Raise if a vector to be encoded, or one that an unprepared codec takes statistics from, cannot be packed."""
        if self.windows.capacity is not None:
            return  # each token was checked when it arrived
        for side, x in tails.items():
            if not self.sides[side].prepared:
                self.checks.add(side, x)
            elif leaving:
                self.checks.add(side, x[:, :, :leaving])

    def _begin(self, first: Mapping[Side, torch.Tensor]) -> None:
        """Prepare codecs that fit one prompt from its first tokens `[B, H, T, D]`: those of both sides or none.

        Raises:
            ValueError: rows of several prompts, or vectors that `checks` refuses.
        """
        online = {side: state for side, state in self.sides.items() if state.codec.per_prompt and first[side].shape[2]}
        for side, state in online.items():
            self.checks.add(side, first[side])
            if not same_prompt(first[side]):
                raise ValueError(
                    f"codebook='online' for {side} of {state.codec.name}, with {len(first[side])} prompts in a batch: "
                    "allowed one, alone or repeated for beams and samples, or codebook='offline'"
                )
        for side, state in online.items():
            state.prepare(*statistics_tokens(first[side], self.windows.sinks, self.windows.recent))

    def _prepare(self) -> None:
        """Take statistics from the first tokens before any is packed, from the sinks too if there are few others."""
        if self.due is not None or not self.tokens or all(state.prepared for state in self.sides.values()):
            return
        for side in self._sides_by_need():
            state = self.sides[side]
            written = torch.cat([state.sinks, state.tail.view()], 2)
            if not state.prepare(*statistics_tokens(written, state.sinks.shape[2], self.windows.recent)):
                return

    def _add_prompt(
        self, keys: torch.Tensor, values: torch.Tensor, sinks: int, held: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a chunk of a prompt, pack all but the recent window at once, and return both tails from before packing.

        The window ends `held` tokens earlier, but statistics that need queries are taken as if it did not.
        The first chunk's tails are views of it, which saves a copy of the prompt: no later step attends to them.
        """
        tails: dict[Side, torch.Tensor] = {"keys": keys[:, :, sinks:], "values": values[:, :, sinks:]}
        if self.tokens:
            tails = {side: torch.cat([self.sides[side].tail.view(), x], 2) for side, x in tails.items()}
        tail = tails["keys"].shape[2]
        leaving, first = self.windows.leaving(tail - held), self.sides["keys"].sinks.shape[2] + sinks
        waits = False
        if self.windows.leaving(tail):
            self._check_packable(tails, leaving)
            waits = not self._learn(tails, first)
            self.due = leaving if waits else None
        if leaving and not waits:
            self._add(keys[:, :, :sinks], values[:, :, :sinks], sinks)
            self._flush_tails(tails, leaving, growing=self.flushes_steps)
        else:
            self._add(keys, values, sinks)
        return tails["keys"], tails["values"]

    def _add(self, keys: torch.Tensor, values: torch.Tensor, sinks: int) -> None:
        """Add new tokens `[B, H, n, D]`, the first `sinks` of them to the sinks, the others to the tails."""
        k_side, v_side = self.sides["keys"], self.sides["values"]
        k_tail, v_tail = k_side.tail, v_side.tail
        count = keys.shape[2] - sinks
        # Both get their memory before either counts the tokens: an allocation may fail.
        k_tail.ensure_capacity(count)
        v_tail.ensure_capacity(count)
        if sinks:
            k_side.sinks, v_side.sinks = (
                torch.cat([side.sinks, x[:, :, :sinks]], 2) for side, x in ((k_side, keys), (v_side, values))
            )
            keys, values = keys[:, :, sinks:], values[:, :, sinks:]
        self.backend.append(keys, values, k_tail, v_tail)

    def _flush(self) -> None:
        """Flush the oldest tokens of the tails to the packed stores, if enough have left the recent window."""
        leaving = self.windows.leaving(self.sides["keys"].tail.tokens)
        if not leaving:
            return
        tails = self._tails()
        if not all(state.prepared for state in self.sides.values()):
            self._check_packable(tails, leaving)
        if not self._learn(tails, self.sides["keys"].sinks.shape[2]):
            self.due = leaving
        elif not self.backend.flush(self.sides, leaving, self.checks):
            self._check_packable(tails, leaving)
            self._flush_tails(tails, leaving, growing=True)

    def _flush_tails(self, tails: Mapping[Side, torch.Tensor], leaving: int, growing: bool) -> None:
        """Append the first `leaving` tokens of `tails` `[B, H, T, D]` encoded, and keep the others as the new tails."""
        for side, tail in tails.items():
            self.backend.pack(self.sides[side], tail, leaving, growing)
            self.sides[side].tail.replace(tail[:, :, leaving:])

    def crop(self, left: int) -> None:
        """Keep the first `left` tokens: exactly within the tail, while a packed group that is cut is decoded."""
        keys = self.sides["keys"]
        rows = keys.padding.rows
        if rows is not None and left < rows.longest + self.windows.sinks:
            for state in self.sides.values():  # padding returns to where removed tokens were sinks
                tokens = state.view().stored()[:, :, :left]
                rows.exchange_(tokens.mT, self.windows.sinks)
                state.sinks = tokens[:, :, : self.windows.sinks].contiguous()
        sinks = min(left, keys.sinks.shape[2])
        packed = min(left - sinks, keys.store.tokens)
        for state in self.sides.values():
            if packed < state.store.tokens or sinks < state.sinks.shape[2]:
                state.crop(sinks, packed, self.windows.group)
            else:
                state.tail.truncate(left - sinks - packed)
        if self.due is not None:
            due = self.windows.leaving(keys.tail.tokens)
            self.due = min(self.due, due) if due else None

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every buffer `[B, ...]` by `change(buffer)`: beams, batch selection, moves between devices."""
        for state in self.sides.values():
            state.apply(change)
