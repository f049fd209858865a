"""Texts and their windows, scores of logits, and what benchmarks share that score a forced continuation."""

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from os.path import isdir
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field

from kvcache_compress.eval.caches.prefill import STEP_TOKENS
from kvcache_compress.files.text import read_text

from .benchmark import Benchmark, Record

_ROWS_AT_ONCE = 64  # positions compared at once: in float64 a vocabulary of 150,000 takes 80 MB per copy


class ForcedBenchmark(Benchmark):
    """Base of benchmarks that force a continuation and take its KL from the full cache."""

    main_score: ClassVar[str] = "kl"
    higher_is_better = False

    scored: int = Field(default=128, ge=1, description="Tokens to score after the history.")
    step: int = Field(default=STEP_TOKENS, ge=1, description="Scored tokens per forward pass; 1 is as in generation.")


def read_texts(path: Path) -> str:
    """Read a text file, or all `.txt` files of a folder.

    Raises:
        ValueError: There is no such file, it is no text, or the folder has none.
    """
    files = sorted(path.glob("*.txt")) if isdir(path) else [path]
    if not files:
        raise ValueError(f"texts: no .txt file in the folder {path}")
    return "\n\n".join(read_text(file, f"texts={str(file)!r}") for file in files)


def text_name(path: Path) -> str:
    """Name of a text in results: the last two parts of its path."""
    return "/".join(path.resolve().parts[-2:])


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


def kl_scores(records: Sequence[Record]) -> dict[str, float]:
    """Mean KL and, of several records, its standard error."""
    kl = [record["kl"] for record in records]
    spread = {"kl_stderr": statistics.stdev(kl) / math.sqrt(len(kl))} if len(kl) > 1 else {}
    return {"kl": statistics.fmean(kl), **spread}


def scores_by(
    field: str, records: Sequence[Record], scores: Callable[[Sequence[Record]], dict[str, float]]
) -> dict[str, float]:
    """Scores of all records and, where the field has several values, `SCORE.VALUE` of those with each value."""
    values = list(dict.fromkeys(record[field] for record in records))
    found = scores(records)
    for value in values if len(values) > 1 else ():
        members = [record for record in records if record[field] == value]
        found |= {f"{name}.{value}": score for name, score in scores(members).items()}
    return found
