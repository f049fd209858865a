"""One method, one file. Importing this package registers them all."""

from .kivi import KIVICache
from .none import DenseCodec
from .turboquant import TurboQuantCache

__all__ = ["DenseCodec", "KIVICache", "TurboQuantCache"]
