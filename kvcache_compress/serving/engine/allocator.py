"""Blocks of compressed pages and slots of dense tokens, which requests of continuous batching get and share."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from kvcache_compress.modeling.facts import model_facts
from kvcache_compress.storage.paged import PagedStorage, Request

from .plan import Plan

MANY = 1 << 40
"""Blocks that no pool has: how an allocator says that a request must wait."""


class Allocator(FullAttentionCacheAllocator):
    """Blocks of compressed pages, each with the pages of all full-attention layers, and slots of dense tokens."""

    supports_block_table = False

    def __init__(
        self, plan: Plan, index: int, layer_indices: list[int], allow_block_sharing: bool, **unused: Any
    ) -> None:
        self.plan, windows = plan, plan.windows
        self._before_cache_tensor_init(index, layer_indices, plan.page, plan.block_bytes, allow_block_sharing)
        self.pages_per_block, self.bytes_per_block = 1, plan.block_bytes
        self.windows, self.requests, self.free_slots = windows, dict[str, Request](), list(range(self.plan.slots))
        self.prefix_sinks: dict[int, tuple[int, int]] = {}
        """Row of the sinks that belong to a shared first block, and the block's hash."""
        self.stream: Any = None

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any
    ) -> None:
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.storages: dict[int, PagedStorage] = self.plan.storages(self._copy_view)

    # Requests

    def _compute_blocks_needed(self, allocated_blocks: int, past_length: int, query_length: int) -> int:
        return max(0, self.plan.blocks_of(past_length + query_length) - allocated_blocks)

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        if request_id not in self.requests and not self.free_slots:
            return MANY
        return super().needs_new_blocks(request_id, past_length, query_length)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        super().allocate_cache_to_request(request_id, past_length, query_length)
        if request_id not in self.requests:
            self._add(request_id)

    def _add(self, request_id: str, tokens: int = 0, packed: int = 0) -> Request:
        found = Request(self.free_slots.pop(), self.block_table[request_id], tokens, packed)
        self.requests[request_id] = found
        return found

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.free_slots.append(request.slot)
        super().free_blocks(request_id, no_cache)

    # Shared prefixes and forks

    def _hashes(self, tokens: list[int]) -> Iterator[int]:
        """Hash of every whole page of a text, with all tokens before its end."""
        digest, start = hashlib.blake2b(digest_size=16), 0
        for stop in range(self.windows.sinks + self.plan.page, len(tokens) + 1, self.plan.page):
            digest.update(torch.tensor(tokens[start:stop]).numpy().tobytes())
            yield int.from_bytes(digest.digest(), "little")
            start = stop

    def acquire_prefix(self, request_id: str, tokens: list[int], total: int) -> int:
        """Share the pages that hold a prompt's first tokens with a new request; return how many tokens these are.

        `total` is how many tokens the request may have; if there is no room for it, nothing is shared.
        """
        free = self.pool.count_free_blocks(self.index) + self.pool.num_free_sectors * self.blocks_per_sector
        if not self.free_slots:
            return 0
        found: list[int] = []
        hashes: list[int] = []
        store = self.plan.store
        for known in self._hashes(tokens[:-1]):
            block = self.ledger.hash_to_block.get(known)
            if len(found) == len(hashes) and block is not None:
                found.append(block)
            elif store is None or not store.has_page(self._name(known)):
                break
            hashes.append(known)
        stored = len(hashes) - len(found)
        if not hashes or max(self.plan.blocks_of(total) - len(found), stored) > free:
            return 0
        pages = list(self._stored(hashes[len(found) :], len(found), tokens)) if stored else []
        if not found and not pages:
            return 0
        for block in found:
            self.ledger.acquire(block)
        while self.pool.count_free_blocks(self.index) < len(pages):
            self.pool.allocate_sector(self.index)
        loaded = self.pool.get_free_blocks(self.index, len(pages))
        self.block_table[request_id] = found + loaded
        packed = len(found + loaded) * self.plan.page
        request = self._add(request_id, self.windows.sinks + packed, packed)
        if found:
            self.prefix_sinks[found[0]] = held = self.prefix_sinks.pop(found[0])  # the latest used is the last
            self._copy(held[0], request.slot, tails=False)
        with continuous_api.stream_context(self.stream):
            for block, page in zip(loaded, pages, strict=True):
                for name, place in self._page(block, request.slot, with_sinks=len(page) > 1).items():
                    place.copy_(page[name])
        self._register(request, hashes, None)
        if store is not None:
            store.touch([self._name(known) for known in hashes])
        return request.tokens

    def _stored(self, hashes: list[int], first: int, tokens: list[int]) -> Iterator[Mapping[str, torch.Tensor]]:
        """Pages from `first` on that the store has."""
        assert self.plan.store is not None
        for index, known in enumerate(hashes, first):
            like = self._page(0, 0, with_sinks=index == 0)
            page = self.plan.store.page(self._name(known), self._tokens(index, tokens), like)
            if page is None:
                return
            yield page

    def _page(self, block: int, slot: int, with_sinks: bool) -> dict[str, torch.Tensor]:
        """Views of what the store keeps of a page; with the first one go the sinks."""
        page = {"block": self._copy_view[block]}
        for layer, storage in self.storages.items() if with_sinks else ():
            page |= {f"{layer}.{side}": sinks[slot] for side, sinks in storage.sinks.items()}
        return page

    def _name(self, known: int) -> str:
        return f"{self.plan.identity}-{known:032x}"

    def _tokens(self, index: int, tokens: list[int]) -> list[int]:
        """Tokens of a page, the first with those of the sinks."""
        start = self.windows.sinks + index * self.plan.page
        return tokens[start * (index > 0) : start + self.plan.page]

    def _register(self, request: Request, hashes: Iterable[int], tokens: list[int] | None) -> None:
        """Let others find a request's whole pages, and store those that are new if `tokens` are given."""
        chain = list(hashes)
        for index, (block, known) in enumerate(zip(request.blocks, chain, strict=False)):
            if self.ledger.block_to_hash.get(block) == known:
                continue
            if index == 0 and not self._keep_sinks(request.slot, block, known):
                return
            if self.ledger.register_new_hash(block, known) is not None:
                return  # another request has computed the same pages
            if tokens is not None and (store := self.plan.store) is not None:
                with continuous_api.stream_context(self.stream):
                    page = self._page(block, request.slot, with_sinks=index == 0)
                    page = {name: x.to("cpu", copy=True) for name, x in page.items()}
                names = [self._name(one) for one in chain[: index + 1]]
                store.put_page(names, model_facts(self.plan.config), self._tokens(index, tokens), page)

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        whole = request.packed // self.plan.page * self.plan.page
        self._register(request, self._hashes(token_ids[: self.windows.sinks + whole]), token_ids)

    def _keep_sinks(self, slot: int, block: int, known: int) -> bool:
        """Copy a request's sinks to a row of their own; False if running requests use all rows."""
        if known in self.ledger.hash_to_block:
            return False
        kept = {b: held for b, held in self.prefix_sinks.items() if self.ledger.block_to_hash.get(b) == held[1]}
        if len(kept) == self.plan.prefixes:
            unused = next((b for b in kept if b in self.ledger.cached_blocks), None)
            if unused is None:
                return False
            del kept[unused]
            self.ledger.acquire(unused)
            self.ledger.release(unused, no_cache=True)
            self.pool.free_blocks(self.index, [unused])
        rows = set(range(self.plan.slots, self.plan.slots + self.plan.prefixes)) - {row for row, _ in kept.values()}
        self.prefix_sinks = kept | {block: (min(rows), known)}
        self._copy(slot, min(rows), tails=False)
        return True

    def count_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        return self.requests[source_request_id].packed // self.plan.page if self.use_block_sharing else 0

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        pairs = super().fork_blocks(source_request_id, dest_request_id, past_length)
        source = self.requests[source_request_id]
        request = self._add(dest_request_id, source.tokens, source.packed)
        self._copy(source.slot, request.slot)
        return pairs

    def _copy(self, source: int, target: int, tails: bool = True) -> None:
        """Copy dense tokens of all layers, in the order of the steps."""
        with continuous_api.stream_context(self.stream):
            for storage in self.storages.values():
                storage.copy_dense(source, target, tails)

    # A step; Transformers' indices are not used

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return []

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return []
