"""Statistics of spectral keys measured on the cached text, without a file."""

import logging
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from kvcache_compress.codecs import base
from kvcache_compress.codecs.base import Prompt

from .moments import SAMPLED, Costs, GroupRope, KeyMoments, Window, table_of_mean
from .transform import Moments, spectral_basis

_warn_once = cache(logging.getLogger(__name__).warning)
LEAST_LATER = 128
"""Fewest tokens to measure once there are statistics to blend in."""
KEYS_PRIOR, QUERIES_PRIOR = 256, 1024
"""Tokens that earlier moments of keys and of queries count for; tuned on SmolLM2's KL in chats."""
HALF_KEYS, HALF_QUERIES = 0.5, 3.0
"""Keys and queries per head dimension at which measured moments get half the weight; tuned on SmolLM2's KL after 144
tokens."""
MOST_UNLIKE = 16.0
"""Largest factor between a channel's measured cost and the one that queries shrink toward, as outlier channels of keys
come with queries of which the same channels are small."""
SURE_VARIANCE = 8
"""Tokens at which a channel's own variance counts as much as the mean over channels."""


class Prior(NamedTuple):
    """Earlier statistics as moments, float64.

    Attributes:
        mean: mean key before RoPE, `[H, D]`.
        keys: second moment of anchored keys, the mix of which `spectral_basis` made the basis, `[H, D, D]`.
        queries: second moment of queries, `[H, D, D]`.
        queried: heads whose queries were measured, bool `[H]`.
    """

    mean: torch.Tensor
    keys: torch.Tensor
    queries: torch.Tensor
    queried: torch.Tensor


def prompt_statistics(
    prompt: Prompt, group: int, rope: GroupRope | None, prior: Prior | None, costs: Costs, quiet: bool
) -> dict[str, torch.Tensor]:
    """Measure a layer's `inverse` of the basis, `deviation`, `places`, `means` and `queried`; all float32.

    `places` and `means` are those of `mean_table`. `queried` `[H]` is 1 for heads whose queries were measured, else 0.
    With `prior`, the result is a blend with these earlier moments. `costs` as in `Window`. Poor statistics give a
    warning once, unless `quiet`.
    """
    _, heads, _, head_dim = prompt.keys.shape
    device = prompt.keys.device
    total, tokens = torch.zeros(heads, head_dim, dtype=torch.float64, device=device), 0
    for window in _windows(prompt, group, rope, costs):
        total += window.key_sum()
        tokens += window.tokens
    if prior is not None:
        total += KEYS_PRIOR * prior.mean
        tokens += KEYS_PRIOR
    places, means = table_of_mean(total / max(1, tokens), group, rope)
    moments = KeyMoments.zeros(heads, head_dim, device)
    for window in _windows(prompt, group, rope, costs):
        moments.add(window, (places @ means).float())
    if prompt.queries is None and not quiet:
        _warn_once(
            "the queries of the first prompt were not seen (without fused attention, with gradients, or in compiled "
            "code). Spectral keys (best-*) have statistics of the keys alone, and the loss is two to four times as "
            "large. Call enable_fused_attention(model), and run the first prompt under torch.no_grad(), not compiled"
        )
    elif moments.tokens < base.LEAST_TOKENS and prompt.at is None and prior is None and not quiet:
        _warn_once(
            "statistics of spectral were measured on fewer than %d tokens, because a static cache measures its first "
            "prompt however short: it loses more than with a longer prompt, a cache that grows, or a calibrated model "
            "(kvcache-compress calibrate --method spectral)",
            base.LEAST_TOKENS,
        )
    basis, deviation = spectral_basis(*(shrunk(moments) if prior is None else blended(moments, prior)))
    found = {"inverse": torch.linalg.inv(basis), "deviation": deviation, "places": places, "means": means}
    found["queried"] = moments.weight > 0 if prior is None else (moments.weight > 0) | prior.queried
    return {name: x.float().contiguous() for name, x in found.items()}


