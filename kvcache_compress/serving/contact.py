"""Everything that touches private names of Transformers' continuous batching (5.19 to 5.24).

`manager` makes the manager that `init_continuous_batching` returns for a model under `compress`. Its cache keeps the
full-attention layers in our pages, and sliding layers in Transformers' own.
"""

import bisect
import copy
import hashlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation import continuous_batching
from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching import continuous_api, input_outputs
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.requests import RequestStatus

from kvcache_compress.attention.interface import disable_fused_attention, enable_fused_attention
from kvcache_compress.modeling.facts import model_facts
from kvcache_compress.storage.checks import not_packable_error
from kvcache_compress.storage.paged import PagedStep, PagedStorage, Request, Step

from .plan import Plan

logger = logging.getLogger(__name__)
_MANY = 1 << 40
"""Blocks that no pool has: how an allocator says that a request must wait."""
_OWN = {
    "_add", "_hashes", "_stored", "_page", "_name", "_tokens", "_register", "_keep_sinks", "_copy", "acquire_prefix",
    "rejected", "sectors_of", "most_tokens",
}  # fmt: skip
"""Methods of the classes here that override nothing."""
SLIDING_STEP_TOKENS = 512
"""Most tokens of a step by default if there are sliding layers, whose mask is as wide as the pool."""
_CREATING = threading.Lock()


class _Allocator(FullAttentionCacheAllocator):
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
            return _MANY
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


