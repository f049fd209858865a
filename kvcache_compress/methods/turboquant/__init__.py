"""TurboQuant (Zandieh et al., arXiv 2504.19874)."""

from . import codec

__all__ = ["codec"]
