"""Eras: runs of packed tokens coded with the same statistics, and when a new one begins."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from kvcache_compress.codecs.base import Codec, Prompt
from kvcache_compress.codecs.mask import AttentionCall, Mask
from kvcache_compress.modeling.rope import Rope

FIRST_WAIT, LONGEST_WAIT = 256, 2048
"""Packed tokens after which a step measures statistics again; each wait is twice as long as the one before."""
SAMPLED_STEPS = 2
"""One of this many steps keeps its queries while statistics are due."""
KEPT_QUERIES = 160
"""Most positions whose queries are used."""
MOST_ERAS = 8
"""Most eras of a layer."""
WORTH = 0.95
"""Largest share of the current era's loss with which a new one begins."""
TESTED_GROUPS, TESTED_QUERIES, TESTED_NUMBERS = 8, 32, 1 << 24
"""Groups and queries on which statistics are compared, and the most scores."""


class Era(NamedTuple):
    """A run of packed tokens coded with the same statistics.

    Attributes:
        start: its first packed token; it ends where the next era starts.
        codec: the codec with these statistics.
    """

    start: int
    codec: Codec


def runs(eras: Sequence[Era], start: int, stop: int) -> list[tuple[Codec, int, int]]:
    """Codecs of packed tokens `[start, stop)`, each with its first token and its last token + 1."""
    ends = [era.start for era in eras[1:]] + [stop]
    found = [(era.codec, max(start, era.start), min(stop, end)) for era, end in zip(eras, ends, strict=True)]
    return [run for run in found if run[1] < run[2]]


