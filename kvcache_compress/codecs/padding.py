"""Left padding of a batch, and the swap that lets each row keep its own first tokens as sinks.

Sinks are the first tokens of a storage. In a left-padded row these would be padding, so the row's first tokens swap
with it. With `p` padding tokens and `S` sinks, tokens `i` and `max(p, S) + i` are exchanged for `i < min(p, S)`. The
sinks are then tokens `[p, p + S)`, and padding is at indices `[S, S + p)`. All other tokens stay, so rows have the same
length whatever their padding. Masks are exchanged like the tokens.
"""

from collections.abc import Callable
from typing import Any

import torch


class LeftPadding:
    """Number of padding tokens at the start of each row of a batch; immutable.

    Attributes:
        tokens: int64 `[B]`, or `[1]` for all rows.
        longest: an upper bound of `tokens`, known to the host.
    """

    def __init__(self, tokens: torch.Tensor, longest: int) -> None:
        self.tokens = tokens
        self.longest = longest
        self.last: tuple[torch.Tensor, tuple[int, int], torch.Tensor] | None = None
        """The latest exchanged mask (input, key, result), which all layers of a step share."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "LeftPadding":
        return self

    def partners(self, sinks: int, bound: int | torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the token that each of the first `sinks` tokens swaps with, int64 `[B, sinks]`.

        A token without a partner below `bound` is its own partner.
        """
        own = torch.arange(sinks, device=device)
        padding = self.tokens.to(device)[:, None]
        other = padding.clamp_min(sinks) + own
        return torch.where((own < padding) & (other < bound), other, own)

    def exchange_(self, x: torch.Tensor, sinks: int, bound: int | torch.Tensor | None = None) -> torch.Tensor:
        """Exchange tokens, the last dimension of `x` `[B, ..., T]`, in place; a second call undoes the first.

        Only the first `bound` tokens are exchanged, by default all.
        """
        return _exchange_(x, self.partners(sinks, x.shape[-1] if bound is None else bound, x.device))

    def exchange_new(
        self, held: torch.Tensor, x: torch.Tensor, start: int | torch.Tensor, sinks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange new tokens that are sinks of their rows with the padding held among the sinks.

        `held` are the sinks so far, `[B, H, s, D]`, and `x` the new tokens `[B, H, n, D]`, which come after `start`
        tokens (an int or int64 `[]`). Returns both after the exchange, as new tensors.
        """
        before, count = held.shape[2], x.shape[2]
        own = torch.arange(sinks, device=x.device)
        partners = self.partners(sinks, start + count, x.device)
        arrives = (partners >= start) & (partners > own)
        both = torch.cat([held, x], 2)
        _exchange_(both.mT, torch.where(arrives, partners - start + before, own))
        return both[:, :, :before].clone(), both[:, :, before:]

    def exchanged(self, mask: torch.Tensor, sinks: int) -> torch.Tensor:
        """Return a mask `[B or 1, Hq or 1, n, T]` after the exchange: `[B, Hq or 1, n, T]`, a new tensor."""
        rows = max(len(mask), len(self.tokens))
        return self.exchange_(mask.expand(rows, -1, -1, -1).clone(), sinks)

    def without(self, x: torch.Tensor, sinks: int, first: int) -> torch.Tensor:
        """Return stored tokens `x` `[B, H, n, D]` without padding: `[1, H, N, D]`.

        `first` is the index of the first token of `x`. If all tokens are padding, `x` is returned unchanged.
        """
        real = self.exchange_(self.real(first + x.shape[2]).to(x.device), sinks)
        real = real[: len(x), first:].expand(len(x), -1)
        found = x.transpose(1, 2)[real]
        return found.transpose(0, 1)[None] if len(found) else x

    def real(self, tokens: int) -> torch.Tensor:
        """True for the tokens of each row that are not padding, in their order: bool `[B or 1, tokens]`."""
        return torch.arange(tokens, device=self.tokens.device) >= self.tokens[:, None]

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "LeftPadding":
        """Return the padding after `change` of the rows; a single entry fits any rows and stays unchanged."""
        return self if len(self.tokens) == 1 else LeftPadding(change(self.tokens), self.longest)


def _exchange_(x: torch.Tensor, partners: torch.Tensor) -> torch.Tensor:
    """Exchange entry `i` with entry `partners[b, i]` of the last dimension of `x` `[B, ..., T]`, in place."""
    if not (count := min(partners.shape[1], x.shape[-1])):
        return x
    index = partners[:, :count].view(-1, *(1,) * (x.ndim - 2), count).expand(*x.shape[:-1], -1)
    first, other = x[..., :count].clone(), x.gather(-1, index)
    x.scatter_(-1, index, first)
    x[..., :count] = other
    return x
