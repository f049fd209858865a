"""Read from the Hugging Face hub or its local cache, failing fast if the hub is unreachable."""

import logging
from collections.abc import Callable
from typing import Literal, TypeVar

logger = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_Loaded = TypeVar("_Loaded")


def from_cache_or_hub(repo_id: str, load: Callable[[bool], _Loaded]) -> _Loaded:
    """Load something of a model from the hub's local cache (`load(True)`), else from the hub (`load(False)`)."""
    try:
        return load(True)
    except OSError:
        logger.debug("%s is not in the hub's local cache", repo_id)
    check_hub(repo_id)
    return load(False)


def check_hub(repo_id: str, kind: Literal["model", "dataset"] = "model") -> None:
    """Raise `OSError` if the hub is unreachable or has no such repository.

    Sends one request without retries; loading would retry each file five times, half a minute each.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        (api.model_info if kind == "model" else api.dataset_info)(repo_id, timeout=_TIMEOUT_S)
    except HfHubHTTPError as error:
        raise OSError(f"the hub answered {error.response.status_code} ({type(error).__name__})") from error
    except Exception as error:  # the hub client changes its HTTP library, hence its exceptions, between versions
        raise OSError(f"the hub is out of reach ({' '.join(str(error).split()) or type(error).__name__})") from error
