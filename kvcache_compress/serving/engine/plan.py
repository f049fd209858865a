"""Where the memory of continuous batching goes: slots of dense tokens, and blocks of pages."""

import logging
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import ContinuousBatchingConfig, PreTrainedConfig

from kvcache_compress.codecs.base import SIDES
from kvcache_compress.storage.paged import PagedStorage
from kvcache_compress.validation import parse_size

from ..prefix_store import PrefixStore, digest_of, identity_of_codecs
from .statistics import ModelCodecs

logger = logging.getLogger(__name__)
PAGE_TOKENS = 64
STEP_TOKENS = 4096
"""Most tokens of a step, unless `max_batch_tokens` says otherwise."""
EXPECTED_TOKENS = 1024
"""Tokens of a request for which slots and pages are balanced, unless their lengths are known."""
PREFIX_SHARE = 4
"""Slots for each shared prefix whose sinks are kept."""
_ALIGNMENT = 128
"""Bytes at a multiple of which every field of a block begins, as vector loads and Transformers' sectors need."""


def bytes_of(memory: int | str, device: torch.device | None = None) -> int:
    """Bytes of a size such as `"8GiB"`, or of a share of what is free on `device`, such as `"50%"` (0 without one).

    Raises:
        ValueError: it is neither.
    """
    if isinstance(memory, int) and memory > 0:
        return memory
    share = re.fullmatch(r"([1-9]\d?)%", str(memory))
    if share is None:
        return parse_size(str(memory), "memory")
    if device is None:
        return 0
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        assert found is not None
        free = 1024 * int(found[1])
    return int(share[1]) * free // 100


