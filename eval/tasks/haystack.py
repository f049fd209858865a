"""Text in which a needle is hidden: the files of a folder, or simple sentences made from a seed."""

import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain, cycle, islice
from math import prod
from os.path import isdir
from pathlib import Path

from kvcache_compress.files.text import read_text, read_yaml
from kvcache_compress.validation import quoted

_SENTENCE_END = re.compile(r"[.!?][\"')\]]*$")


@cache
def _parts() -> list[list[str]]:
    """Parts of sentences: who, did what, where, when."""
    return list(read_yaml(Path(__file__).with_name("data") / "sentences.yaml").values())


def plain_sentences(seed: int | str) -> Iterator[str]:
    """Endless simple sentences drawn from a seed; none repeats before all 259,200 have come."""
    chance, parts = random.Random(seed), _parts()
    told: set[tuple[str, ...]] = set()
    while True:
        if len(told) == prod(map(len, parts)):
            told.clear()
        who, did, where, when = (chance.choice(words) for words in parts)
        if (who, did, where, when) in told:
            continue
        told.add((who, did, where, when))
        sentence = f"{when}, {who} {did} {where}." if chance.random() < 0.3 else f"{who} {did} {where} {when}."
        yield sentence[0].upper() + sentence[1:]


def words_of(text: str) -> list[str]:
    """Words with the white space before them, so that `"".join` restores the text."""
    return re.findall(r"\s*\S+", text)


def haystack_words(folder: Path | None, count: int, seed: int | str) -> list[str]:
    """The first `count` words of a haystack, each with the white space before it.

    Args:
        folder: folder of .txt files. They are read in the order of their names, from a sentence that the seed chooses,
            and repeated if they are too short. None for made sentences.
        count: number of words.
        seed: seed of the start, or of the made sentences.

    Raises:
        ValueError: The folder is missing, or has no text.
    """
    if folder is None:
        return list(islice(chain.from_iterable(words_of(f" {text}") for text in plain_sentences(seed)), count))
    if not isdir(folder):
        raise ValueError(f"haystack={quoted(str(folder))}: no such folder")
    texts = [read_text(path).strip() for path in sorted(folder.glob("*.txt"))]
    words = words_of("".join(f"\n{text}" for text in texts if text))
    if not words:
        raise ValueError(f"haystack={quoted(str(folder))}: the folder has no .txt file with text")
    start = random.Random(seed).choice(sentence_starts(words)[:-1])
    return list(islice(cycle(words[start:] + words[:start]), count))


def sentence_starts(words: list[str]) -> list[int]:
    """Indices of the words that start a sentence, with 0 and `len(words)`."""
    return [0, *(i for i in range(1, len(words)) if _SENTENCE_END.search(words[i - 1])), len(words)]


def hide(needle: str, words: list[str], depth: float) -> str:
    """Insert a sentence into a text, between two others.

    Args:
        needle: the sentence.
        words: the text, as from `haystack_words`. If it ends within a sentence, a full stop closes it.
        depth: 0 for before the first sentence, 1 for after the last. The nearest boundary is used.
    """
    words = list(words)
    if words and not _SENTENCE_END.search(words[-1]):
        words[-1] = words[-1].rstrip(",;:–-") + "."
    place = min(sentence_starts(words), key=lambda start: abs(start - depth * len(words)))
    after = words[place:]
    if after and not after[0][0].isspace():
        after[0] = f" {after[0]}"
    return "".join([*words[:place], f" {needle}", *after]).lstrip()
