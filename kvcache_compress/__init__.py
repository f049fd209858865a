"""KV-cache compression for Hugging Face Transformers. Importing this package patches nothing.

Public names are imported when they are first used, because importing torch and Transformers takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .attention.interface import disable_fused_attention as disable_fused_attention
    from .attention.interface import enable_fused_attention as enable_fused_attention
    from .attention.position_hooks import register_position_hooks as register_position_hooks
    from .cache.by_method import CommVQCache as CommVQCache
    from .cache.by_method import KIVICache as KIVICache
    from .cache.by_method import PolarQuantCache as PolarQuantCache
    from .cache.by_method import QJLCache as QJLCache
    from .cache.by_method import SpectralCache as SpectralCache
    from .cache.by_method import TurboQuantCache as TurboQuantCache
    from .cache.compressed_cache import CompressedCache as CompressedCache
    from .config import CompressionConfig as CompressionConfig
    from .config import get_method as get_method
    from .config import load_config as load_config
    from .config import method_names as method_names
    from .config import preset_names as preset_names
    from .config import register_method as register_method
    from .serving.compress import compress as compress
    from .serving.prefix_store import PrefixStore as PrefixStore

_NAMES = {
    "attention.interface": ("disable_fused_attention", "enable_fused_attention"),
    "attention.position_hooks": ("register_position_hooks",),
    "cache.by_method": (
        "CommVQCache", "KIVICache", "PolarQuantCache", "QJLCache", "SpectralCache", "TurboQuantCache",
    ),
    "cache.compressed_cache": ("CompressedCache",),
    "config": ("CompressionConfig", "get_method", "load_config", "method_names", "preset_names", "register_method"),
    "serving.compress": ("compress",),
    "serving.prefix_store": ("PrefixStore",),
}  # fmt: skip
"""Public names by module."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return found
    try:  # a subpackage, such as `kvcache_compress.cache`
        return import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
