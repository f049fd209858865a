"""KV-cache compression for Hugging Face Transformers. Importing this package patches nothing."""

from .attention import disable_fused_attention, enable_fused_attention
from .cache import CompressedCache
from .compression import compress
from .config import CompressionConfig, load_config, preset_names
from .methods.commvq import CommVQCache
from .methods.kivi import KIVICache
from .methods.polarquant import PolarQuantCache
from .methods.qjl import QJLCache
from .methods.turboquant import TurboQuantCache
from .positions import hand_over_positions
from .registry import get_method, method_names, register_method

__all__ = [
    "CommVQCache",
    "CompressedCache",
    "CompressionConfig",
    "KIVICache",
    "PolarQuantCache",
    "QJLCache",
    "TurboQuantCache",
    "compress",
    "disable_fused_attention",
    "enable_fused_attention",
    "get_method",
    "hand_over_positions",
    "load_config",
    "method_names",
    "preset_names",
    "register_method",
]
__version__ = "0.1.0"
