"""The name under which models take a cache, which Transformers 5.24 changed."""

from typing import Any

from kvcache_compress.modeling.decoder import cache_argument


def with_cache(cache: Any) -> dict[str, Any]:
    """Argument of a model, or of its `generate`, for a cache, by the name that this version of Transformers prefers."""
    return {cache_argument(): cache}