class _Cache(cb_cache.PagedAttentionCache):
    """Cache whose full-attention layers are compressed."""

    processor: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pages: _Allocator = next(x for x in self.cache_allocators.values() if isinstance(x, _Allocator))
        self.step: Step | None = None

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Admit a request only if all tokens that it may ever have fit, so that none is taken back later.

        A prompt that fits into a step is not divided between two.
        """
        left = len(state.remaining_prefill_tokens)
        fits = left <= self.max_batch_tokens - len(self.processor.scheduler.active_requests)
        if request_len < left and fits and not state.num_children and state.request_id not in self.pages.requests:
            return False
        return super().can_store_request_tokens(state, max(request_len, _total(state) - state.current_len()), dry_run)

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        if not self.use_prefix_sharing:
            return 0
        state = self.processor.scheduler.waiting_requests[request_id]
        shared = self.pages.acquire_prefix(request_id, prompt_ids, _total(state))
        if (sampling := state.logit_processor_kwargs.get("sampling")) is not None:
            sampling.shared_tokens = shared
        return shared

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        super().mark_complete_blocks(state, complete_blocks)
        if (
            state.status == RequestStatus.FINISHED and self.use_prefix_sharing
        ):  # whose last step may have been its first
            self.pages.mark_complete_blocks(state.request_id, state.initial_tokens + state.generated_tokens, 0)

    def sectors_of(self, tokens: int) -> int:
        """Sectors that a request of so many tokens needs."""
        return sum(
            -(-one._compute_blocks_needed(0, 0, tokens) // one.blocks_per_sector)
            for one in self.cache_allocators.values()
        )

    def most_tokens(self) -> int:
        """Most tokens of a request."""
        return bisect.bisect_right(range(self.num_sectors * _MANY), self.num_sectors, key=self.sectors_of) - 1

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


def _total(state: Any) -> int:
    """Tokens that a request may have in the cache."""
    return len(state.initial_tokens) + state._new_tokens_limit


class _Manager(continuous_batching.ContinuousBatchingManager):
    """Manager of requests whose cache is compressed."""

    def __init__(self, plan: Callable[..., Plan], fused: bool, model: PreTrainedModel, *args: Any) -> None:
        self.plan, self.fused, self.hints = plan, fused, args[-1]
        super().__init__(model, *args)

    def switch_to_cb_friendly_attn(self, model: PreTrainedModel, auto_switch_to_flash: bool = True) -> None:
        enable_fused_attention(model)

    def cancel_request(self, request_id: str) -> None:
        super().cancel_request(request_id)
        with self.output_router._lock:  # of a cancelled request nothing is reported that would remove its handler
            self.output_router.result_handlers.pop(request_id, None)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        super().stop(*args, **kwargs)
        if not self.fused:
            disable_fused_attention(self.model)

    def _create_batch_processor(self) -> Any:
        if self.batch_processor is not None:
            return super()._create_batch_processor()
        config, hints = self.continuous_batching_config, self.hints
        if config.cpu_offload_space != 0:
            raise ValueError(
                f"cpu_offload_space={config.cpu_offload_space}: compressed pages are never moved to the CPU, as no "
                "request is interrupted; leave it out"
            )
        config.use_async_batching, config.use_cuda_graph = False, (False, False)
        config.varlen_compile_config = config.decode_compile_config = None
        config.safety_margin = config.safety_margin or 0.0  # admitted requests never need more room
        plan = self.plan(self.model, config, hints and hints.max_prompt_length + hints.max_generated_length)
        asked = config.num_blocks
        with _replaced(plan):
            processor = super()._create_batch_processor()
        config.num_blocks = asked  # Transformers writes its own count there
        cache = processor.cache
        cache.processor, cache.pages.stream = processor, processor.inputs_and_outputs.compute_stream
        if len(cache.cache_allocators) == 1:
            cache.max_tokens_read = _MANY  # nothing is read through indices
        _check_arrivals(processor, plan)
        _fail_rejected(processor)
        return processor


def _fail(processor: Any, error: Exception, state: Any) -> None:
    """Let a request fail, and the forks that its caller waits for."""
    for number in range(state.num_children):
        child = copy.copy(state)
        child.request_id = f"{state.request_id}__child#{number}"
        processor._handle_request_error(error, child)
    state.num_children = 0
    forks = processor.scheduler._requests_to_fork
    forks[:] = [one for one in forks if one is not state]
    processor._handle_request_error(error, state)


def _check_arrivals(processor: Any, plan: Plan) -> None:
    """Let a request fail alone, as it arrives, if it can never fit."""
    add, cache = processor.scheduler.add_waiting_request, processor.cache

    def checked(state: Any) -> None:
        try:
            plan.check_request(len(state.initial_tokens), state.max_new_tokens)
            needed = cache.sectors_of(_total(state))
            if needed > cache.num_sectors:
                raise ValueError(
                    f"{len(state.initial_tokens)} + {state.max_new_tokens} tokens need {needed} blocks, and the pool "
                    f"has {cache.num_sectors}: shorten the request, or give compress more memory"
                )
        except ValueError as error:
            _fail(processor, error, state)
        else:
            add(state)

    processor.scheduler.add_waiting_request = checked


def _fail_rejected(processor: Any) -> None:
    """After a step, let the requests fail alone whose tokens could not be packed."""
    batch_update = processor.inputs_and_outputs.prepare_batch_update

    def without_rejected() -> tuple[list[Any], list[int], list[float] | None]:
        batch, tokens, logprobs = batch_update()
        rejected = processor.cache.rejected()
        if not rejected:
            return batch, tokens, logprobs
        kept = [one.state.request_id not in rejected for one in batch]
        new = [keep for one, keep in zip(batch, kept, strict=True) if one.has_new_token]
        for one in batch:
            if (error := rejected.get(one.state.request_id)) is not None:
                _fail(processor, error, one.state)
                processor.cache.free_blocks(one.state.request_id, no_cache=True)
                processor.scheduler.finish_request(one.state.request_id)
        batch = [one for one, keep in zip(batch, kept, strict=True) if keep]
        tokens = [x for x, keep in zip(tokens, new, strict=False) if keep]
        return batch, tokens, logprobs and [x for x, keep in zip(logprobs, new, strict=False) if keep]

    processor.inputs_and_outputs.prepare_batch_update = without_rejected


@contextmanager
def _replaced(plan: Plan) -> Iterator[None]:
    """Let Transformers build its batch processor from our classes within the block."""

    class Memory(cb_cache.PagedAttentionMemoryHandler):
        def infer_max_batch_tokens_and_num_sectors(self) -> tuple[int, int]:
            return plan.step_tokens, plan.sectors(self.bytes_per_sector)

        def get_available_memory(self) -> int:
            return 0

    layers = cb_cache.group_layers_by_attn_type(plan.config)
    if sliding := layers.get(continuous_api.SLIDING_ATTENTION):
        sizes = cb_cache.find_num_key_value_heads(plan.config), cb_cache.find_head_dim(plan.config)
        page = FullAttentionCacheAllocator.get_bytes_per_page(*sizes, plan.dtype, plan.batching.page_size)
        plan.share_sectors(len(sliding) * page)
        plan.step_tokens = plan.batching.max_batch_tokens or SLIDING_STEP_TOKENS
    attention = plan.config._attn_implementation
    kinds = cb_cache.ATTN_TYPE_TO_ALLOCATOR | {_Allocator.layer_type: partial(_Allocator, plan)}
    replacements: list[tuple[Any, str, Any]] = [
        (cb_cache, "PagedAttentionMemoryHandler", Memory),
        (continuous_api, "PagedAttentionCache", _Cache),
        (cb_cache, "ATTN_TYPE_TO_ALLOCATOR", kinds),
        (input_outputs, "attn_mask_is_needed", lambda config: bool(sliding) and "FLASH" not in attention),
    ]
    with _CREATING:
        before = [(module, name, getattr(module, name)) for module, name, _ in replacements]
        for module, name, new in replacements:
            setattr(module, name, new)
        try:
            yield
        finally:
            for module, name, old in before:
                setattr(module, name, old)


def check() -> None:
    """Raise `RuntimeError` if a method of Transformers that a class here overrides takes other arguments."""
    for kind in (_Allocator, _Cache, _Manager):
        for name, own in vars(kind).items():
            if not inspect.isfunction(own) or name == "__init__" or name in _OWN:
                continue
            base = getattr(kind.__base__, name, None)
            theirs = ["no such method"] if base is None else list(inspect.signature(base).parameters)
            ours = list(inspect.signature(own).parameters)
            if base is None or (ours != theirs and "args" not in ours):
                raise RuntimeError(
                    f"Transformers {transformers.__version__} has another continuous batching than this release knows: "
                    f"{kind.__base__.__name__}.{name} takes {', '.join(theirs)}, not {', '.join(ours)}. Use "
                    "Transformers 5.19 to 5.24"
                )


def manager(
    model: PreTrainedModel,
    plan: Callable[..., Plan],
    fused: bool,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> Any:
    """Make a manager as `init_continuous_batching` does; `plan(model, config, tokens)` plans its memory."""
    check()
    cached = getattr(model, "_cached_continuous_batching_manager", None)
    if isinstance(cached, _Manager) and cached.plan == plan:
        cached.switch_to_cb_friendly_attn(model)
        return cached
    config = generation_config or model.generation_config
    if config.eos_token_id is None:
        config.eos_token_id = -1
    passed = continuous_batching_config or getattr(config, "continuous_batching_config", None)
    batching = passed or ContinuousBatchingConfig()
    return _Manager(plan, fused, model, config, batching, workload_hints)
