"""Names of caches on a command line or in a comparison's YAML file."""

import dataclasses
from pathlib import Path

from kvcache_compress.config import load_config
from kvcache_compress.eval.provenance.results import without_folders
from kvcache_compress.validation import quoted

from .caches import CacheSpec, full_cache, preset_cache
from .peers import PEERS


def resolve_cache(name: str, *, codebooks: Path | None = None, statistics: Path | None = None) -> CacheSpec:
    """Resolve a cache's name.

    Args:
        name: `full`, a peer (`hqq-4`, `hqq-2`, `quanto-4`, `quanto-2`, `fp8`), a preset or a YAML file. hqq and quanto
            can be followed by their residual length: `hqq-4@residual=64`; presets and files by the sizes of their
            dense windows: `turboquant-4bit@sinks=0,recent=0`.
        codebooks: CommVQ's file, if the config needs one.
        statistics: spectral's file, if the config needs one.

    Raises:
        ValueError: There is no such cache, or it does not have these options.
        ImportError: The peer's package is not installed.
    """
    base = name.partition("@")[0]
    if base == "full" or base in PEERS:
        residual = _options(name, ("residual",) if base.startswith(("hqq", "quanto")) else ())
        if base == "full":
            return full_cache()
        spec = PEERS[base](residual_length=residual["residual"]) if residual else PEERS[base]()
        return dataclasses.replace(spec, name=name)
    sizes = {f"{key.removesuffix('s')}_tokens": number for key, number in _options(name, ("sinks", "recent")).items()}
    try:
        config = load_config(base).changed(**sizes).with_files(codebooks=codebooks, statistics=statistics)
    except ValueError as error:
        known = f"full, {', '.join(PEERS)}, a preset or a YAML file"
        raise ValueError(f"cache={quoted(name)} must be one of {known}: {error}") from error
    return preset_cache(config, name=without_folders(name))


def _options(name: str, known: tuple[str, ...]) -> dict[str, int]:
    """The options after a name's @."""
    options: dict[str, int] = {}
    suffix = name.partition("@")[2]
    for option in suffix.split(",") if suffix else []:
        key, _, number = option.partition("=")
        if key not in known or not number.isdecimal():
            forms = f"must be {' or '.join(f'{key}=N' for key in known)}" if known else "has no meaning for this cache"
            raise ValueError(f"cache={quoted(name)}: what follows @ {forms}")
        options[key] = int(number)
    return options
