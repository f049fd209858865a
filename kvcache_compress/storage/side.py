"""One side of a layer: its codec and its three segments `sinks | packed | tail`."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from kvcache_compress.codecs.base import Codec, Prompt, Statistics
from kvcache_compress.codecs.device import on_device
from kvcache_compress.codecs.mask import AttentionCall, Mask
from kvcache_compress.modeling.rope import Rope

from .adaptive.eras import Era, renewed, runs
from .checks import same_prompt
from .packed_store import PackedStore, TailBuffer
from .shared.padding import PaddingRecord
from .shared.rope_track import RopeTrack
from .view import AttentionPath, View

MAX_DECODE_TOKENS = 16
"""Most queries of a decode kernel, and most tokens of a step with static shapes."""
MAX_DRAFT_TOKENS = 129
"""Most tokens of a step or draft: 128 candidates and the token before them.

They stay dense until the next tokens arrive, because a draft may be cropped.
"""


FLUSH_TOKENS = 32
"""Tokens that leave the recent window together, which spreads the cost of encoding over as many steps."""
PACKED = 2
"""Column of a sequence's packed tokens in the rows of `Backend.attend_to_pages`."""


@dataclass(frozen=True)
class Windows:
    """Numbers of tokens per sequence.

    Args:
        sinks: first tokens, kept dense.
        recent: newest tokens, kept dense.
        flush: tokens packed together, a multiple of `group`.
        group: tokens encoded together.
        capacity: most tokens in all; None for a storage that grows without limit.
    """

    sinks: int
    recent: int
    flush: int
    group: int
    capacity: int | None = None

    def leaving(self, tail: int) -> int:
        """Return how many of the `tail` tokens in a tail are due to be packed."""
        return max(0, tail - self.recent) // self.flush * self.flush

    @property
    def packed_capacity(self) -> int:
        """Most packed tokens of a storage with a `capacity`, rounded up to whole groups."""
        assert self.capacity is not None
        return -(-max(0, self.capacity - self.sinks) // self.group) * self.group

    @property
    def tail_capacity(self) -> int:
        """Slots of a static layer's tail."""
        return self.recent + self.flush + MAX_DECODE_TOKENS


class SideState:
    """Codecs and `sinks | packed | tail` of one side."""

    def __init__(
        self,
        codec: Codec,
        like: torch.Tensor,
        windows: Windows,
        backend: AttentionPath,
        track: RopeTrack | None,
        padding: PaddingRecord,
    ) -> None:
        self.eras: tuple[Era, ...] = (Era(0, codec),)
        """Statistics of the packed tokens, oldest first; a new era makes a new tuple."""
        self.backend, self.capacity = backend, windows.capacity
        needs_rope = codec.rope_use(codec.options, codec.context.side) == "factors"
        self.track, self.padding = track if needs_rope else None, padding
        self.sinks = like.new_empty(*like.shape[:2], 0, like.shape[3])
        self.store = PackedStore(codec.fields, like.shape[0], like.shape[1], like.device)
        self.tail = TailBuffer(like, windows.recent + windows.flush)
        self.prepared = False

    @property
    def codec(self) -> Codec:
        """Codec of the newest era, which encodes."""
        return self.eras[-1].codec

    def prepare(self, x: torch.Tensor, first: int) -> bool:
        """Take the codec's statistics from stored tokens `x` `[B, H, T, D]`, unless it has them; padding is left out.

        `first` is the index of the first token of `x`. Returns False if the codec needs queries as well.
        """
        if not self.prepared:
            with on_device(x):
                if padding := self.padding.rows:
                    x = padding.without(x, self.codec.context.sink_tokens, first)
                self.prepared = self.codec.prepare(x, may_wait=True)
        return self.prepared

    def observe(self, call: AttentionCall | None, recent: int, at: torch.Tensor | None = None) -> None:
        """Take the codec's statistics from the tail and from queries; begin a new era if it has statistics already.

        A new era begins only if it pays. The queries belong to the last tokens or to the tokens `at`, int64 `[n]`. Rows
        that repeat one prompt, as for beams, count once.
        """
        prompt = self.prompt(call, recent, at)
        with on_device(prompt.keys), torch.no_grad():
            if not self.prepared:
                self.codec.observe(prompt)
            elif prompt.queries is None:
                return
            elif (codec := renewed(self.codec, prompt)) is not None:
                packed = self.store.tokens
                self.codec.__dict__.pop("kernel_encoder", None)  # it encodes no more
                self.eras = (*(era for era in self.eras if era.start < packed), Era(packed, codec))
        self.prepared = True

    def recode(self, codec: Codec) -> None:
        """Use another codec, while nothing is packed."""
        self.eras = (Era(0, codec),)
        self.store = PackedStore(codec.fields, len(self.sinks), self.sinks.shape[1], self.sinks.device)

    def prompt(self, call: AttentionCall | None, recent: int, at: torch.Tensor | None = None) -> Prompt:
        """The tail as a prompt whose queries belong to its last tokens or to the tokens `at`."""
        x, packed = self.tail.view(), self.store.tokens
        padding = None if packed else self.padding.rows
        if call is not None and (packed or at is not None):
            real = None if padding is None else padding.real(self.sinks.shape[2] + x.shape[2]).to(x.device)
            call = replace(call, mask=Mask(real))
        rows = 1 if same_prompt(x) else len(x)
        whole = -(-x.shape[2] // self.codec.group) * self.codec.group
        offsets = None if self.track is None else self.track.first_positions(self.codec.group, x.device)
        with on_device(x), torch.no_grad():
            rope = self.rope(packed, packed + whole)
            if rows < len(x):
                x, rope = x[:rows], None if rope is None else (rope[0][:rows], rope[1][:rows])
                call = None if call is None else call.first_rows(rows)
            at = None if at is None else at - packed
            return Prompt(self.sinks[:rows], x, recent, rope, offsets, call, padding, at)

    def rope(self, start: int, stop: int) -> Rope | None:
        return None if self.track is None else self.track.read(start, stop)

    def decode(self, start: int, stop: int) -> torch.Tensor:
        """Decode packed tokens `[start, stop)`, whole groups of one era, to float32 `[B, H, stop - start, D]`."""
        [(codec, _, _)] = runs(self.eras, start, stop)
        device = self.codec.context.device
        fields = tuple(field.to(device) for field in self.store.read(start, stop))
        with on_device(fields[0]):
            return codec.decode(fields, self.rope(start, stop))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return tokens (without spare capacity) and statistics under their names in saved files."""
        fields = zip(self.store.fields, self.store.read(0, self.store.tokens), strict=True)
        held = {"sinks": self.sinks, "tail": self.tail.view()}
        held |= {f"packed.{field.name}": stored for field, stored in fields}
        return held | {
            f"statistics.{era.start}.{name}": x for era in self.eras for name, x in era.codec.statistics.items()
        }

    def restore(self, tensors: Mapping[str, torch.Tensor], packed: int, prepared: bool) -> None:
        """Fill a new side with copies of another side's `tensors()`."""
        device = self.sinks.device
        self.sinks = tensors["sinks"].to(device, copy=True)
        self.store.append(tuple(tensors[f"packed.{field.name}"] for field in self.store.fields), packed, growing=False)
        self.tail.replace(tensors["tail"])
        self.prepared = prepared
        by_start: dict[int, Statistics] = {0: {}}
        for name, x in tensors.items():
            if name.startswith("statistics."):
                _, first, part = name.split(".")
                by_start.setdefault(int(first), {})[part] = x.to(device, copy=True)
        if not all(start < max(1, packed) and start % self.codec.group == 0 for start in by_start):
            raise ValueError(f"damaged: its eras begin at tokens {sorted(by_start)} of {packed}")
        if prepared:
            self.eras = tuple(Era(start, copy.copy(self.codec)) for start in sorted(by_start))
            for start, codec in self.eras:
                codec.set_statistics(by_start[start])

    def widen(self, dtype: torch.dtype) -> None:
        self.sinks = self.sinks.to(dtype)
        self.tail.apply(lambda x: x.to(dtype))

    def view(self, packed: int | None = None, tail: torch.Tensor | None = None) -> View:
        """View of the sinks, the first `packed` packed tokens and `tail`; by default of all tokens."""
        packed = self.store.tokens if packed is None else packed
        tail, tokens = (self.tail.buffer, self.tail.tokens) if tail is None else (tail, tail.shape[2])
        return View(
            self.sinks, self.store, packed, tail, tokens, self.eras, self.track, padding=self.padding.rows,
            backend=self.backend, capacity=self.capacity,
        )  # fmt: skip

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.sinks = change(self.sinks)
        self.store = copy.copy(self.store)  # views still in use keep the old one
        self.store.apply(change)
        self.tail.apply(change)

    def crop(self, sinks: int, packed: int, group: int) -> None:
        """Keep the first `sinks` sinks and `packed` packed tokens; a group that is cut moves to the tail, decoded."""
        whole = packed // group * group
        cut = self.tail.buffer
        if packed > whole:
            cut = self.decode(whole, whole + group)
        self.tail.replace(cut[:, :, : packed - whole].to(self.tail.buffer.dtype))
        self.store = copy.copy(self.store)  # views still in use keep the old one
        self.store.truncate(whole)
        self.eras = tuple(era for era in self.eras if era.start < max(1, whole))
        self.sinks = self.sinks[:, :, :sinks]
