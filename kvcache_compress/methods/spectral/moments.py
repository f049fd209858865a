"""Attention-weighted second moments of a layer's keys and queries, which determine the spectral transform.

A score error costs p (1 - p) in the softmax, where p is the attention weight of a query on a key. So each key is
weighted by its sum of p (1 - p) over queries. Each query is rotated to the anchor of each group and weighted by its sum
of p (1 - p) over the group. Sinks and recent tokens are left out, because they are not encoded. Unweighted averages
would follow the many queries that attend only to the sinks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeAlias

import torch
from torch.nn import functional

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.modeling.rope import Rope, RopeLayout

from .transform import Moments, mean_table

SAMPLED = 160
"""Query positions sampled per window."""
RUN_NUMBERS = 1 << 23
"""Largest size of a temporary tensor, in numbers, so that windows of any length can be measured."""
CACHED_NUMBERS = 1 << 19
"""The same for the largest temporary tensors on CPUs, which then fit the second-level cache."""

Costs: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class GroupRope:
    """RoPE of a window's groups.

    Attributes:
        layout: the model's rotary pairs.
        anchors: cos and sin of the groups' first tokens, `[1, n, rotary]`.
        offsets: cos and sin of the rotation from a group's first token to each of its tokens, `[1, group, rotary]`.
    """

    layout: RopeLayout
    anchors: Rope
    offsets: Rope


def unit_rotations(rope: Rope) -> Rope:
    """Normalise cos and sin of the first positions to pure rotations, since YaRN's factors also scale."""
    cos, sin = (factor.float() for factor in rope)
    length = (cos.square() + sin.square()).sqrt()
    return cos / length, sin / length


