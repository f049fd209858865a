"""The cache of continuous batching: full-attention layers in our pages, and sliding layers in Transformers' own."""

import bisect
from typing import Any

import torch
from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching.requests import RequestStatus

from kvcache_compress.storage.checks import not_packable_error
from kvcache_compress.storage.paged import PagedStep, Step

from .allocator import MANY, Allocator


class Cache(cb_cache.PagedAttentionCache):
    """Cache whose full-attention layers are compressed."""

    processor: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pages: Allocator = next(x for x in self.cache_allocators.values() if isinstance(x, Allocator))
        self.step: Step | None = None

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Admit a request only if all tokens that it may ever have fit, so that none is taken back later.

        A prompt that fits into a step is not divided between two.
        """
        left = len(state.remaining_prefill_tokens)
        fits = left <= self.max_batch_tokens - len(self.processor.scheduler.active_requests)
        if request_len < left and fits and not state.num_children and state.request_id not in self.pages.requests:
            return False
        return super().can_store_request_tokens(
            state, max(request_len, total_tokens(state) - state.current_len()), dry_run
        )

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        if not self.use_prefix_sharing:
            return 0
        state = self.processor.scheduler.waiting_requests[request_id]
        shared = self.pages.acquire_prefix(request_id, prompt_ids, total_tokens(state))
        if (sampling := state.logit_processor_kwargs.get("sampling")) is not None:
            sampling.shared_tokens = shared
        return shared

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        super().mark_complete_blocks(state, complete_blocks)
        if state.status == RequestStatus.FINISHED and self.use_prefix_sharing:  # its last step may have been its first
            self.pages.mark_complete_blocks(state.request_id, state.initial_tokens + state.generated_tokens, 0)

    def sectors_of(self, tokens: int) -> int:
        """Sectors that a request of so many tokens needs."""
        return sum(
            -(-one._compute_blocks_needed(0, 0, tokens) // one.blocks_per_sector)
            for one in self.cache_allocators.values()
        )

    def most_tokens(self) -> int:
        """Most tokens of a request."""
        return bisect.bisect_right(range(self.num_sectors * MANY), self.num_sectors, key=self.sectors_of) - 1

    def prepare_fork_request(self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any) -> list[str]:
        forked = dst_req_ids[: len(self.pages.free_slots)]
        return list(super().prepare_fork_request(src_state, forked, copy_src_and_dst))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        storage = self.pages.storages.get(layer_idx)
        if storage is None:
            return super().update(key_states, value_states, layer_idx, kwargs)
        if layer_idx == self.pages.layer_indices[0]:
            batch = self.processor.inputs_and_outputs.requests_in_batch
            parts = ((self.pages.requests[one.state.request_id], one.query_length) for one in batch)
            self.step = Step(parts, storage.windows, storage.page, key_states.device)
        assert self.step is not None
        found = PagedStep(storage, self.step, storage.append(self.step, key_states, value_states))
        return found, found

    def rejected(self) -> dict[str, Exception]:
        """Requests of the last step whose tokens cannot be packed, with the reason."""
        if self.step is None:
            return {}
        batch = self.processor.inputs_and_outputs.requests_in_batch
        return {
            one.state.request_id: not_packable_error("keys or values", None)
            for one, refused in zip(batch, self.step.refused(), strict=True)
            if refused
        }


def total_tokens(state: Any) -> int:
    """Tokens that a request may have in the cache."""
    return len(state.initial_tokens) + state._new_tokens_limit
