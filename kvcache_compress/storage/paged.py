"""Storage of many requests: packed tokens in pages of a shared pool, dense tokens in slots.

Token i after the sinks lies in slot `i % capacity` of the circular tail, and once packed in page `i // page` of its
block table. Codecs have their statistics before the first page, and these never change.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from kvcache_compress.codecs.base import Codec, Side
from kvcache_compress.codecs.device import on_device
from kvcache_compress.codecs.mask import AttentionCall

from .adaptive.eras import Era
from .backend import ENCODE_CHUNK_TOKENS, Backend
from .checks import LONGEST
from .packed_store import PackedStore
from .shared.rope_track import RopeTrack
from .side import Windows
from .view import View


@dataclass
class Request:
    """Tokens of a request, the same in all layers: its slot, its block table, and how many it has."""

    slot: int
    blocks: list[int]
    tokens: int = 0
    packed: int = 0


class Part:
    """A request's tokens in a step, before and after it.

    One token is a decode step: it packs earlier tokens that have left the recent window. More are a prompt or a chunk
    of one, whose own tokens are packed too.

    Attributes:
        first, count: index of its first new token in the step, and their number.
        sinks, packed, tail: tokens of each segment before the step.
        new_sinks: new tokens that are sinks; leaving: tokens that are packed in the step.
    """

    def __init__(self, request: Request, first: int, count: int, windows: Windows) -> None:
        self.request, self.first, self.count = request, first, count
        self.sinks = min(request.tokens, windows.sinks)
        self.packed = request.packed
        self.tail = request.tokens - self.sinks - self.packed
        self.new_sinks = min(windows.sinks - self.sinks, count)
        self.leaving = windows.leaving(self.tail + (0 if self.decodes else count - self.new_sinks))
        request.tokens += count
        request.packed += self.leaving

    @property
    def decodes(self) -> bool:
        return self.count == 1


class Step:
    """A batch of parts, and the indices that all layers share.

    Attributes:
        bad: True for tokens that cannot be packed, bool `[n]`; layers add what they find.
    """

    def __init__(self, parts: Iterable[tuple[Request, int]], windows: Windows, page: int, device: torch.device) -> None:
        self.windows, self.page, self.device = windows, page, device
        self.parts: list[Part] = []
        for request, count in parts:
            self.parts.append(Part(request, self.tokens, count, windows))
        self.decodes = [part for part in self.parts if part.decodes]
        self.flushing = [part for part in self.decodes if part.leaving]
        self.bad = torch.zeros(self.tokens, dtype=torch.bool, device=device)
        self._faults: dict[int, torch.Tensor] = {}
        self._masks: dict[int, torch.Tensor] = {}
        self._places: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @property
    def tokens(self) -> int:
        return self.parts[-1].first + self.parts[-1].count if self.parts else 0

    def _tensor(self, numbers: Sequence[object]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    @cached_property
    def appended(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where decode steps' new tokens go, sinks, then others: index in the step, slot, place in it, `[3, n]`."""
        sinks = [(part.first, part.request.slot, part.sinks) for part in self.decodes if part.new_sinks]
        tails = [(part.first, part.request.slot, *self.ring(part, -1)) for part in self.decodes if not part.new_sinks]
        return self._tensor(sinks).view(-1, 3).T, self._tensor(tails).view(-1, 3).T

    def of_decodes(self, x: torch.Tensor) -> torch.Tensor:
        """Select the decode steps' tokens from `[H, n, D]`: `[decode steps, H, 1, D]`."""
        own = x if len(self.decodes) == self.tokens else x[:, self.queries]
        return own.transpose(0, 1)[:, :, None]

    @cached_property
    def queries(self) -> torch.Tensor:
        """Indices of the decode tokens in the step."""
        return self._tensor([part.first for part in self.decodes])

    @cached_property
    def flushed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the decode steps that pack tokens, `[parts, 1]`, and where these are in the tails."""
        slots = self._tensor([[part.request.slot] for part in self.flushing])
        return slots, self._tensor([self.ring(part, 0, self.windows.flush) for part in self.flushing])

    def ring(self, part: Part, start: int | None, stop: int | None = None) -> list[int]:
        """Where the part's tail tokens `[start, stop)` are in the tail; the step's own come last."""
        tokens = range(part.packed, part.packed + part.tail + part.count - part.new_sinks)
        return [at % (self.windows.recent + self.windows.flush) for at in tokens[start:stop]]

    @cached_property
    def rows(self) -> torch.Tensor:
        """Of each decode step: slot, sinks, packed and tail tokens, and the blocks of its pages, padded with zeros."""
        return self._rows([
            (part.sinks + part.new_sinks, part.packed + part.leaving, part.tail - part.leaving + 1 - part.new_sinks)
            for part in self.decodes
        ])  # fmt: skip

    @cached_property
    def rows_before(self) -> torch.Tensor:
        """`rows` as they were before the step."""
        return self._rows([(part.sinks, part.packed, part.tail) for part in self.decodes])

    def _rows(self, counts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        tables = [part.request.blocks for part in self.decodes]
        width = max(map(len, tables))
        return self._tensor([
            [part.request.slot, *numbers, *blocks, *[0] * (width - len(blocks))]
            for part, numbers, blocks in zip(self.decodes, counts, tables, strict=True)
        ])  # fmt: skip

    @property
    def longest(self) -> int:
        """Most packed tokens of a decode step, at least a flush of them."""
        return max(self.windows.flush, *(part.packed + part.leaving for part in self.decodes))

    def faults(self, programs: int) -> torch.Tensor:
        """Flags that a kernel's programs raise for tokens that cannot be packed: int64 `[decode steps, programs]`."""
        if programs not in self._faults:
            self._faults[programs] = self.rows.new_zeros(len(self.decodes), programs)
        return self._faults[programs]

    def refused(self) -> list[bool]:
        """For each part, whether a token of it cannot be packed; waits for the device."""
        for faults in self._faults.values():
            self.bad[self.queries] |= (faults > 0).any(1)
        bad = self.bad.tolist()
        return [any(bad[part.first : part.first + part.count]) for part in self.parts]

    def causal_mask(self, index: int, tokens: int) -> torch.Tensor:
        """Mask of a part's queries, the last of `tokens` tokens, `[1, 1, n, tokens]`; the same for all layers."""
        if index not in self._masks:
            count = self.parts[index].count
            mask = torch.ones(count, tokens, dtype=torch.bool, device=self.device)
            self._masks[index] = mask.tril(tokens - count)[None, None]
        return self._masks[index]

    def places(
        self, parts: Sequence[Part], start: int, stop: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where groups of `size` tokens lie that hold the tokens `[start, stop)` which each part packs.

        Returns their numbers `[parts, groups]`, and for all parts together their blocks and rows `[parts * groups]`.
        """
        key = (parts[0].first, start, size)
        if key not in self._places:
            tokens = [[part.packed + at for at in range(start, stop, size)] for part in parts]
            blocks = [
                part.request.blocks[at // self.page] for part, row in zip(parts, tokens, strict=True) for at in row
            ]
            found = self._tensor(tokens)
            self._places[key] = found // size, self._tensor(blocks), found.flatten() % self.page // size
        return self._places[key]


@dataclass(eq=False)
class PagedStorage:
    """Keys and values of one layer.

    Args:
        codecs: a codec per side, with statistics.
        pools: fields per side, `[blocks, H, page / field.tokens, *field.shape]` with any strides.
        sinks, tails: dense tokens per side, `[slots, H, tokens, D]`.
        windows: numbers of tokens per segment.
        page: tokens per page, a multiple of `windows.group`.
        backend: the layer's back end.
        track: cos and sin of all packed groups that there can be, if a codec needs them.
        fused: whether decode steps attend to pages; else, as prompts, to decoded tokens.
    """

    codecs: Mapping[Side, Codec]
    pools: Mapping[Side, tuple[torch.Tensor, ...]]
    sinks: Mapping[Side, torch.Tensor]
    tails: Mapping[Side, torch.Tensor]
    windows: Windows
    page: int
    backend: Backend
    track: RopeTrack | None = None
    fused: bool = True
    views: dict[Side, View] = field(init=False)
    """Views of the pools: a row of their batch is a slot or a block."""

    def __post_init__(self) -> None:
        self.fused = self.fused and self.backend.attends_to_pages
        self.views = {side: self._pool(side) for side in self.codecs}

    @property
    def rope_rows(self) -> torch.Tensor | None:
        """cos and sin of each packed group's first token, `[·, groups, 2 * rotary]`, the same in every sequence."""
        track = self.views["keys"].track
        return None if track is None else track.buffer

    def _track(self, side: Side) -> RopeTrack | None:
        codec = self.codecs[side]
        return self.track if codec.rope_use(codec.options, side) == "factors" else None

    def _view(self, side: Side, sinks: torch.Tensor, fields: tuple[torch.Tensor, ...], packed: int, tail: torch.Tensor,
              track: RopeTrack | None) -> View:  # fmt: skip
        codec = self.codecs[side]
        store = PackedStore(codec.fields, 0, sinks.shape[1], sinks.device)
        store.buffers, store.tokens = fields, packed
        return View(sinks, store, packed, tail, tail.shape[2], (Era(0, codec),), track, backend=self.backend)

    def _pool(self, side: Side) -> View:
        track = copy.copy(self._track(side))
        if track is not None:
            track.buffer = track.buffer.expand(2, -1, -1)  # stride 0: the same rows in every sequence
        return self._view(side, self.sinks[side], self.pools[side], self.page, self.tails[side], track)

    def append(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> dict[int, tuple[View, View]]:
        """Store a step's tokens `[1, H, n, D]`; return, by part, the views of parts that do not attend to pages.

        Tokens that cannot be packed are marked in the step and stored as zeros.
        """
        fresh: dict[Side, torch.Tensor] = {"keys": keys[0], "values": values[0]}
        if len(step.decodes) < len(step.parts):
            fresh = self._packable(step, fresh)
        found = {}
        for index, part in enumerate(step.parts):
            if not part.decodes:
                keys_view, values_view = (self._add_prompt(step, part, side, x) for side, x in fresh.items())
                found[index] = keys_view, values_view
        if step.decodes:
            self.backend.step_pages(self, step, fresh)
        if not self.fused:
            for index, part in enumerate(step.parts):
                if part.decodes:
                    found[index] = self._decode_view(step, part, "keys"), self._decode_view(step, part, "values")
        return found

    def _packable(self, step: Step, fresh: Mapping[Side, torch.Tensor]) -> dict[Side, torch.Tensor]:
        """Mark tokens of `[H, n, D]` that cannot be packed, and set them to zero."""
        found = {}
        for side, x in fresh.items():
            bad = ~(torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) <= LONGEST).all(0)
            step.bad |= bad
            found[side] = x.masked_fill(bad[:, None], 0)
        return found

    def _add_prompt(self, step: Step, part: Part, side: Side, x: torch.Tensor) -> View:
        """Store a part's tokens, of the step's `[H, n, D]`; return the view that these attend to."""
        slot, sinks, tails = part.request.slot, self.sinks[side], self.tails[side]
        new = x[:, part.first : part.first + part.count].to(tails.dtype)
        sinks[slot, :, part.sinks : part.sinks + part.new_sinks] = new[:, : part.new_sinks]
        tail = torch.cat([tails[slot][:, step.ring(part, 0, part.tail)], new[:, part.new_sinks :]], 1)[None]
        before = self._request_view(side, part.request, part.sinks + part.new_sinks, part.packed, tail)
        for start in range(0, part.leaving, ENCODE_CHUNK_TOKENS):
            stop = min(start + ENCODE_CHUNK_TOKENS, part.leaving)
            self._write(step, side, [part], start, stop, tail[:, :, start:stop])
        tails[slot, :, step.ring(part, part.leaving)] = tail[0, :, part.leaving :]
        return before

    def step(self, step: Step, fresh: Mapping[Side, torch.Tensor]) -> None:
        """Store the tokens of the decode steps, of a step's `[H, n, D]`."""
        if len(step.decodes) == len(step.parts):  # else checked with the prompts
            fresh = self._packable(step, fresh)
        for side, x in fresh.items():
            self.pack(step, side)
            x = x.transpose(0, 1).to(self.tails[side].dtype)
            for buffer, (at, slot, place) in zip((self.sinks[side], self.tails[side]), step.appended, strict=True):
                buffer[slot, :, place] = x[at]

    def pack(self, step: Step, side: Side) -> None:
        """Pack the oldest tail tokens of the decode steps that have enough."""
        if step.flushing:
            slots, places = step.flushed
            leaving = self.tails[side][slots, :, places].transpose(1, 2)
            self._write(step, side, step.flushing, 0, self.windows.flush, leaving)

    def _write(self, step: Step, side: Side, parts: Sequence[Part], start: int, stop: int, x: torch.Tensor) -> None:
        """Encode the tokens `[start, stop)` that the parts pack, `[parts, H, stop - start, D]`, into their pages."""
        codec, track, rope = self.codecs[side], self._track(side), None
        if track is not None:
            cos, sin = track.buffer[0, step.places(parts, start, stop, track.stride)[0]].chunk(2, -1)
            rope = cos, sin
        with on_device(x):
            encoded = self.backend.encoded(codec, x, rope)
        for buffer, stored, new in zip(self.pools[side], codec.fields, encoded, strict=True):
            _, blocks, rows = step.places(parts, start, stop, stored.tokens)
            buffer[blocks, :, rows] = new.transpose(1, 2).flatten(0, 1)

    def _decode_view(self, step: Step, part: Part, side: Side) -> View:
        request, sinks = part.request, part.sinks + part.new_sinks
        tail = self.tails[side][request.slot][None, :, step.ring(part, part.leaving)]
        return self._request_view(side, request, sinks, request.packed, tail)

    def _request_view(self, side: Side, request: Request, sinks: int, packed: int, tail: torch.Tensor) -> View:
        """View of a request's tokens, with a copy of its pages."""
        blocks = torch.tensor(request.blocks[: -(-packed // self.page)], dtype=torch.int64, device=tail.device)
        fields = tuple(
            pool.index_select(0, blocks).transpose(0, 1).flatten(1, 2)[None, :, : packed // stored.tokens]
            for pool, stored in zip(self.pools[side], self.codecs[side].fields, strict=True)
        )
        dense = self.sinks[side][request.slot, :, :sinks][None]
        return self._view(side, dense, fields, packed, tail, self._track(side))

    def attend(self, step: Step, call: AttentionCall) -> torch.Tensor:
        """Attend to pages with the queries of the decode steps, of `call.query` `[1, Hq, n, D]`: `[steps, Hq, Dv]`."""
        query = call.query[0, :, step.queries].transpose(0, 1)[:, :, None]
        for view in self.views.values():
            view.packed = step.longest
        with on_device(query):
            call = AttentionCall(query, call.mask, call.scaling, call.softcap, call.s_aux)
            found = self.backend.attend_to_pages(call, self.views["keys"], self.views["values"], step.rows, self.page)
        return found[:, 0]

    def copy_dense(self, source: int, target: int, tails: bool = True) -> None:
        """Copy the sinks of a row, and the tails of a slot."""
        for buffers in (self.sinks, self.tails) if tails else (self.sinks,):
            for buffer in buffers.values():
                buffer[target] = buffer[source]


@dataclass(frozen=True)
class PagedStep:
    """What a layer's attention gets instead of keys and values: a step's tokens are stored, and it can attend.

    views: keys and values of the parts that do not attend to pages, by the part's index.
    """

    storage: PagedStorage
    step: Step
    views: Mapping[int, tuple[View, View]]

    def attend(self, call: AttentionCall, attend_to_views: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Attend with the queries `[1, Hq, n, D]` of all parts: `[1, n, Hq, Dv]`.

        `attend_to_views` takes a part's queries, its views and a mask that is boolean `[1, 1, n, T]` or None.
        """
        query, step = call.query, self.step
        out = query.new_empty(1, query.shape[2], query.shape[1], self.storage.sinks["values"].shape[3])
        if step.decodes and self.storage.fused:
            out[0, step.queries] = self.storage.attend(step, call)
        for index, (keys, values) in self.views.items():
            part, mask = step.parts[index], None
            if 1 < part.count < keys.tokens:
                mask = step.causal_mask(index, keys.tokens)
            rows = slice(part.first, part.first + part.count)
            out[:, rows] = attend_to_views(query[:, :, rows], keys, values, mask)
        return out
