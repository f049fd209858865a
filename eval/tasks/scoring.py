"""Windows of a text, and scores of logits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

_ROWS_AT_ONCE = 64  # positions compared at once: in float64 a vocabulary of 150,000 takes 80 MB per copy


def cut_windows(
    token_ids: Sequence[int], *, prefix: int, scored: int, windows: int, bos: Sequence[int] = ()
) -> list[torch.Tensor]:
    """Cut windows that do not overlap, spread evenly from the text's first token to its last.

    A short text gives fewer windows, or a single one with a shorter prefix, with a warning.

    Args:
        token_ids: the whole text without special tokens.
        prefix: tokens before the continuation, `bos` included; at least 1.
        scored: tokens of the continuation; at least 1.
        windows: number of windows; at least 1.
        bos: tokens that the model expects at the start of a text; each window starts with them.

    Returns:
        Windows `[1, prefix + scored]`.

    Raises:
        ValueError: Not even one window fits with a prefix as long as its continuation.
    """
    longest_prefix = len(token_ids) + len(bos) - scored
    if longest_prefix < min(prefix, scored):
        raise ValueError(
            f"text of {len(token_ids)} tokens: too short for a prefix of {min(prefix, scored)} and {scored} scored "
            "tokens; give a longer text, or score fewer tokens"
        )
    if longest_prefix < prefix:
        warnings.warn(f"text of {len(token_ids)} tokens: prefix {longest_prefix} instead of {prefix}", stacklevel=2)
        prefix = longest_prefix
    length = prefix + scored - len(bos)
    fitting = len(token_ids) // length
    if fitting < windows:
        sizes = f"{prefix} + {scored} tokens"
        warnings.warn(
            f"text of {len(token_ids)} tokens: {fitting} windows of {sizes} instead of {windows}", stacklevel=2
        )
        windows = fitting
    spare = len(token_ids) - length
    starts = [index * spare // max(windows - 1, 1) for index in range(windows)]
    return [torch.tensor([[*bos, *token_ids[start : start + length]]]) for start in starts]


def compare_tokens(
    reference: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compare a cache's logits with the full cache's, token by token, in float64.

    Args:
        reference: the full cache's logits after the prefix, then after each of the S tokens fed, `[S + 1, V]`.
        logits: the same of the cache under test.
        targets: the tokens fed, `[S]`.

    Returns:
        Three tensors `[S]`: the negative log-likelihood of each target under `logits`, KL(reference || logits) in nats
        after each target, and whether both have the same most likely token there.
    """
    found = []
    targets = targets.to(logits.device)
    for start in range(0, targets.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        predicted = logits[:-1][rows].double().log_softmax(-1)
        log_p = reference[1:][rows].double().log_softmax(-1)
        log_q = logits[1:][rows].double().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        found.append((-predicted.gather(-1, targets[rows, None])[:, 0], kl, log_p.argmax(-1) == log_q.argmax(-1)))
    nll, kl, same = (torch.cat(parts) for parts in zip(*found, strict=True))
    return nll, kl, same