def _windows(prompt: Prompt, group: int, rope: GroupRope | None, costs: Costs) -> Iterator[Window]:
    sinks, seen = prompt.sinks.shape[2], prompt.queries
    tokens = sinks + prompt.keys.shape[2]
    none = torch.empty(0, dtype=torch.long, device=prompt.keys.device)
    padding = [0] if prompt.padding is None else prompt.padding.tokens.tolist()
    for row, (first, keys) in enumerate(zip(prompt.sinks, prompt.keys, strict=True)):
        own = rope
        if rope is not None:
            cos, sin = (factor[min(row, len(factor) - 1)][None] for factor in rope.anchors)
            own = GroupRope(rope.layout, (cos, sin), rope.offsets)
        query, at, mask, counted = keys[:, :0], none, None, None
        if seen is not None:
            count, begin = seen.query.shape[2], padding[min(row, len(padding) - 1)] + sinks + prompt.recent
            if prompt.at is None:
                at = sampled_positions(tokens, count, begin).to(keys.device)
                query = seen.query[row][:, at - (tokens - count)]
            else:
                known = prompt.at >= begin
                at, query = prompt.at[known], seen.query[row][:, known]
            mask, counted = seen.mask.of_queries(row, at, count, tokens, prompt.padding, sinks)
        whole = torch.cat([first, keys], 1)
        yield Window(whole, group, sinks, prompt.recent, own, query, at, seen, mask, counted, costs)


def sampled_positions(tokens: int, queries: int, first: int) -> torch.Tensor:
    """Up to `SAMPLED` evenly spaced positions among the last `queries` tokens, none below `first`."""
    start = max(first, tokens - queries)
    count = min(SAMPLED, max(0, tokens - start))
    return torch.linspace(tokens - 1, start, count).round().long().flip(0)


def shrunk(sums: KeyMoments) -> Moments:
    """Shrink moments toward a scaled identity; fewer samples, stronger shrinkage.

    Keys shrink toward the identity in channels of unit variance, so that few tokens get evenly spread bits. Queries
    shrink toward the identity in the keys' own channels, where an error costs its square, unless the queries' channels
    are of very unlike sizes; heads whose keys no query attends to use that alone. Heads are independent, so a
    tensor-parallel process codes its heads as a single process would.
    """
    keys, plain, queries = sums.means()
    dim = keys.shape[-1]
    variance = plain.diagonal(dim1=-2, dim2=-1)
    certain = sums.tokens / (sums.tokens + SURE_VARIANCE)
    unit = (variance * certain + variance.mean(-1, keepdim=True) * (1 - certain)).clamp_min(1e-30).sqrt()
    scales, even = unit[:, :, None] * unit[:, None], torch.eye(dim, dtype=unit.dtype, device=unit.device)
    plain = _mixed(plain / scales, even, sums.tokens / (HALF_KEYS * dim)) * scales
    weighted = _mixed(keys / scales, even, sums.tokens / (HALF_KEYS * dim)) * scales
    squares, measured = (_leveled(x) for x in (unit.square(), (queries * scales).diagonal(dim1=-2, dim2=-1)))
    expected = squares.clamp(measured / MOST_UNLIKE, measured * MOST_UNLIKE)
    expected = torch.diag_embed(expected / expected.mean(-1, keepdim=True))
    cost = _mixed(queries * scales, expected, sums.sampled / (HALF_QUERIES * dim)) / scales
    seen = (sums.weight > 0)[:, None, None]
    return Moments(torch.where(seen, weighted, plain), plain, torch.where(seen, cost, even))


def blended(sums: KeyMoments, prior: Prior) -> Moments:
    """Blend moments with earlier ones; the fewer new tokens, the more the earlier moments count."""
    own, seen, known = shrunk(sums), (sums.weight > 0)[:, None, None], prior.queried[:, None, None]
    keys, plain, queries = sums.means()
    of_keys, of_queries = (count / (count + sums.tokens) for count in (KEYS_PRIOR, QUERIES_PRIOR))
    queries = torch.where(seen, torch.lerp(queries, prior.queries, of_queries), prior.queries)
    return Moments(
        torch.lerp(torch.where(seen, keys, plain), prior.keys, of_keys),
        torch.lerp(plain, prior.keys, of_keys),
        torch.where(known, queries, own.queries),
    )


def _leveled(x: torch.Tensor) -> torch.Tensor:
    """Divide positive `[H, D]` by each head's geometric mean."""
    return x / x.clamp_min(1e-30).log().mean(-1, keepdim=True).exp()


def _mixed(moment: torch.Tensor, even: torch.Tensor, measured: float) -> torch.Tensor:
    """Mix a moment with `even`, whose diagonal has mean 1; both count alike if `measured` is 1."""
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return torch.lerp(moment, mean * even, 1 / (1 + measured**2))
