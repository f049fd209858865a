"""Calibration text: files or a dataset on the hub, cut into windows of tokens."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def read_windows(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: int, context: int
) -> tuple[torch.Tensor, str]:
    """Windows `[tokens // context, context]`, spread evenly over the text, and a digest of them.

    Each window begins with what the model wants at the start of a text.

    Args:
        sources: text files, or one dataset on the hub (`owner/name` or `owner/name:configuration`, its column `text`).
        tokenizer: the model's.
        tokens: tokens wanted.
        context: tokens per window.

    Raises:
        ValueError: a source that is neither, or too little text.
    """
    if tokens < context:
        raise ValueError(f"tokens={tokens}: allowed at least one window of {context}")
    start: list[int] = list(tokenizer("")["input_ids"])
    length = context - len(start)
    wanted = tokens // context
    pieces: list[list[int]] = []
    found = 0
    for text, partial in _texts(sources):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        found += len(ids)
        pieces.append(ids)
        if partial and found >= wanted * length:
            break
    joined = [token for piece in pieces for token in piece]
    fitting = len(joined) // length
    if fitting < wanted:
        raise ValueError(
            f"tokens={tokens}: too little text, {len(joined)} tokens in {', '.join(sources)}; "
            + (f"allowed up to {fitting * context}, or more text" if fitting else f"a window has {context}")
        )
    spare = len(joined) - length
    begins = [index * spare // max(wanted - 1, 1) for index in range(wanted)]
    windows = torch.tensor([[*start, *joined[begin : begin + length]] for begin in begins])
    return windows, hashlib.sha256(windows.numpy().tobytes()).hexdigest()


def _texts(sources: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Texts, and whether more may follow than anyone needs."""
    for source in sources:
        path = Path(source).expanduser()
        if path.is_file():
            try:
                yield path.read_text(encoding="utf-8"), False
            except UnicodeDecodeError as error:
                raise ValueError(f"text={source!r}: not a text in UTF-8 ({error})") from None
        elif _HUB_ID.fullmatch(source) and not path.suffix and not path.parent.is_dir():
            yield from ((text, True) for text in _hub_texts(source))
        else:
            raise ValueError(f"text={source!r}: no such file; allowed are text files, or a dataset's id on the hub")


def _hub_texts(source: str) -> Iterator[str]:
    from datasets import load_dataset

    name, _, configuration = source.partition(":")
    try:
        rows = load_dataset(name, configuration or None, split="train", streaming=True)
        for row in rows:
            if "text" not in row:
                raise ValueError(f"text={source!r}: the dataset has no column 'text', but {', '.join(row)}")
            if row["text"].strip():
                yield row["text"]
    except ValueError:
        raise
    except Exception as error:  # the datasets library and its HTTP client have no common exception
        raise ValueError(f"text={source!r}: no such file, and no dataset that the hub gives: {error}") from error
