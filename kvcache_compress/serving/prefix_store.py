"""A folder of compressed prefixes: prompts that were read once are loaded instead of read again.

Entries are files in the formats of `files/`: pages of the engine, caches of `generate`, and the statistics of an engine
(a saved cache). Their names begin with a digest of what they depend on, so entries of another model, config or release
are never found, and go when room is needed. A file appears once it is whole and is checked when it is read; several
processes may share a folder.
"""

import hashlib
import json
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from kvcache_compress import __version__
from kvcache_compress.cache.cache_file import save_cache
from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.codecs.base import Codec
from kvcache_compress.config import CompressionConfig
from kvcache_compress.files.model_file import ModelFacts, read_model_file, write_model_file
from kvcache_compress.modeling.facts import model_facts
from kvcache_compress.validation import parse_size

logger = logging.getLogger(__name__)
LEAST_SHARED = 64
"""Fewest tokens for which `generate` loads a cache."""
_WAITING = 64
"""Pages that may wait to be written; more are not stored."""
_SAMPLE = 64
"""Numbers of each weight that tell models apart."""
_PAGE = "page"
_VERSION = 1


def digest_of(*parts: Any) -> str:
    """Digest of JSON values and bytes, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=str).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def identity(model: PreTrainedModel, compression: CompressionConfig) -> str:
    """Digest of what a cache depends on: the model and some of its weights, the config, the release."""
    weights = (p.detach().flatten()[:_SAMPLE].float().cpu().numpy().tobytes() for p in model.parameters())
    facts = model_facts(model.config.get_text_config(decoder=True)).model_dump(exclude={"name"})
    return digest_of(__version__, facts, str(model.dtype), compression.model_dump(mode="json"), *weights)


def identity_of_codecs(codecs: Iterable[Codec]) -> str:
    """Digest of codecs' options and statistics, and of the files that they name."""
    parts: list[Any] = []
    for codec in codecs:
        options = codec.options.model_dump(mode="json")
        files = [Path(x) for x in options.values() if isinstance(x, str) and Path(x).is_file()]
        parts += [options, [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]]
        parts += [x.detach().float().cpu().numpy().tobytes() for _, x in sorted(codec.statistics.items())]
    return digest_of(*parts)


class PrefixStore:
    """A folder of compressed prefixes, for `compress(model, ..., prefix_store=)` and of its own.

    A folder that cannot be read or written costs the hits, and warns.

    Args:
        folder: where entries are kept; made if missing.
        max_bytes: most bytes of all entries, or a size such as `"10GiB"`; those used longest ago go first.
    """

    def __init__(self, folder: str | Path, max_bytes: int | str = "10GiB") -> None:
        self.folder = Path(folder).expanduser()
        self.max_bytes = max_bytes if isinstance(max_bytes, int) else parse_size(max_bytes, "max_bytes")
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(_WAITING)
        self._writer: threading.Thread | None = None

    # Caches of `generate`

    def put(self, model: PreTrainedModel, cache: CompressedCache, tokens: Sequence[int]) -> None:
        """Store a cache of one sequence, which holds `tokens` `[T]`."""
        ids = torch.tensor(list(tokens))
        path = self.folder / f"{identity(model, cache.compression)}-{digest_of(ids.numpy().tobytes())}.cache"
        self._write(path, lambda: save_cache(cache, path, ids))

    def get(
        self, model: PreTrainedModel, compression: CompressionConfig, tokens: Sequence[int]
    ) -> CompressedCache | None:
        """Load the cache that shares the longest prefix with `tokens` `[T]`, cropped to it, or None.

        At least one token is left to be fed.
        """
        ids, best, longest = torch.tensor(list(tokens)), None, LEAST_SHARED - 1
        for path in self.folder.glob(f"{identity(model, compression)}-*.cache"):
            try:
                with safe_open(path, framework="pt") as file:
                    stored = file.get_tensor("tokens")
            except (SafetensorError, OSError) as error:
                self._drop(path, error)
                continue
            count = min(len(stored), len(ids) - 1)
            shared = int((stored[:count] == ids[:count]).cumprod(0).sum())
            if shared > longest:
                best, longest = path, shared
        if best is None:
            return None
        cache = self._read(best, lambda: CompressedCache.load(best, model.config, device=model.device, any_model=True))
        if cache is not None and (more := int(cache.get_seq_length()) - longest):
            cache.crop(-more)
        return cache

    # Statistics and pages of the engine

    def statistics(
        self, model: PreTrainedModel, compression: CompressionConfig, text: torch.Tensor,
        make: Callable[[], CompressedCache],
    ) -> CompressedCache:  # fmt: skip
        """The cache that `make` fills with `text`, the same at every start."""
        name = f"{identity(model, compression)}-{digest_of(text.numpy().tobytes())}.statistics"
        path = self.folder / name
        found = self._read(path, lambda: CompressedCache.load(path, model.config, device=model.device, any_model=True))
        if found is None:
            found = make()
            self._write(path, lambda: save_cache(found, path))
        return found

    def page(self, name: str, tokens: Sequence[int]) -> dict[str, torch.Tensor] | None:
        """Load a page with these tokens, or None."""
        path = self.folder / f"{name}.page"
        found = self._read(path, lambda: read_model_file(str(path), f"page {path.name}", _PAGE, _VERSION)[1])
        if found is not None and found.pop("tokens").tolist() != list(tokens):
            return None
        return found

    def put_page(self, name: str, facts: ModelFacts, tokens: Sequence[int], page: Mapping[str, torch.Tensor]) -> None:
        """Store a page (CPU tensors) soon, unless too many wait."""
        path = self.folder / f"{name}.page"
        if path.exists():
            return
        tensors = {"tokens": torch.tensor(list(tokens)), **page}
        if self._writer is None:
            self._writer = threading.Thread(target=self._run, name="prefix store", daemon=True)
            self._writer.start()
        job = lambda: self._write(path, lambda: write_model_file(path, _PAGE, _VERSION, facts, tensors))  # noqa: E731
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            logger.info("a page is not stored: %d others wait", _WAITING)

    def wait(self) -> None:
        """Return once all pages are written."""
        self._jobs.join()

    def _run(self) -> None:
        while True:
            self._jobs.get()()
            self._jobs.task_done()

    # Files

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        """Write an entry, and remove others until all fit."""
        try:
            if not path.exists():
                write()
            entries = sorted((entry.stat().st_mtime_ns, entry.stat().st_size, entry) for entry in self.folder.iterdir())
            excess = sum(size for _, size, _ in entries) - self.max_bytes
            for _, size, entry in entries:
                if excess > 0:
                    entry.unlink(missing_ok=True)
                    excess -= size
        except (OSError, ValueError) as error:  # ValueError: a cache that cannot be saved
            logger.warning("prefix store %s: %s", self.folder, error)

    def _read(self, path: Path, read: Callable[[], Any]) -> Any:
        """Read an entry and note its use; None if there is none, or if it is damaged, which removes it."""
        if not path.exists():
            return None
        try:
            found = read()
            path.touch()
        except (OSError, ValueError, LookupError) as error:
            self._drop(path, error)
            return None
        return found

    def _drop(self, path: Path, error: Exception) -> None:
        logger.warning("prefix store: %s is removed: %s", path.name, error)
        try:
            path.unlink(missing_ok=True)
        except OSError as still:
            logger.warning("prefix store: %s", still)