@dataclass
class Plan:
    """Sizes of the pools of a model's continuous batching.

    Args:
        config: the decoder's config.
        codecs: codecs of its layers.
        batching: Transformers' options: `max_requests_per_batch`, `max_batch_tokens` and `num_blocks` are used.
        memory: bytes for slots and pages.
        most_tokens: tokens of the longest request, if known; requests are expected to have half as many.
        dtype, device: of the dense tokens.
        fused: False to decode pages before attention.
        store: pages are kept there too, under names that begin with `identity`.
    """

    config: PreTrainedConfig
    codecs: ModelCodecs
    batching: ContinuousBatchingConfig
    memory: int
    most_tokens: int | None
    dtype: torch.dtype
    device: torch.device
    fused: bool = True
    store: PrefixStore | None = None
    identity: str = ""
    slots: int = field(init=False)
    """Requests that can run at once."""
    prefixes: int = field(init=False)
    """Shared prefixes whose sinks are kept."""

    def __post_init__(self) -> None:
        windows = self.windows = self.codecs.windows
        self.page = math.lcm(PAGE_TOKENS, windows.group)
        self.step_tokens = self.batching.max_batch_tokens or STEP_TOKENS
        self._offsets, self.block_bytes = self._layout()
        dense = 0
        for layer in self.codecs.layers.values():
            dims = sum(codec.context.head_dim for codec in layer.codecs.values())
            dense += layer.heads * dims * self.dtype.itemsize
        self._slot_bytes = dense * (windows.sinks + windows.recent + windows.flush)
        self._sink_bytes = dense * windows.sinks
        expected = self.most_tokens // 2 if self.most_tokens else EXPECTED_TOKENS
        pages = max(1, self.blocks_of(expected)) * self.block_bytes
        sharing = self.batching.allow_block_sharing
        each = self._slot_bytes + pages + sharing * self._sink_bytes // PREFIX_SHARE
        self.slots = max(1, min(self.batching.max_requests_per_batch or 1, self.memory // each))
        self.prefixes = -(-self.slots // PREFIX_SHARE) if sharing else 0
        if self.store is not None:
            codecs = (codec for layer in self.codecs.layers.values() for codec in layer.codecs.values())
            self.identity = digest_of(self.identity, identity_of_codecs(codecs), self.page, vars(windows))

    def _layout(self) -> tuple[dict[tuple[int, str], list[int]], int]:
        """Byte at which each field of a block begins, by layer and side, and the size of a block."""
        offsets: dict[tuple[int, str], list[int]] = {}
        at = 0
        for index, layer in self.codecs.layers.items():
            for side in SIDES:
                offsets[index, side] = starts = []
                for stored in layer.codecs[side].fields:
                    starts.append(at)
                    rows = layer.heads * (self.page // stored.tokens)
                    size = rows * math.prod(stored.shape) * stored.dtype.itemsize
                    at += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offsets, at

    def share_sectors(self, size: int) -> None:
        """Enlarge blocks so that a sector holds whole numbers of them and of sliding layers' blocks of `size` bytes."""
        if size <= self.block_bytes:
            self.block_bytes = -(-self.block_bytes // size) * size
            return
        parts = size // self.block_bytes
        while size % (parts * _ALIGNMENT):
            parts -= 1
        self.block_bytes = size // parts

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a request of this many tokens needs."""
        return -(-max(0, tokens - self.windows.sinks - self.windows.recent) // self.page)

    def sectors(self, size: int) -> int:
        """Sectors of `size` bytes that fit beside the slots.

        Raises:
            ValueError: not even one fits.
        """
        if self.batching.num_blocks is not None:
            return -(-self.batching.num_blocks * self.batching.page_size * self.block_bytes // (self.page * size))
        left = self.memory - self.slots * self._slot_bytes - self.prefixes * self._sink_bytes
        left -= 2 * size  # Transformers reserves two sectors
        if left < size:
            raise ValueError(
                f"memory={self.memory}: too little for one request and one block of {self.page} tokens, which take "
                f"{self._slot_bytes + size} bytes"
            )
        logger.info(
            "%.0f MiB hold %d packed tokens in pages of %d, and %d requests at once", self.memory / 2**20,
            left // self.block_bytes * self.page, self.page, self.slots,
        )  # fmt: skip
        return left // size

    def check_request(self, prompt: int, new: int | None) -> None:
        """Raise `ValueError` if a request can never run, whatever the memory."""
        if new is None or new < 1:
            raise ValueError(f"max_new_tokens={new}: must be at least 1, because a request's room is reserved at once")
        if prompt < 1:
            raise ValueError("input_ids=[]: a request needs at least one token")
        tracked = any(layer.track for layer in self.codecs.layers.values())
        if tracked and prompt + new > (most := self.config.max_position_embeddings):
            raise ValueError(f"{prompt} + {new} tokens are more than the model's max_position_embeddings={most}")

    def storages(self, memory: torch.Tensor) -> dict[int, PagedStorage]:
        """Storages of all layers over the blocks in `memory`, uint8 `[blocks, block_bytes]`."""
        return {index: self._storage(index, memory) for index in self.codecs.layers}

    def _storage(self, index: int, memory: torch.Tensor) -> PagedStorage:
        layer, windows = self.codecs.layers[index], self.windows
        pools, sinks, tails = {}, {}, {}
        for side, codec in layer.codecs.items():
            fields = []
            for at, stored in zip(self._offsets[index, side], codec.fields, strict=True):
                shape = (len(memory), layer.heads, self.page // stored.tokens, *stored.shape)
                inner = torch.empty(shape[1:], device="meta").stride()
                flat = memory.flatten().view(stored.dtype)
                size = stored.dtype.itemsize
                fields.append(flat.as_strided(shape, (self.block_bytes // size, *inner), at // size))
            pools[side] = tuple(fields)
            shape = (self.slots + self.prefixes, layer.heads, windows.sinks, codec.context.head_dim)
            sinks[side] = torch.zeros(shape, dtype=self.dtype, device=self.device)
            shape = (self.slots, layer.heads, windows.recent + windows.flush, codec.context.head_dim)
            tails[side] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if (track := layer.track) is not None:
            most = min(self.config.max_position_embeddings, len(memory) * self.page + windows.sinks + windows.flush)
            if most > track.tokens:
                like = torch.empty(1, 1, most - track.tokens, 1, device=self.device)
                track.extend(track.tokens, like)
        return PagedStorage(layer.codecs, pools, sinks, tails, windows, self.page, layer.backend, track, self.fused)
