"""Read calibration text from files, cut into windows of tokens."""

import codecs
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

Report: TypeAlias = Callable[[str, int, int], None]
"""Callback for progress: name of the work, steps done, steps in all."""
_WHOLE_BYTES = 1 << 22
"""Files up to this size, or up to `_BYTES_PER_TOKEN` per wanted token, are read whole; larger ones in blocks."""
_BYTES_PER_TOKEN = 16
_BLOCK_BYTES = 1 << 17


def read_windows(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: int, context: int
) -> tuple[torch.Tensor, str]:
    """Read windows `[tokens // context, context]`, evenly spread over the text; return them with their SHA-256.

    Each window begins with the tokens that the tokenizer puts at the start of a text. Large files are read in evenly
    spread blocks.
    """
    if tokens < context:
        raise ValueError(f"tokens={tokens}: must be at least {context}, the size of a window")
    check_files(files)
    start: list[int] = list(tokenizer("")["input_ids"])
    length = context - len(start)
    if length < 1:
        raise ValueError(f"context={context}: must be more than {len(start)}, the tokens that the tokenizer puts first")
    wanted, most = tokens // context, max(_WHOLE_BYTES, _BYTES_PER_TOKEN * tokens) // len(files)
    joined: list[int] = []
    for file in files:
        for text in _texts(file, most):
            joined += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
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


def _texts(file: str, most: int) -> Iterator[str]:
    """Text of a file of at most `most` bytes; evenly spread blocks of a larger one."""
    path = Path(file).expanduser()
    size = path.stat().st_size
    try:
        if size <= most:
            yield path.read_text(encoding="utf-8")
            return
        blocks = -(-most // _BLOCK_BYTES)
        with path.open("rb") as stream:
            for index in range(blocks):
                stream.seek(index * (size - _BLOCK_BYTES) // max(blocks - 1, 1))
                block = stream.read(_BLOCK_BYTES)
                begin = next((at for at, byte in enumerate(block[:3]) if byte & 0xC0 != 0x80), 3)
                yield codecs.getincrementaldecoder("utf-8")().decode(block[begin:])
    except UnicodeDecodeError as error:
        raise ValueError(f"text={file!r}: not text in UTF-8 ({error})") from None
