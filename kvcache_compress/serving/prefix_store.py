"""A folder of compressed prefixes: prompts that were read once are loaded instead of read again.

Entries are files in the formats of `files/`: pages of the engine, caches of `generate`, and the statistics of an engine
(a saved cache). Their names begin with a digest of what they depend on, so entries of another model, config or release
are never found, and go when room is needed. A file appears once it is whole and is checked when it is read; several
processes may share a folder.
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import threading
import time
import weakref
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
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGESTS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, str]] = weakref.WeakKeyDictionary()
_ENTRIES = (".cache", ".page", ".statistics")
_UNFINISHED_SECONDS = 3600
"""Age at which another writer's unfinished file counts as left behind."""
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
    """Digest of what a cache depends on: the model's weights, adapters and shape, the config, the release."""
    facts = model_facts(model.config.get_text_config(decoder=True)).model_dump(exclude={"name"})
    return digest_of(__version__, facts, str(model.dtype), compression.model_dump(mode="json"), _weights(model))


def _weights(model: PreTrainedModel) -> str:
    """Digest of a model's weights and of its adapters' state; weights are read again once they have changed."""
    versions = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]
    known = _DIGESTS.get(model)
    if known is None or known[0] != versions:
        sums = [
            int(p.detach().contiguous().view(_INTEGERS[p.element_size()]).sum(dtype=torch.int64))
            for p in model.parameters()
        ]
        known = _DIGESTS[model] = versions, digest_of(sums)
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    adapters = [[getattr(m, name, None) for name in names] for m in model.modules() if hasattr(m, "disable_adapters")]
    return digest_of(known[1], adapters)


def identity_of_codecs(codecs: Iterable[Codec]) -> str:
    """Digest of codecs' options and statistics, and of the files that they name."""
    parts: list[Any] = []
    for codec in codecs:
        options = codec.options.model_dump(mode="json")
        files = [Path(x) for x in options.values() if isinstance(x, str) and Path(x).is_file()]
        parts += [options, [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]]
        parts += [x.detach().float().cpu().numpy().tobytes() for _, x in sorted(codec.statistics.items())]
    return digest_of(*parts)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (x.dtype, x.shape) for name, x in tensors.items()}


