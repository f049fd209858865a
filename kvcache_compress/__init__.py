"""KV-cache compression for Hugging Face Transformers. Importing this package patches nothing."""

from . import methods as methods  # importing it registers them
from ._version import __version__ as __version__
from .attention.interface import disable_fused_attention, enable_fused_attention
from .attention.position_hooks import register_position_hooks
from .cache.by_method import CommVQCache, KIVICache, PolarQuantCache, QJLCache, SpectralCache, TurboQuantCache
from .cache.compress import compress
from .cache.compressed_cache import CompressedCache
from .config import CompressionConfig, load_config, preset_names
from .registry import get_method, method_names, register_method

__all__ = [
    "CommVQCache",
    "CompressedCache",
    "CompressionConfig",
    "KIVICache",
    "PolarQuantCache",
    "QJLCache",
    "SpectralCache",
    "TurboQuantCache",
    "compress",
    "disable_fused_attention",
    "enable_fused_attention",
    "get_method",
    "load_config",
    "method_names",
    "preset_names",
    "register_method",
    "register_position_hooks",
]
