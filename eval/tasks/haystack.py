"""Text in which a needle is hidden: the files of a folder, or simple sentences made from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import chain, cycle, islice
from os.path import isdir
from pathlib import Path

from kvcache_compress.files.text import read_text
from kvcache_compress.validation import quoted

_SENTENCE_END = re.compile(r"[.!?][\"')\]]*$")


def _phrases(text: str) -> list[str]:
    return [phrase.strip() for phrase in text.split("|")]


# No digits, and nothing about keys, recipes or secrets: only the needle answers the question.
_WHO = _phrases("""
    the baker | the old gardener | a tired traveller | my neighbour | the school teacher | a young sailor |
    the tall carpenter | our postman | the village doctor | a quiet painter | the train driver |
    her youngest cousin | the farmer's wife | a retired judge | the museum guard | the night nurse |
    his former tenant | a passing cyclist | the choir's conductor | the shop assistant | a stubborn fisherman |
    the clock maker | the new librarian | a cheerful plumber
""")
_DID = _phrases("""
    carried a basket of apples | repaired a broken chair | wrote a long letter | watered the tomatoes |
    painted the wooden fence | waited for the bus | counted the birds | polished a pair of boots |
    read the morning paper | told a story about the war | looked for a lost glove | folded the clean sheets |
    swept the autumn leaves | drew a map of the valley | fed the grey horse | hummed a slow melody |
    complained about the weather | bought a bag of flour | closed the heavy shutters | sharpened a pencil |
    asked for directions | lit a small fire | tuned an old violin | hung up a wet coat | sorted a box of buttons |
    tasted the vegetable soup | measured the kitchen floor | planted a row of beans | missed the last ferry |
    slept in the shade
""")
_WHERE = _phrases("""
    near the river | behind the church | at the market | in front of the station | beside the mill |
    under the chestnut tree | on the harbour wall | across the square | at the edge of the forest |
    in the back yard | next to the bakery | on the way to the hills | outside the town hall | by the garden gate |
    in the empty barn | at the end of the lane | above the workshop | along the canal | opposite the theatre |
    in the corner of the meadow
""")
_WHEN = _phrases("""
    before breakfast | on a rainy afternoon | late in the evening | while the bells were ringing |
    during the long winter | after the concert | as the fog was lifting | on the first warm day |
    when nobody was watching | shortly before noon | at the end of the harvest | until it grew dark |
    without saying a word | for most of the morning | in spite of the wind | because there was nothing else to do |
    with a great deal of patience | as everyone had expected
""")


def plain_sentences(seed: int | str) -> Iterator[str]:
    """Endless simple sentences drawn from a seed; none repeats before all 259,200 have come."""
    chance = random.Random(seed)
    told: set[tuple[str, ...]] = set()
    while True:
        if len(told) == len(_WHO) * len(_DID) * len(_WHERE) * len(_WHEN):
            told.clear()
        who, did, where, when = (chance.choice(words) for words in (_WHO, _DID, _WHERE, _WHEN))
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