@dataclass(eq=False)
class Watch:
    """Says when a growing layer measures the statistics of its keys, and keeps queries until then.

    While statistics are due, tokens stay dense until there are enough to measure.

    Attributes:
        due: number of packed tokens from which statistics are due.
        wait: packed tokens until they are due again, after a measurement in a step.
        kept: positions `[n]` and queries `[B, Hq, n, D]`.
    """

    due: int = 0
    wait: int = FIRST_WAIT
    kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def samples(self, packed: int, start: int, count: int) -> bool:
        """True if the queries of a step of `count` tokens from token `start` on are needed."""
        return packed >= self.due and (start + count) // SAMPLED_STEPS > start // SAMPLED_STEPS

    def is_due(self, packed: int) -> bool:
        """True if statistics are due again and queries are at hand."""
        return packed >= self.due and bool(self.kept)

    def keep(self, call: AttentionCall, tokens: int) -> None:
        """Keep queries of a call whose last query belongs to the last of `tokens` tokens."""
        count = call.query.shape[2]
        which = torch.arange(count - 1, -1, -SAMPLED_STEPS, device=call.query.device)[:KEPT_QUERIES].flip(0)
        self.kept = [*self.kept[1 - KEPT_QUERIES :], (tokens - count + which, call.query[:, :, which].detach())]

    def queries(self, call: AttentionCall) -> tuple[AttentionCall, torch.Tensor]:
        """The kept queries as a call like `call`, and their positions."""
        positions, queries = zip(*self.kept, strict=True)
        query = torch.cat([x.to(call.query.device) for x in queries], 2)[:, :, -KEPT_QUERIES:]
        return replace(call, query=query), torch.cat([x.to(query.device) for x in positions])[-KEPT_QUERIES:]

    def tensors(self) -> dict[str, torch.Tensor]:
        """State under its names in saved files."""
        state = {"watch": torch.tensor([self.due, self.wait])}
        if self.kept:
            at, queries = zip(*self.kept, strict=True)
            state |= {"watch.at": torch.cat(at), "watch.queries": torch.cat(queries, 2)}
        return state

    def restore(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Take the state from `tensors()`."""
        self.due, self.wait = tensors["watch"].tolist()
        if "watch.at" in tensors:
            self.kept = [(tensors["watch.at"].to(device), tensors["watch.queries"].to(device, copy=True))]

    def measured(self, packed: int, in_step: bool) -> None:
        """Statistics were measured, and `packed` tokens are packed now."""
        self.wait = min(2 * self.wait, LONGEST_WAIT) if in_step else FIRST_WAIT
        self.due = packed + self.wait
        self.kept.clear()

    def crop(self, tokens: int) -> None:
        """Forget the queries of all but the first `tokens` tokens."""
        self.kept = [(at[at < tokens], query[:, :, at < tokens]) for at, query in self.kept]

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.kept = [(at, change(query)) for at, query in self.kept]


def renewed(codec: Codec, prompt: Prompt) -> Codec | None:
    """The codec with statistics of these tokens; None unless those of the first half code the second half better.

    Judged on the tokens that they were measured on, statistics of few tokens look several times better than they are.
    """
    count, group = prompt.keys.shape[2], codec.group
    half = count // (2 * group) * group
    trial = copy.copy(codec)
    trial.observe(_first(prompt, half, group))
    old, new = _losses([codec, trial], prompt, half)
    if not new <= WORTH * old:
        return None
    fresh = copy.copy(codec)
    fresh.observe(prompt)
    return fresh


def _first(prompt: Prompt, tokens: int, group: int) -> Prompt:
    """The first `tokens` keys of a prompt, and all its queries after them or among them."""
    rope = None if prompt.rope is None else (prompt.rope[0][:, : tokens // group], prompt.rope[1][:, : tokens // group])
    at, call = prompt.at, prompt.queries
    assert call is not None
    if at is None:
        count = prompt.sinks.shape[2] + prompt.keys.shape[2]
        at = torch.arange(count - call.query.shape[2], count, device=prompt.keys.device)
        chosen = torch.linspace(0, len(at) - 1, min(len(at), KEPT_QUERIES), device=at.device).round().long()
        at, call = at[chosen], replace(call, query=call.query[:, :, chosen])
    return replace(prompt, keys=prompt.keys[:, :, :tokens], rope=rope, at=at, queries=replace(call, mask=Mask()))


def _losses(codecs: Sequence[Codec], prompt: Prompt, start: int) -> list[float]:
    """Squared score errors, times p (1 - p), of a sample of groups from token `start` on under each codec."""
    group, sinks = codecs[0].group, prompt.sinks.shape[2]
    tokens, rope = sampled_groups(prompt, group, start // group, TESTED_GROUPS)
    x = prompt.keys[:, :, tokens]
    errors = [codec.decode(codec.encode(x, rope), rope) - x.float() for codec in codecs]
    query, p, packed = attention(prompt)
    p = torch.where(packed, p, 0.0)[..., sinks + tokens]
    cost = p * (1 - p)
    return [float((cost * (query @ error.mT).square()).sum()) for error in errors]


def sampled_groups(prompt: Prompt, group: int, first: int, most: int) -> tuple[torch.Tensor, Rope | None]:
    """Keys of up to `most` whole groups, evenly spaced from group `first` on: int64 `[n]`, and the groups' RoPE."""
    keys = prompt.keys
    last = keys.shape[2] // group - 1
    chosen = torch.linspace(first, last, min(last + 1 - first, most), device=keys.device).round().long()
    tokens = (chosen[:, None] * group + torch.arange(group, device=keys.device)).flatten()
    return tokens, None if prompt.rope is None else (prompt.rope[0][:, chosen], prompt.rope[1][:, chosen])


def real_tokens(prompt: Prompt) -> torch.Tensor:
    """True for tokens of `sinks | keys` that are not padding: bool `[B or 1, T]`."""
    count, sinks = prompt.sinks.shape[2] + prompt.keys.shape[2], prompt.sinks.shape[2]
    if prompt.padding is None:
        return torch.ones(1, count, dtype=torch.bool, device=prompt.keys.device)
    return prompt.padding.exchange_(prompt.padding.real(count).to(prompt.keys.device), sinks)


def attention(prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some scaled queries `[B, H, R, D]`, their attention `[B, H, R, T]`, and which packed tokens they see.

    The last is bool, `[R, T]`. Queries are those to which all rows have packed tokens to show.
    """
    keys, call = torch.cat([prompt.sinks, prompt.keys], 2), prompt.queries
    assert call is not None
    batch, heads, count, _ = keys.shape
    query, first = call.query, prompt.sinks.shape[2] + prompt.recent
    if prompt.padding is not None:
        first += prompt.padding.longest
    at = prompt.at
    if at is None:
        at = torch.arange(count - query.shape[2], count, device=keys.device)
    known = (at >= first).nonzero()[:, 0]
    most = max(4, min(TESTED_QUERIES, TESTED_NUMBERS // (batch * query.shape[1] * count)))
    if len(known) > most:
        known = known[torch.linspace(0, len(known) - 1, most, device=keys.device).round().long()]
    at, query = at[known], query[:, :, known].float().unflatten(1, (heads, -1)).flatten(2, 3)
    query = call.scaling * query
    limit = at.repeat(query.shape[2] // max(1, len(at)))[:, None]
    place = torch.arange(count, device=keys.device)
    seen = real_tokens(prompt)[:, None, None] & (place <= limit)
    p = (query @ keys.float().mT).masked_fill_(~seen, -torch.inf).softmax(-1)
    return query, p, (place <= limit - prompt.recent) & (place >= prompt.sinks.shape[2])
