"""Tokenizers of a few lines, and a stand-in for a cache run with fixed results."""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

START = 1


class Characters:
    """Tokenizer with one token per character, `START` at the start, and a chat template."""

    eos_token_id = None
    pad_token_id = 0

    def __init__(self, *, chat: bool = True) -> None:
        self.chat_template = "yes" if chat else None

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [START] * add_special_tokens + [ord(character) % 128 for character in text]}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(token) for token in torch.as_tensor(ids).tolist() if token != START)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


class Letters:
    """Tokenizer with one of 64 tokens per character, and the start tokens `bos`."""

    def __init__(self, bos: list[int] | None = None) -> None:
        self.bos = bos or []

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [*(self.bos if add_special_tokens else []), *(ord(character) % 64 for character in text)]}


class Words(Characters):
    """Tokenizer with one token per word, including the white space before it."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, int] = {"<start>": 0}

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        words = re.findall(r"\s*\S+|\s+$", text)
        return {"input_ids": [0] * add_special_tokens + [self.known.setdefault(w, len(self.known)) for w in words]}

    def decode(self, ids: Any, **_: Any) -> str:
        words = list(self.known)
        return "".join(words[token] for token in torch.as_tensor(ids).tolist() if token)


def word_tokenizer(words: Sequence[str], **special: str) -> PreTrainedTokenizerFast:
    """Tokenizer of Transformers with one token per word, numbered in this order; `special` names its special tokens."""
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, special.get("unk_token")))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


class GivenRun:
    """Stand-in for a `CacheRun` that returns fixed results and records its inputs."""

    def __init__(self, *, logits: torch.Tensor | None = None, text: str = "") -> None:
        self.logits, self.text = logits, text
        self.fed: list[int] = []
        self.most, self.ends = 0, [0]
        self.prefill = SimpleNamespace(model=SimpleNamespace(generation_config=None))

    def forced(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        self.fed = tokens.tolist()
        assert self.logits is not None
        return self.logits[: len(tokens) + 1]

    def generate(self, most: int, ends: list[int], _: int) -> torch.Tensor:
        self.most, self.ends = most, ends
        return torch.tensor([ord(character) for character in self.text])
