"""Names of caches on a command line or in a comparison's YAML."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvcache_compress.eval.provenance.identity import without_folders

from .caches import CacheSpec, full_cache, preset_cache
from .peers import PEERS


def resolve_cache(
    name: str, *, sink_tokens: int | None = None, recent_tokens: int | None = None, **files: Path | None
) -> CacheSpec:
    """Resolve a cache's name to a spec.

    Args:
        name: `full`, a peer (`hqq-4`, `hqq-2`, `quanto-4`, `quanto-2`, `fp8`), or anything that `load_config` takes.
            Presets can be followed by sizes of their dense windows, hqq and quanto by their residual length:
            `turboquant-4bit@sinks=0,recent=0`, `hqq-4@residual=64`.
        sink_tokens: for presets named without `sinks`.
        recent_tokens: for presets named without `recent`.
        files: `codebooks` and `statistics`, for presets that were calibrated.

    Raises:
        ValueError: no such cache, or options that it does not have.
        ImportError: the peer's package is not installed.
    """
    base, _, suffix = name.partition("@")
    if base == "full" or base in PEERS:
        allowed = ["residual"] if base.startswith(("hqq", "quanto")) else []
    else:
        allowed = ["sinks", "recent"]
    options: dict[str, int] = {}
    for option in suffix.split(",") if suffix else []:
        key, _, number = option.partition("=")
        if key not in allowed or not number.isdecimal():
            forms = " and ".join(f"{key}=N" for key in allowed) or "nothing"
            raise ValueError(f"cache={name!r}: allowed after @ is {forms}")
        options[key] = int(number)
    if base == "full":
        return full_cache()
    if base in PEERS:
        spec = PEERS[base](residual_length=options["residual"]) if options else PEERS[base]()
        return dataclasses.replace(spec, name=name)
    sinks, recent = options.get("sinks", sink_tokens), options.get("recent", recent_tokens)
    try:
        label = without_folders(name)
        return preset_cache(base, sink_tokens=sinks, recent_tokens=recent, name=label, **files)
    except ValueError as error:
        raise ValueError(f"cache={name!r}: allowed full, {', '.join(PEERS)}, or a preset: {error}") from error
