"""Moments of a layer's keys and queries, weighted by attention, from which the spectral transform follows.

A score error costs p (1 - p) in the softmax, where p is the attention that the query pays the key. So each key counts
with the sum of p (1 - p) over queries, and each query, seen from the anchor of the group that it attends to, with what
it pays there. Sinks and recent tokens are left out: they are not encoded. Plain averages would follow the many queries
that look at the sinks alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvcache_compress.modeling.calibration.observed_attention import attention_paid
from kvcache_compress.modeling.rope import Rope, RopeLayout

from .transform import Moments, mean_table

SAMPLED = 160
"""Query positions looked at per window."""
RUN_NUMBERS = 1 << 23
"""Most numbers of a temporary tensor, so that windows of any length can be measured."""


@dataclass(frozen=True)
class GroupRope:
    """RoPE of a window's groups.

    anchors: cos and sin of the groups' first tokens, `[1, n, rotary]`.
    places: cos and sin by which a group's tokens are turned further than its first, `[1, group, rotary]`.
    """

    layout: RopeLayout
    anchors: Rope
    places: Rope


def place_factors(rope: Rope) -> Rope:
    """Scale cos and sin of the first positions to rotations, which those of YaRN are not."""
    cos, sin = (factor.float() for factor in rope)
    length = (cos.square() + sin.square()).sqrt()
    return cos / length, sin / length


@dataclass(frozen=True)
class Window:
    """Keys of a sequence in a layer, and queries that attend to them.

    keys: `[H, T, D]`, after RoPE; groups of `group` tokens begin after the first `sinks`.
    group, sinks, recent: numbers of tokens.
    rope: of the groups, or None without RoPE.
    counted: bool `[T]`, False for padding, or None.
    query: `[Hq, R, D]`, sampled queries.
    at: int64 `[R]`, their positions.
    mask: added to the scores if float, allows attention if bool, `[Hq or 1, R, T]`; None masks the future alone.
    scaling, softcap, s_aux: as in `attention.reference.attend`.
    """

    keys: torch.Tensor
    group: int
    sinks: int
    recent: int
    rope: GroupRope | None
    query: torch.Tensor
    at: torch.Tensor
    scaling: float
    counted: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    softcap: float | None = None
    s_aux: torch.Tensor | None = None

    @property
    def groups(self) -> int:
        """Number of groups, the last of which may have fewer tokens."""
        return -(-(self.keys.shape[1] - self.sinks) // self.group)

    def in_groups(self, x: torch.Tensor) -> torch.Tensor:
        """Leave out the sinks of `x` `[..., T]` and divide it into groups, zero-padded: `[..., n, group]`."""
        missing = self.sinks + self.groups * self.group - x.shape[-1]
        x = x[..., self.sinks :]
        x = functional.pad(x, (0, missing)) if missing else x
        return x.unflatten(-1, (self.groups, self.group))

    def known(self) -> torch.Tensor:
        """True for tokens that count, bool `[n, group]`."""
        counted = self.counted
        if counted is None:
            counted = torch.ones(self.keys.shape[1], dtype=torch.bool, device=self.keys.device)
        return self.in_groups(counted)

    def queries(self, heads: slice) -> torch.Tensor:
        """Queries of some key heads, one query head after the other, float32 `[H, G * R, D]`."""
        return self.query.unflatten(0, (self.keys.shape[0], -1))[heads].flatten(1, 2).float()

    def runs_of_heads(self) -> Iterator[slice]:
        """Runs of heads of which keys make no more than `RUN_NUMBERS`."""
        heads, tokens, dim = self.keys.shape
        step = max(1, RUN_NUMBERS // max(1, tokens * dim))
        return (slice(start, start + step) for start in range(0, heads, step))

    def anchored(self, heads: slice) -> torch.Tensor:
        """Keys of some heads, each group turned back by its anchor: `[H, n, group, D]`."""
        keys = self.in_groups(self.keys[heads].float().mT).permute(0, 2, 3, 1)
        if self.rope is None:
            return keys
        by_group = keys.transpose(1, 2)  # each place in a group is a head of its own, whose tokens are the groups
        turned = self.rope.layout.unrotate(by_group.flatten(0, 1)[None], self.rope.anchors)
        return turned[0].view(by_group.shape).transpose(1, 2)

    def weights(self, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of p (1 - p) by key, `[H, n, group]`, and by query and group, `[H, G * R, n]`."""
        keys, query = self.keys[heads].float(), self.queries(heads)
        count, sampled = query.shape[1], max(1, len(self.at))
        by_key = keys.new_zeros(len(keys), self.groups, self.group)
        by_group = keys.new_zeros(len(keys), count, self.groups)
        aux, mask = self.s_aux, self.mask
        if aux is not None:
            aux = aux.view(self.keys.shape[0], -1)[heads].repeat_interleave(sampled, 1)
        if mask is not None and len(mask) > 1:
            mask = mask.unflatten(0, (self.keys.shape[0], -1))[heads].flatten(1, 2)
        for rows in torch.arange(count, device=keys.device).split(max(1, RUN_NUMBERS // max(1, keys[..., 0].numel()))):
            paid = attention_paid(
                query[:, rows], keys, self.at[rows % sampled], self.scaling, None if aux is None else aux[:, rows],
                softcap=self.softcap, mask=None if mask is None else mask[:, rows % mask.shape[1]],
                sinks=self.sinks, recent=self.recent,
            )  # fmt: skip
            grouped = self.in_groups((1 - paid).mul_(paid))
            by_key += grouped.sum(1)
            by_group[:, rows] = grouped.sum(-1)
        return by_key, by_group


@dataclass
class MeanSums:
    """Sums over windows of one layer from which the mean key at each place in a group follows, float64.

    keys: `[H, D]`, keys before RoPE.
    """

    keys: torch.Tensor
    tokens: int = 0

    @classmethod
    def zeros(cls, heads: int, head_dim: int, device: torch.device | None = None) -> MeanSums:
        return cls(torch.zeros(heads, head_dim, dtype=torch.float64, device=device))

    def add(self, window: Window) -> None:
        known = window.known()
        for heads in window.runs_of_heads():
            x = torch.where(known[..., None], window.anchored(heads), 0.0).sum(1)
            if window.rope is not None:
                x = window.rope.layout.unrotate(x[None], window.rope.places)[0]
            self.keys[heads] += x.double().sum(1).to(self.keys.device)
        self.tokens += int(known.sum())

    def table(self, group: int, rope: GroupRope | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of the table of means, see `mean_table`."""
        table = (self.keys / max(1, self.tokens)).float()[:, None].expand(-1, group, -1)
        if rope is not None:
            cos, sin = (factor.to(table.device) for factor in rope.places)
            table = rope.layout.rotate(table[None], (cos, sin))[0]
        return mean_table(table)


@dataclass
class KeyMoments:
    """Sums over windows of one layer, float64; all are linear, so windows add up.

    keys, plain: `[H, D, D]` second moments of anchored keys, weighted by attention and not.
    queries: `[H, D, D]` second moment of queries turned to the anchors of the groups that they attend to.
    weight, tokens: the totals that they are divided by, `[H]` and a number.
    sampled: number of queries per key head.
    """

    keys: torch.Tensor
    plain: torch.Tensor
    queries: torch.Tensor
    weight: torch.Tensor
    tokens: int = 0
    sampled: int = 0

    @classmethod
    def zeros(cls, heads: int, head_dim: int, device: torch.device | None = None) -> KeyMoments:
        keys, plain, queries = torch.zeros(3, heads, head_dim, head_dim, dtype=torch.float64, device=device)
        return cls(keys, plain, queries, keys.new_zeros(heads))

    def add(self, window: Window, table: torch.Tensor) -> None:
        """Add a window, of whose keys the `table` of means `[H, group, D]` is subtracted."""
        known, table = window.known(), table.to(window.keys.device)
        for heads in window.runs_of_heads():
            x = torch.where(known[..., None], window.anchored(heads) - table[heads, None], 0.0)
            keys = x.flatten(1, 2).double()
            self.plain[heads] += (keys.mT @ keys).to(self.plain.device)
            if len(window.at):
                by_key, by_group = window.weights(heads)
                by_key = by_key.flatten(1)[..., None].double()
                self.keys[heads] += ((keys * by_key).mT @ keys).to(self.keys.device)
                self.queries[heads] += self._turned_queries(window, heads, by_group).to(self.queries.device)
                self.weight[heads] += by_key.sum((1, 2)).to(self.weight.device)
        self.tokens += int(known.sum())
        self.sampled += len(window.at) * window.query.shape[0] // window.keys.shape[0]

    def _turned_queries(self, window: Window, heads: slice, by_group: torch.Tensor) -> torch.Tensor:
        """Second moment `[H, D, D]`, float64, of queries turned to each group's anchor, weighted by `[H, R, n]`."""
        query, rope = window.queries(heads), window.rope
        if rope is None:
            return (query * by_group.sum(-1, keepdim=True)).double().mT @ query.double()
        # As in `RopeLayout.rotate_query`, but channels are put in order in the sum alone.
        a, b = (x[:, :, None] for x in rope.layout.split(query))
        rotary = rope.layout.rotary
        rest = [x[..., rotary:].expand(-1, -1, window.groups, -1) for x in (a, b)]
        a, b = a[..., :rotary], b[..., :rotary]
        found = torch.zeros_like(self.queries[heads], device=query.device)
        step = max(1, RUN_NUMBERS // query.numel())
        for start in range(0, window.groups, step):
            groups = slice(start, start + step)
            cos, sin = (factor[0, groups].float() for factor in rope.anchors)
            real, imaginary = (x[:, :, groups] for x in rest)
            turned = torch.cat([a * cos + b * sin, real, b * cos - a * sin, imaginary], -1).flatten(1, 2)
            found += ((turned * by_group[..., groups].flatten(1)[..., None]).mT @ turned).double()
        for _ in range(2):
            found = rope.layout.join(*found.chunk(2, -1)).mT
        return found

    def means(self) -> Moments:
        """The moments themselves: sums divided by their totals."""
        weight = self.weight.clamp_min(1e-30)[:, None, None]
        return Moments(self.keys / weight, self.plain / max(1, self.tokens), self.queries / weight)
