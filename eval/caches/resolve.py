"""Names of caches on a command line or in a comparison's YAML file."""

from pathlib import Path

from kvcache_compress.config import load_config
from kvcache_compress.eval.provenance.results import without_folders
from kvcache_compress.validation import quoted

from .caches import CacheSpec, full_cache, preset_cache
from .peers import PEERS


def resolve_cache(name: str, *, codebooks: Path | None = None, statistics: Path | None = None) -> CacheSpec:
    """Resolve a cache's name.

    Args:
        name: `full`, a peer (`hqq-4`, `hqq-2`, `quanto-4`, `quanto-2`, `fp8`), a preset or a YAML file. Presets and
            files can be followed by the sizes of their dense windows: `turboquant-4bit@sinks=0,recent=0`.
        codebooks: CommVQ's file, if the config needs one.
        statistics: spectral's file, if the config needs one.

    Raises:
        ValueError: There is no such cache, or it does not have these options.
        ImportError: The peer's package is not installed.
    """
    if name == "full":
        return full_cache()
    if name in PEERS:
        return PEERS[name]()
    base, _, windows = name.partition("@")
    sizes: dict[str, int] = {}
    for option in windows.split(",") if windows else []:
        key, _, number = option.partition("=")
        if key not in ("sinks", "recent") or not number.isdecimal():
            raise ValueError(f"cache={quoted(name)}: what follows @ must be sinks=N or recent=N, of a preset or file")
        sizes[f"{key.removesuffix('s')}_tokens"] = int(number)
    try:
        config = load_config(base).changed(**sizes).with_files(codebooks=codebooks, statistics=statistics)
    except ValueError as error:
        known = f"full, {', '.join(PEERS)}, a preset or a YAML file"
        raise ValueError(f"cache={quoted(name)} must be one of {known}: {error}") from error
    return preset_cache(config, name=without_folders(name))