class PrefixStore:
    """A folder of compressed prefixes, for `compress(model, ..., prefix_store=)` and of its own.

    If the folder cannot be read or written, a warning is logged and prompts are computed as without a store. Other
    files in the folder are left alone.

    Args:
        folder: where entries are kept; made if missing.
        max_bytes: most bytes of all entries, or a size such as `"10GiB"`; those used longest ago go first.
    """

    def __init__(self, folder: str | Path, max_bytes: int | str = "10GiB") -> None:
        self.folder = Path(folder).expanduser()
        self.max_bytes = max_bytes if isinstance(max_bytes, int) else parse_size(max_bytes, "max_bytes")
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(_WAITING)
        self._writer: threading.Thread | None = None
        self._size = float("inf")
        """Bytes of all entries, as far as this process knows; infinite before they were counted."""
        self._kept: set[Path] = set()
        """Entries that are in use and stay."""

    # Caches of `generate`

    def put(self, model: PreTrainedModel, cache: CompressedCache, tokens: Sequence[int]) -> None:
        """Store a cache of one sequence, which holds `tokens` `[T]`."""
        if len(tokens) < LEAST_SHARED:
            return
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
            except OSError:  # another process may remove it meanwhile
                continue
            except SafetensorError as error:
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
            try:
                cache.crop(-more)
            except ValueError:  # layers of other kinds, such as sliding ones, keep too little
                return None
        return cache

    # Statistics and pages of the engine

    def statistics(
        self, model: PreTrainedModel, compression: CompressionConfig, text: torch.Tensor,
        make: Callable[[], CompressedCache],
    ) -> CompressedCache:  # fmt: skip
        """The cache that `make` fills with `text`, the same at every start."""
        name = f"{identity(model, compression)}-{digest_of(text.numpy().tobytes())}.statistics"
        path = self.folder / name
        self._kept.add(path)
        found = self._read(path, lambda: CompressedCache.load(path, model.config, device=model.device, any_model=True))
        if found is None:
            found = make()
            self._write(path, lambda: save_cache(found, path))
        return found

    def has_page(self, name: str) -> bool:
        """Return True if a page of this name is stored."""
        return self._page(name).exists()

    def page(
        self, name: str, tokens: Sequence[int], like: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor] | None:
        """Load a page with these tokens, and with tensors of the same names, dtypes and shapes as `like`, or None."""
        path = self._page(name)

        def checked() -> dict[str, torch.Tensor]:
            tensors = read_model_file(str(path), f"page {path.name}", _PAGE, _VERSION)[1]
            stored = tensors.pop("tokens").tolist()
            if stored != list(tokens) or _shapes(tensors) != _shapes(like):
                raise ValueError("holds other tokens or tensors")
            return tensors

        return self._read(path, checked)

    def put_page(
        self, names: Sequence[str], facts: ModelFacts, tokens: Sequence[int], page: Mapping[str, torch.Tensor]
    ) -> None:
        """Store a page (CPU tensors) soon, unless too many wait.

        `names` are those of the pages before it in its text, and its own.
        """
        path = self._page(names[-1])
        if path.exists():
            return
        tensors = {"tokens": torch.tensor(list(tokens)), **page}

        def write() -> None:
            self._write(path, lambda: write_model_file(path, _PAGE, _VERSION, facts, tensors))
            self.touch(names)

        if self._writer is None:
            self._writer = threading.Thread(target=self._run, name="prefix store", daemon=True)
            self._writer.start()
        try:
            self._jobs.put_nowait(write)
        except queue.Full:
            logger.info("a page is not stored: %d others wait", _WAITING)

    def touch(self, names: Sequence[str]) -> None:
        """Note the use of a text's pages; the first, without which the others are not found, last."""
        for name in reversed(names):
            with contextlib.suppress(OSError):
                os.utime(self._page(name))

    def wait(self, seconds: float = 60) -> None:
        """Wait until all pages are written, or for so long."""
        end = time.monotonic() + seconds
        while self._jobs.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)

    def _page(self, name: str) -> Path:
        return self.folder / f"{name}.page"

    def _run(self) -> None:
        while True:
            self._jobs.get()()
            self._jobs.task_done()

    # Files

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        """Write an entry, and remove others until all fit."""
        try:
            if not path.exists():
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write()
                self._size += path.stat().st_size
            if self._size > self.max_bytes:
                self._trim()
        except (OSError, ValueError) as error:  # ValueError: a cache that cannot be saved
            logger.warning("prefix store %s: %s", self.folder, error)

    def _trim(self) -> None:
        """Count the entries, and remove those used longest ago until the others fit."""
        entries, self._size = [], 0.0
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process may remove it meanwhile
                stat = path.stat()
                unfinished = path.suffix == ".unfinished"
                if not unfinished and path.suffix not in _ENTRIES:
                    continue
                self._size += stat.st_size
                if not unfinished:
                    entries.append((stat.st_mtime_ns, stat.st_size, path))
                elif time.time() - stat.st_mtime > _UNFINISHED_SECONDS:
                    entries.append((0, stat.st_size, path))
        for _, size, path in sorted(entries):
            if self._size > self.max_bytes and path not in self._kept:
                path.unlink(missing_ok=True)
                self._size -= size

    def _read(self, path: Path, read: Callable[[], Any]) -> Any:
        """Read an entry and note its use; None if there is none, or if it is damaged, which removes it."""
        if not path.exists():
            return None
        try:
            found = read()
        except OSError as error:
            logger.warning("prefix store: %s cannot be read: %s", path.name, error)
            return None
        except (ValueError, LookupError) as error:
            self._drop(path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return found

    def _drop(self, path: Path, error: Exception) -> None:
        logger.warning("prefix store: %s is removed: %s", path.name, error)
        try:
            path.unlink(missing_ok=True)
        except OSError as still:
            logger.warning("prefix store: %s", still)
