"""Small comparison with figures that can be computed by hand: five caches, two benchmarks, a failure and a gap."""

from typing import Any

from kvcache_compress.eval.runner.table import Cell

CONFIGS: dict[str, dict[str, Any]] = {
    "full": {"class": "DynamicCache"},
    "hqq-4": {"class": "QuantizedCache", "backend": "hqq"},
    "tq-4": {"keys": {"method": "turboquant"}, "values": {"method": "turboquant"}, "backend": "auto"},
    "tq-2": {"keys": {"method": "none"}, "values": {"method": "turboquant"}, "backend": "auto"},
    "other-3": {},
}
MAIN = {"perplexity": ("kl", False), "needle": ("recall", True)}
# Packed bits, bits of the whole cache, KL, recall; None for a missing cell, text for one that failed.
FIGURES: dict[str, tuple[float, float, Any, Any]] = {
    "full": (16.0, 16.0, 0.0, 0.75),
    "hqq-4": (4.5, 4.5, 0.0112, "out of memory: tried 8 GiB"),
    "tq-4": (4.25, 8.0, 0.002, 0.75),
    "tq-2": (2.25, 6.0, 0.04, 0.5),
    "other-3": (2.5, 20.0, 0.01, None),
}


def cell(cache: str, kind: str, score: Any, *, bits: tuple[float, float] = (4.0, 5.0), **changes: Any) -> Cell:
    """A finished cell, or one that failed with `score` as its error."""
    main_score, higher_is_better = MAIN[kind]
    fields: dict[str, Any] = {
        "model": "org/model",
        "dtype": "float32",
        "benchmark": {
            "name": {"perplexity": "wiki", "needle": "a-needle"}[kind],
            "kind": kind,
            "options": {"step": 16, "file": None},
            "main_score": main_score,
            "higher_is_better": higher_is_better,
        },
        "cache": {"name": cache, "lossless": cache == "full", "config": CONFIGS.get(cache, {})},
        "seed": 0,
        "digest": "0123",
        "command": "kvcache-compress eval compare a.yaml",
        "commit": "abc123",
        "date": "2025-01-02T03:04:05+00:00",
        "versions": {"torch": "2.13.0", "hqq": None},
        "hardware": {"cpu": "A", "accelerator": None},
    }
    if isinstance(score, str):
        return Cell(**{**fields, "error": score, **changes})
    packed = 0 if cache == "full" else 900
    records = [
        {
            "id": f"{n},{depth}", "tokens": n, "total_bytes": int(bits[1] * n), "length": n, "depth": depth,
            "score": score,
        }
        for n in (1000, 2000)
        for depth in (0.0, 1.0)
    ]  # fmt: skip
    fields |= {
        "scores": {"other": 1.5, main_score: score},
        "samples": 4,
        "packed_tokens": {"least": packed, "mean": packed + 50, "most": packed + 100},
        "packed_bits": bits[0],
        "all_bits": bits[1],
        "total_bytes": bits[1] * 1500,
        "records": records if kind == "needle" else [{**records[0], "tokens": 1024}],
    }
    return Cell(**{**fields, **changes})


def comparison() -> list[Cell]:
    """All cells of `FIGURES`."""
    return [
        cell(cache, kind, score, bits=(packed, whole))
        for cache, (packed, whole, kl, recall) in FIGURES.items()
        for kind, score in (("perplexity", kl), ("needle", recall))
        if score is not None
    ]
