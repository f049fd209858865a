"""Parts of a comparison's table: columns, rows, points of a plot, failures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcache_compress.eval.runner.cells import Cell


@dataclass(frozen=True)
class Column:
    """A benchmark: its name, kind, main score and direction; `peak` is the largest score."""

    name: str
    kind: str
    main_score: str
    higher_is_better: bool
    peak: float

    @property
    def digits(self) -> int:
        """Decimals of its scores: KL needs four, shares three, points out of 100 two."""
        if not self.higher_is_better:
            return 4
        return 3 if self.peak < 10 else 2

    @property
    def in_nats(self) -> bool:
        """True if the main score is a log-probability, whose differences are meaningful as they are."""
        return self.main_score.endswith("logprob")

    def text(self, score: float) -> str:
        return f"{score:.{self.digits}f}"

    def difference_text(self, difference: float) -> str:
        """Format a difference with its sign; ±0 if it rounds to zero."""
        rounded = round(difference, self.digits)
        return f"{rounded:+.{self.digits}f}".replace("-", "−") if rounded else "±0"

    def error_text(self, error: float) -> str:
        """Format a standard error as scores are, with more decimals where it would round to zero."""
        return self.text(error) if round(error, self.digits) or not error else f"{error:.1g}"

    @property
    def label(self) -> str:
        """The main score in words."""
        return "KL" if self.main_score == "kl" else self.main_score.replace("_", " ")

    @property
    def heading(self) -> str:
        return f"{self.name}: {self.label} {'↑' if self.higher_is_better else '↓'}"


@dataclass(frozen=True)
class Row:
    """A cache.

    Attributes:
        number: of the row, from 1 on, by which plots know it.
        family: the cache's method, the peer's backend, or the beginning of its name.
        lossless: compresses nothing on purpose.
        packed_bits, all_bits: bits per compressed number and per number of the whole cache, in the benchmark
            `measured_in`: the leading one, or the first that the cache has finished; None without any.
        packed_tokens: least number of tokens that were stored compressed in any sample of any finished benchmark.
        cells: by benchmark.
    """

    number: int
    cache: str
    family: str
    lossless: bool
    packed_bits: float | None
    all_bits: float | None
    measured_in: str | None
    packed_tokens: int | None
    cells: dict[str, Cell]

    @property
    def peer(self) -> bool:
        """True for caches of Transformers that compress."""
        return any(cell.cache["config"].get("class") == "QuantizedCache" for cell in self.cells.values())

    def score(self, column: Column) -> float | None:
        """Main score; None for a failed or missing cell, or a score that is not finite."""
        cell = self.cells.get(column.name)
        score = None if cell is None or cell.error is not None else cell.score
        return score if score is not None and math.isfinite(score) else None


@dataclass(frozen=True)
class Point:
    """A cache in a plot of bits against `value`, a score or its difference; `on_front` if none is better in both."""

    row: Row
    bits: float
    value: float
    on_front: bool = False


@dataclass(frozen=True)
class Failure:
    """An error and the caches that failed with it in one benchmark."""

    benchmark: str
    caches: list[str]
    message: str
