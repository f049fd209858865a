"""Growing storage of a layer whose token counts the host knows: `sinks | packed | tail` per side."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from kvcache_compress.codecs import base
from kvcache_compress.codecs.base import Codec, Side
from kvcache_compress.codecs.device import on_device
from kvcache_compress.codecs.mask import AttentionCall

from .adaptive.bit_budget import BitBudget, output_losses
from .adaptive.eras import MOST_ERAS, Watch
from .backend import Backend
from .checks import PackableChecks
from .shared.rope_track import RopeTrack
from .side import MAX_DECODE_TOKENS, MAX_DRAFT_TOKENS, SideState, Windows
from .view import View


@dataclass(eq=False)
class DynamicStorage:
    """`sinks | packed | tail` of keys and values, in buffers that grow.

    With `windows.capacity`, packed stores are allocated in full, the layer checks tokens when they arrive, and codecs
    take their statistics from the first tokens. A `StaticStorage` can then take over at any time.

    Args:
        sides: the two empty sides.
        windows: numbers of tokens per segment.
        checks: checks of the vectors about to be packed.
        backend: the layer's back end.
        flushes_steps: True if steps and drafts pack earlier tokens, False if only prompts and their chunks do.
        track: cos and sin of the packed groups, if a codec needs them.
        leads_track: True for the layer that writes `track`.
        budget: chooses the codecs' bits when the first tokens are packed; None to keep those that they have.
    """

    sides: dict[Side, SideState]
    windows: Windows
    checks: PackableChecks
    backend: Backend
    flushes_steps: bool = True
    track: RopeTrack | None = None
    leads_track: bool = True
    budget: BitBudget | None = None
    due: int | None = field(default=None, init=False)
    """Tokens that `close` packs after attention, because a codec needs the step's queries; None if there are none."""
    waiting: int = field(default=0, init=False)
    """Tokens that would have left the window when last too few were there to measure."""
    samples: bool = field(default=False, init=False)
    """True if `close` keeps the step's queries for a later measurement."""

    def __post_init__(self) -> None:
        self.watch = Watch()
        """Also keeps queries for the choice of bits."""
        if self.windows.capacity is not None:
            for state in self.sides.values():
                state.store.make_static(self.windows.packed_capacity)
            if self.track is not None:
                self.track.make_static(self.windows.packed_capacity, self.sides["keys"].sinks)

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
    def awaits_queries(self) -> bool:
        """True if `close` must bring the step's queries."""
        return self.due is not None or self.samples

    @property
    def dense_buffers(self) -> tuple[torch.Tensor, ...]:
        """Dense buffers of both sides with their spare capacity, and kept queries, in the model's dtype."""
        held = (x for state in self.sides.values() for x in (state.sinks, state.tail.buffer))
        return *held, *(query for _, query in self.watch.kept)

    def _least_tokens(self, in_step: bool = False) -> int:
        """Fewest tokens to measure, sinks left out, in a prompt or `in_step`; 0 if nothing is measured again."""
        keys = self.sides["keys"]
        if self.windows.capacity is not None or len(keys.eras) == MOST_ERAS:
            return 0
        least = keys.codec.least_tokens(in_step)
        if self._awaits_bits:
            least = max(least, base.LEAST_IN_STEPS if in_step else base.LEAST_TOKENS)
        return least

    @property
    def _awaits_bits(self) -> bool:
        """True if the budget has yet to choose the codecs' bits."""
        return self.budget is not None and self.checks.layer not in self.budget.spent

    def views(self) -> tuple[View, View]:
        k_side, v_side = self.sides.values()
        return k_side.view(), v_side.view()

    def as_dynamic(self) -> "DynamicStorage":
        """Return the storage itself; `StaticStorage` has the same method."""
        return self

    @property
    def dense_like(self) -> dict[Side, torch.Tensor]:
        """One dense tensor per side, for its shape, dtype and device."""
        return {side: state.sinks for side, state in self.sides.items()}

    def widen(self, keys: torch.dtype, values: torch.dtype) -> None:
        for state, dtype in zip(self.sides.values(), (keys, values), strict=True):
            state.widen(dtype)

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, counter: torch.Tensor | None = None, held: int = 0
    ) -> tuple[View, View]:
        """Append new tokens `[B, H, n, D]`, in the dtypes that the storage holds.

        The first tokens are a prompt, and so is any later chunk of more than `MAX_DRAFT_TOKENS`. A prompt is packed at
        once, except its recent window. A shorter chunk is a step or a draft; it packs only earlier tokens that have
        left the recent window.

        Args:
            keys: new keys.
            values: new values.
            counter: int64 `[]`, receives the number of tokens.
            held: number of last prompt tokens that may be a draft; they and the window before them stay dense.

        Returns:
            Views of what the new tokens attend to: themselves and all tokens that were dense before, in full precision
                even if this call has packed them.

        Raises:
            ValueError: a vector to be encoded holds NaN or infinity, or its norm is above 65504.
        """
        length = self.tokens
        self.checks.raise_for_known()
        sinks_before = [state.sinks for state in self.sides.values()]
        try:
            keys, values = self._exchanged(keys, values, length)
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
        if self.track is not None:
            self.track.extend(length, keys, already_written=not self.leads_track)
        prompt = count > (MAX_DRAFT_TOKENS if length else MAX_DECODE_TOKENS)
        if not prompt and (self.flushes_steps or (count > MAX_DECODE_TOKENS and not held)):
            self._flush()
        k_side, v_side = self.sides.values()
        sinks = min(self.windows.sinks - k_side.sinks.shape[2], count)
        packed = k_side.store.tokens
        if prompt:
            k_tail, v_tail = self._add_prompt(keys, values, sinks, held)
            self.samples = self.due is None and self._samples(packed, length, count)
            return k_side.view(packed, k_tail), v_side.view(packed, v_tail)
        self._add(keys, values, sinks)
        self.samples = self.flushes_steps and self._samples(packed, length, count)
        return self.views()

    def _samples(self, packed: int, start: int, count: int) -> bool:
        return self.watch.samples(packed, start, count) and self._least_tokens() > 0

    def _exchanged(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """In left-padded rows, exchange padding held as sinks with the new tokens that belong there."""
        record, sinks = self.sides["keys"].padding, self.windows.sinks
        if not length:
            record.begin(keys)
        rows = record.rows
        if rows is None or length >= rows.longest + sinks:
            return keys, values
        k_side, v_side = self.sides.values()
        k_side.sinks, keys = rows.exchange_new(k_side.sinks, keys, length, sinks)
        v_side.sinks, values = rows.exchange_new(v_side.sinks, values, length, sinks)
        return keys, values

    def close(self, call: AttentionCall | None) -> None:
        """End a step after its attention: keep its queries, or pack the due tokens with statistics from the queries."""
        watch, self.samples = self.watch, False
        in_step = call is None or call.query.shape[2] <= MAX_DRAFT_TOKENS
        if call is not None and in_step and (watch.kept or self.due is None):
            watch.keep(call, self.tokens)
        if self.due is None:
            return
        tails, due = self._tails(), self.due
        self._check_packable(tails, due)
        at = None
        if call is not None and in_step and watch.kept:
            call, at = watch.queries(call)
        first, awaits_bits = self.sides["keys"].sinks.shape[2], self._awaits_bits
        for side, state in self.sides.items():
            ready = awaits_bits and state.prepare(tails[side], first)
            if not ready and state.codec.least_tokens():
                state.observe(call, self.windows.recent, at)
        self.due = None
        if awaits_bits:
            self._choose_bits(call, at)
        self._flush_tails(tails, due, growing=self.flushes_steps)
        self.watch.measured(self.packed_tokens, in_step)

    def _choose_bits(self, call: AttentionCall | None, at: torch.Tensor | None) -> None:
        """Let the budget choose the bits of both sides by what they lose; without queries they keep theirs."""
        assert self.budget is not None
        k_side, v_side = self.sides.values()
        codecs = {side: state.codec for side, state in self.sides.items()}
        losses = None
        if call is not None:
            prompt = k_side.prompt(call, self.windows.recent, at)
            values = torch.cat([v_side.sinks, v_side.tail.view()], 2)[: len(prompt.keys)]
            with on_device(values), torch.no_grad():
                losses = output_losses(codecs, prompt, values)
        if losses is not None:
            codecs = self.budget.choose(self.checks.layer, codecs, losses, k_side.tail.tokens - self.windows.recent)
        self.use(codecs)
        self.budget.spend(self.checks.layer, codecs)

    def use(self, codecs: Mapping[Side, Codec]) -> None:
        """Use codecs with the bits that the budget has chosen, before anything is packed."""
        for side, codec in codecs.items():
            self.sides[side].recode(codec)

    def _tails(self) -> dict[Side, torch.Tensor]:
        return {side: state.tail.view() for side, state in self.sides.items()}

    def _must_wait(
        self, tails: Mapping[Side, torch.Tensor], first: int, leaving: int, renews: bool, in_step: bool = False
    ) -> bool:
        """True if `leaving` tokens cannot be packed yet: `close` packs them (`due`), or too few are there to measure.

        Tails start at token `first`. A side without statistics takes them from its tail, if it needs no queries.
        renews: True if statistics that the keys have already are measured again; ignored until bits are chosen.
        """
        watch = self.watch
        if self._awaits_bits:
            renews = True
        elif not (self._least_tokens() and self.sides["keys"].prepared):
            renews = not all(state.prepare(tails[side], first) for side, state in self.sides.items())
            if not renews:
                watch.measured(self.packed_tokens + leaving, in_step=False)
        enough = tails["keys"].shape[2] >= self._least_tokens(in_step)
        self.due = leaving if renews and enough else None
        self.waiting = leaving if renews and not enough else 0
        return renews

    def _check_packable(self, tails: Mapping[Side, torch.Tensor], leaving: int) -> None:
        """Check the vectors that are about to be encoded or that a codec takes statistics from."""
        if self.windows.capacity is not None:
            return  # static layers check tokens on arrival
        for side, x in tails.items():
            if not self.sides[side].prepared:
                self.checks.add(side, x)
            elif leaving:
                self.checks.add(side, x[:, :, :leaving])

    def _prepare(self) -> None:
        """Take statistics from the first tokens before any is packed; sinks count if there are few other tokens."""
        if self.due is not None or not self.tokens or all(state.prepared for state in self.sides.values()):
            return
        for state in self.sides.values():
            sinks, others = state.sinks, state.tail.view()
            few = others.shape[2] < max(1, self.windows.recent)
            if not (state.prepare(torch.cat([sinks, others], 2), 0) if few else state.prepare(others, sinks.shape[2])):
                return

    def _add_prompt(
        self, keys: torch.Tensor, values: torch.Tensor, sinks: int, held: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a chunk of a prompt, pack all but the recent window, and return both tails from before packing.

        The window ends `held` tokens earlier, but statistics that need queries ignore `held`. The first chunk's tails
        are views of it, which saves a copy of the prompt; no later step attends to them.
        """
        tails: dict[Side, torch.Tensor] = {"keys": keys[:, :, sinks:], "values": values[:, :, sinks:]}
        if self.tokens:
            tails = {side: torch.cat([self.sides[side].tail.view(), x], 2) for side, x in tails.items()}
        tail = tails["keys"].shape[2]
        leaving, first = self.windows.leaving(tail - held), self.sides["keys"].sinks.shape[2] + sinks
        must_wait = False
        if self.windows.leaving(tail):
            self._check_packable(tails, leaving)
            must_wait = self._must_wait(tails, first, leaving, renews=leaving >= self._least_tokens())
        if leaving and not must_wait:
            self._add(keys[:, :, :sinks], values[:, :, :sinks], sinks)
            self._flush_tails(tails, leaving, growing=self.flushes_steps)
        else:
            self._add(keys, values, sinks)
        return tails["keys"], tails["values"]

    def _add(self, keys: torch.Tensor, values: torch.Tensor, sinks: int) -> None:
        """Add new tokens `[B, H, n, D]`: the first `sinks` of them to the sinks, the rest to the tails."""
        k_side, v_side = self.sides["keys"], self.sides["values"]
        k_tail, v_tail = k_side.tail, v_side.tail
        count = keys.shape[2] - sinks
        # Allocate both before changing either, because an allocation may fail.
        k_tail.ensure_capacity(count)
        v_tail.ensure_capacity(count)
        if sinks:
            k_side.sinks, v_side.sinks = (
                torch.cat([side.sinks, x[:, :, :sinks]], 2) for side, x in ((k_side, keys), (v_side, values))
            )
            keys, values = keys[:, :, sinks:], values[:, :, sinks:]
        k_tail.append(keys)
        v_tail.append(values)

    def _flush(self) -> None:
        """Pack the oldest tokens of the tails, if enough have left the recent window."""
        tail, packed = self.sides["keys"].tail.tokens, self.packed_tokens
        leaving = self.windows.leaving(tail)
        if not leaving or leaving == self.waiting:
            return
        tails = self._tails()
        if not all(state.prepared for state in self.sides.values()):
            self._check_packable(tails, leaving)
        first, renews = self.sides["keys"].sinks.shape[2], self.watch.is_due(packed)
        if self._must_wait(tails, first, leaving, renews, in_step=True):
            return
        self._check_packable(tails, leaving)
        self._flush_tails(tails, leaving, growing=True)

    def _flush_tails(self, tails: Mapping[Side, torch.Tensor], leaving: int, growing: bool) -> None:
        """Pack the first `leaving` tokens of `tails` `[B, H, T, D]` and keep the rest as the new tails."""
        for side, tail in tails.items():
            self.backend.pack(self.sides[side], tail, leaving, growing)
            self.sides[side].tail.replace(tail[:, :, leaving:])

    def crop(self, left: int) -> None:
        """Keep the first `left` tokens; a packed group that the crop cuts is decoded into the tail."""
        keys = self.sides["keys"]
        rows = keys.padding.rows
        if rows is not None and left < rows.longest + self.windows.sinks:
            for state in self.sides.values():  # padding returns to the positions of removed sinks
                tokens = state.view().stored()[:, :, :left]
                rows.exchange_(tokens.mT, self.windows.sinks)
                state.sinks = tokens[:, :, : self.windows.sinks].contiguous()
        sinks = min(left, keys.sinks.shape[2])
        packed = min(left - sinks, keys.store.tokens)
        for state in self.sides.values():
            if packed < state.store.tokens or sinks < state.sinks.shape[2]:
                state.crop(sinks, packed, self.windows.group)
            else:
                state.tail.tokens = left - sinks - packed
        self.watch.crop(left)
        if self.due is not None:
            due = self.windows.leaving(keys.tail.tokens)
            self.due = min(self.due, due) if due else None

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every buffer `[B, ...]` by `change(buffer)`: beams, batch selection, moves between devices."""
        for state in self.sides.values():
            state.apply(change)
        self.watch.apply(change)