def attention_costs(
    query: torch.Tensor, keys: torch.Tensor, at: torch.Tensor, scaling: float, sinks: int, recent: int, group: int, *,
    softcap: float | None = None, mask: torch.Tensor | None = None, s_aux: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Sums of p (1 - p) per key, `[H, n * group]`, and per query and group, `[H, R, n]`.

    p is the attention weight of queries `[H, R, D]` at positions `at` `[R]` on keys `[H, T, D]`. The first `sinks` keys
    and the last `recent` before each query cost nothing, because they are not encoded. Groups begin after the sinks;
    the last may be incomplete. `s_aux` is `[H, R]`; `mask` is `[H or 1, R, T]`, and None hides only the future. All
    else is as in `AttentionCall`.
    """
    place = torch.arange(keys.shape[1], device=keys.device)
    scores = (query.float() * scaling) @ keys.float().mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
        scores = scores if mask.dtype == torch.bool else scores + mask.float()
        scores = scores.masked_fill(hidden, -torch.inf)
    scores.masked_fill_(place > at[:, None], -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.float()[..., None]], -1)
    p = scores.softmax(-1)[..., : keys.shape[1]].masked_fill_((place < sinks) | (at[:, None] - place < recent), 0.0)
    if mask is not None:
        p.nan_to_num_()  # queries of padding see no token
    costs = (1 - p[..., sinks:]).mul_(p[..., sinks:])
    costs = functional.pad(costs, (0, -costs.shape[-1] % group))
    return costs.sum(1), costs.unflatten(-1, (-1, group)).sum(-1)


@dataclass(frozen=True)
class Window:
    """Keys of a sequence in one layer, and queries that attend to them.

    Attributes:
        keys: `[H, T, D]`, after RoPE; groups of `group` tokens begin after the first `sinks`.
        group, sinks, recent: numbers of tokens.
        rope: RoPE of the groups, or None.
        query: sampled queries, `[Hq, R, D]`.
        at: their positions, int64 `[R]`.
        call: how they attend; None if there are none.
        mask: `[Hq or 1, R, T]`, added to the scores if float, True where attention is allowed if bool; None hides only
            the future.
        counted: bool `[T]`, False for padding, or None.
        costs: `attention_costs`, or a back end's function that replaces it for calls without options.
    """

    keys: torch.Tensor
    group: int
    sinks: int
    recent: int
    rope: GroupRope | None
    query: torch.Tensor
    at: torch.Tensor
    call: AttentionCall | None
    mask: torch.Tensor | None
    counted: torch.Tensor | None
    costs: Costs

    @property
    def groups(self) -> int:
        """Number of groups; the last may be incomplete."""
        return -(-(self.keys.shape[1] - self.sinks) // self.group)

    @property
    def run_numbers(self) -> int:
        """Largest size of a temporary tensor on this device, in numbers."""
        return CACHED_NUMBERS if self.keys.device.type == "cpu" else RUN_NUMBERS

    @cached_property
    def known(self) -> torch.Tensor | None:
        """True for tokens that count, bool `[n, group, 1]`; None if all do and the last group is complete."""
        tokens, whole = self.keys.shape[1] - self.sinks, self.groups * self.group
        if self.counted is None and tokens == whole:
            return None
        known = torch.zeros(whole, dtype=torch.bool, device=self.keys.device)
        known[:tokens] = True if self.counted is None else self.counted[self.sinks :]
        return known.view(self.groups, self.group, 1)

    @property
    def tokens(self) -> int:
        """Number of tokens that count."""
        return self.keys.shape[1] - self.sinks if self.known is None else int(self.known.sum())

    def queries(self, heads: slice) -> torch.Tensor:
        """Queries of some key heads, float32 `[H, R * G, D]`; the G queries of one position are adjacent."""
        return self.query.unflatten(0, (self.keys.shape[0], -1))[heads].transpose(1, 2).flatten(1, 2).float()

    def runs_of_heads(self) -> Iterator[slice]:
        """Slices of heads whose keys have at most `RUN_NUMBERS` numbers."""
        heads, tokens, dim = self.keys.shape
        step = max(1, RUN_NUMBERS // max(1, tokens * dim))
        return (slice(start, start + step) for start in range(0, heads, step))

    def anchored(self, heads: slice) -> torch.Tensor:
        """Keys of some heads, each group rotated back by its anchor: `[H, n, group, D]`, zero-padded."""
        keys = self.keys[heads, self.sinks :].float()
        missing = self.groups * self.group - keys.shape[1]
        keys = functional.pad(keys, (0, 0, 0, missing)) if missing else keys
        keys = keys.unflatten(1, (self.groups, self.group))
        if self.rope is None:
            return keys
        return self.rope.layout.unrotate(keys, by_group(self.rope.anchors, slice(None)))

    def known_only(self, x: torch.Tensor) -> torch.Tensor:
        """Zero the tokens `[H, n, group, D]` that do not count."""
        return x if self.known is None else x.masked_fill(~self.known, 0.0)

    def key_sum(self) -> torch.Tensor:
        """Sum of the keys before RoPE, float64 `[H, D]`."""
        parts = []
        for heads in self.runs_of_heads():
            x = self.known_only(self.anchored(heads)).sum(1)
            if self.rope is not None:
                x = self.rope.layout.unrotate(x[None], self.rope.offsets)[0]
            parts.append(x.double().sum(1))
        return torch.cat(parts)

    def weights(self, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of p (1 - p) per key, `[H, n * group]`, and per query and group, `[H, R * G, n]`."""
        keys, query, call = self.keys[heads].float(), self.queries(heads), self.call
        assert call is not None
        count, tokens = len(self.at), keys.shape[1]
        each = query.shape[1] // max(1, count)
        by_key = keys.new_zeros(len(keys), self.groups * self.group)
        by_query = keys.new_zeros(len(keys), query.shape[1], self.groups)
        positions, at = self.at.tolist(), self.at.repeat_interleave(each)
        aux = None if call.s_aux is None else call.s_aux.view(self.keys.shape[0], each)[heads].repeat(1, count)
        mask = self.mask
        if mask is not None and len(mask) > 1:
            mask = mask.unflatten(0, (self.keys.shape[0], each))[heads].transpose(1, 2).flatten(1, 2)
        elif mask is not None and mask.shape[1] > 1:
            mask = mask.repeat_interleave(each, 1)
        plain = call.softcap is None and mask is None and aux is None
        costs = self.costs if plain else attention_costs
        step = max(1, self.run_numbers // max(1, len(keys) * each * tokens))
        for start in range(0, count, step):
            # Only whole groups that at least one of these queries can see.
            groups = -(-(max(positions[start : start + step]) + 1 - self.sinks) // self.group)
            rows, seen = slice(start * each, (start + step) * each), min(tokens, self.sinks + groups * self.group)
            options: dict[str, Any] = {}
            if not plain:
                options = {"softcap": call.softcap, "s_aux": None if aux is None else aux[:, rows]}
                options["mask"] = None if mask is None else mask[:, rows if mask.shape[1] > 1 else slice(1), :seen]
            of_keys, of_queries = costs(
                query[:, rows], keys[:, :seen], at[rows], call.scaling, self.sinks, self.recent, self.group, **options
            )
            by_key[:, : of_keys.shape[1]] += of_keys
            by_query[:, rows, :groups] = of_queries
        return by_key, by_query


def by_group(factors: Rope, groups: slice) -> Rope:
    """cos and sin of some groups, `[n, rotary]`, for rotating vectors `[H, n, *, D]` group by group."""
    return factors[0][0, groups], factors[1][0, groups]


def table_of_mean(mean: torch.Tensor, group: int, rope: GroupRope | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of the table of a mean key before RoPE, float64 `[H, D]`; see `mean_table`."""
    table = mean.float()[:, None].expand(-1, group, -1)
    return mean_table(table if rope is None else rope.layout.rotate(table[None], rope.offsets)[0])


@dataclass
class KeyMoments:
    """Sums over windows of one layer, float64; windows simply add up.

    Attributes:
        keys: second moment of anchored keys weighted by attention, `[H, D, D]`.
        plain: second moment of anchored keys, unweighted, `[H, D, D]`.
        queries: second moment of queries rotated to the anchors, weighted by attention, `[H, D, D]`.
        weight: total weight per head, `[H]`.
        tokens: number of tokens.
        sampled: number of queries per key head.
    """

    keys: torch.Tensor
    plain: torch.Tensor
    queries: torch.Tensor
    weight: torch.Tensor
    tokens: int = 0
    sampled: int = 0

    @classmethod
    def zeros(cls, heads: int, head_dim: int, device: torch.device) -> Self:
        keys, plain, queries = torch.zeros(3, heads, head_dim, head_dim, dtype=torch.float64, device=device)
        return cls(keys, plain, queries, keys.new_zeros(heads))

    def add(self, window: Window, table: torch.Tensor) -> None:
        """Add a window, after subtracting the table of mean keys `[H, group, D]`."""
        for heads in window.runs_of_heads():
            keys = window.known_only(window.anchored(heads) - table[heads, None]).flatten(1, 2)
            self.plain[heads] += (keys.mT @ keys).double()
            if len(window.at):
                by_key, by_query = window.weights(heads)
                self.keys[heads] += ((keys * by_key[..., None]).mT @ keys).double()
                self.queries[heads] += self._turned_queries(window, heads, by_query)
                self.weight[heads] += by_key.double().sum(1)
        self.tokens += window.tokens
        self.sampled += len(window.at) * window.query.shape[0] // window.keys.shape[0]

    def _turned_queries(self, window: Window, heads: slice, by_query: torch.Tensor) -> torch.Tensor:
        """Second moment `[H, D, D]`, float64, of queries rotated to each group's anchor, weighted by `[H, R, n]`."""
        query, rope = window.queries(heads), window.rope
        if rope is None:
            return ((query * by_query.sum(-1, keepdim=True)).mT @ query).double()
        found = torch.zeros_like(self.queries[heads])
        each, positions = query.shape[1] // len(window.at), window.at.tolist()
        columns, weights = query.mT.contiguous()[:, None], by_query.mT.contiguous()
        step = max(1, window.run_numbers // query.numel())
        for start in range(0, window.groups, step):
            # Skip queries that come before these groups; positions usually ascend.
            first = window.sinks + start * window.group
            rows = slice(each * next((i for i, at in enumerate(positions) if at >= first), 0), None)
            groups = slice(start, start + step)
            weighted = columns[..., rows] * weights[:, groups, None, rows]
            moment = (weighted.flatten(1, 2) @ query[:, rows]).view(*weighted.shape[:3], -1)
            for _ in range(2):
                moment = rope.layout.rotate_query(moment, by_group(rope.anchors, groups)).mT
            found += moment.sum(1)
        return found

    def means(self) -> Moments:
        """The moments: sums divided by their totals."""
        weight = self.weight.clamp_min(1e-30)[:, None, None]
        return Moments(self.keys / weight, self.plain / max(1, self.tokens), self.queries / weight)
