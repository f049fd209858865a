"""Read calibration text from files or a dataset on the hub, cut into windows of tokens."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from huggingface_hub import constants
from transformers import PreTrainedTokenizerBase

from kvcache_compress.modeling.hub import check_hub
from kvcache_compress.validation import require

Report: TypeAlias = Callable[[str, int, int], None]
"""Callback for progress: name of the work, steps done, steps in all."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_FILE_NAME = re.compile(r".*\.(txt|text|md|rst|tex|html?|xml|json|jsonl|csv|tsv|parquet|gz|zip|zst)", re.IGNORECASE)
_WHOLE_BYTES = 1 << 22
"""Files up to this size, or up to `_BYTES_PER_TOKEN` per wanted token, are read whole; larger ones in blocks."""
_BYTES_PER_TOKEN = 16
_BLOCK_BYTES = 1 << 17


def read_windows(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: int, context: int
) -> tuple[torch.Tensor, str]:
    """Read windows `[tokens // context, context]`, evenly spread over the text; return them with their SHA-256.

    Each window begins with the tokens that the tokenizer puts at the start of a text.

    Args:
        sources: text files, or a dataset on the hub (`owner/name` or `owner/name:configuration`, its column `text`).
            Large files are read in evenly spread blocks.
        tokenizer: the model's tokenizer.
        tokens: tokens wanted.
        context: tokens per window.

    Raises:
        ValueError: a source is neither a file nor a dataset, windows are too short for text, or there is too little
            text.
        ImportError: a source is on the hub, and the package datasets is missing.
    """
    if tokens < context:
        raise ValueError(f"tokens={tokens}: must be at least {context}, the size of a window")
    check_sources(sources)
    start: list[int] = list(tokenizer("")["input_ids"])
    length = context - len(start)
    if length < 1:
        raise ValueError(f"context={context}: must be more than {len(start)}, the tokens that the tokenizer puts first")
    wanted = tokens // context
    pieces: list[list[int]] = []
    count = 0
    for text, partial in _texts(sources, max(_WHOLE_BYTES, _BYTES_PER_TOKEN * tokens) // len(sources)):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        count += len(ids)
        pieces.append(ids)
        if partial and count >= wanted * length:
            break
    joined = [token for piece in pieces for token in piece]
    fitting = len(joined) // length
    if fitting < wanted:
        raise ValueError(
            f"tokens={tokens}: too little text, {len(joined)} tokens in {', '.join(sources)}. Add text"
            + (f", or ask for at most {fitting * context}" if fitting else f"; a window takes {context}")
        )
    spare = len(joined) - length
    begins = [index * spare // max(wanted - 1, 1) for index in range(wanted)]
    windows = torch.tensor([[*start, *joined[begin : begin + length]] for begin in begins])
    return windows, hashlib.sha256(windows.numpy().tobytes()).hexdigest()


def check_sources(sources: Sequence[str]) -> None:
    """Raise `ValueError` if there are no sources, or one is neither a file nor looks like a dataset's id."""
    if not sources:
        raise ValueError("text=[]: must name text files, or a dataset on the hub")
    for source in sources:
        path = Path(source).expanduser()
        hub_id = _HUB_ID.fullmatch(source) and not _FILE_NAME.fullmatch(source) and not path.parent.is_dir()
        if not path.is_file() and not hub_id:
            raise ValueError(f"text={source!r}: no such file, and not the id of a dataset on the hub")


def _texts(sources: Sequence[str], most: int) -> Iterator[tuple[str, bool]]:
    """Texts of all sources, about `most` bytes per file, each with True if more text may follow."""
    for source in sources:
        path = Path(source).expanduser()
        if not path.is_file():
            yield from ((text, True) for text in _hub_texts(source))
            continue
        try:
            yield from ((text, False) for text in _file_texts(path, most))
        except UnicodeDecodeError as error:
            raise ValueError(f"text={source!r}: not text in UTF-8 ({error})") from None


def _file_texts(path: Path, most: int) -> Iterator[str]:
    """Text of a file of at most `most` bytes; evenly spread blocks of a larger one."""
    size = path.stat().st_size
    if size <= most:
        yield path.read_text(encoding="utf-8")
        return
    blocks = -(-most // _BLOCK_BYTES)
    with path.open("rb") as file:
        for index in range(blocks):
            file.seek(index * (size - _BLOCK_BYTES) // max(blocks - 1, 1))
            block = file.read(_BLOCK_BYTES)
            begin = next((at for at, byte in enumerate(block[:3]) if byte & 0xC0 != 0x80), 3)
            yield codecs.getincrementaldecoder("utf-8")().decode(block[begin:])


def _hub_texts(source: str) -> Iterator[str]:
    datasets = require("datasets", "data sets on the hub", "datasets")
    name, _, configuration = source.partition(":")
    try:
        if not constants.HF_HUB_OFFLINE:
            check_hub(name, "dataset")
        rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
        for row in rows:
            if "text" not in row:
                raise ValueError(f"text={source!r}: the dataset has no column 'text' (it has {', '.join(row)})")
            if row["text"].strip():
                yield row["text"]
    except ValueError:
        raise
    except Exception as error:  # the datasets library and its HTTP client have no common exception
        raise ValueError(f"text={source!r}: no such file, and the hub has no such dataset: {error}") from error
