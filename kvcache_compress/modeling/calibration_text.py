"""Read calibration text from files, cut into windows of tokens."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from kvcache_compress.files.text import read_text

Report: TypeAlias = Callable[[int, int, str], None]
"""Callback for progress: steps done, steps in all, name of the work."""
_MOST_CHARACTERS = 1 << 24
"""Most characters that are read of all files."""


def read_windows(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: int, context: int
) -> tuple[torch.Tensor, str]:
    """Read windows `[tokens // context, context]`, evenly spread over the text; return them with their SHA-256.

    Each window begins with the tokens that the tokenizer puts at the start of a text. At most 2²⁴ characters are
    read, an equal share from the beginning of each file.
    """
    if tokens < context:
        raise ValueError(f"tokens={tokens}: must be at least {context}, the size of a window")
    check_files(files)
    start: list[int] = list(tokenizer("")["input_ids"])
    length = context - len(start)
    if length < 1:
        raise ValueError(f"context={context}: must be more than {len(start)}, the tokens that the tokenizer puts first")
    joined: list[int] = []
    for file in files:
        text = read_text(Path(file).expanduser(), f"text={file!r}", _MOST_CHARACTERS // len(files))
        joined += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    wanted = tokens // context
    fitting = len(joined) // length
    if fitting < wanted:
        raise ValueError(
            f"tokens={tokens}: too little text, {len(joined)} tokens in {', '.join(files)}. Add text"
            + (f", or ask for at most {fitting * context}" if fitting else f"; a window takes {context}")
        )
    spare = len(joined) - length
    begins = [index * spare // max(wanted - 1, 1) for index in range(wanted)]
    windows = torch.tensor([[*start, *joined[begin : begin + length]] for begin in begins])
    return windows, hashlib.sha256(windows.numpy().tobytes()).hexdigest()


def check_files(files: Sequence[str]) -> None:
    """Raise `ValueError` if there are no text files, or one does not exist."""
    if not files:
        raise ValueError("text=[]: must name text files")
    for file in files:
        if not Path(file).expanduser().is_file():
            raise ValueError(f"text={file!r}: no such file")
