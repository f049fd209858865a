"""TurboQuant (Zandieh et al., arXiv 2504.19874)."""

from . import codec as codec
