"""The manager that `init_continuous_batching` returns for a model under `compress`."""

import copy
import inspect
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation import continuous_batching
from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching import continuous_api, input_outputs
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from kvcache_compress.attention.interface import disable_fused_attention, enable_fused_attention

from .allocator import MANY, Allocator
from .cache import Cache, total_tokens
from .plan import Plan

_OWN = {
    "_add", "_hashes", "_stored", "_page", "_name", "_tokens", "_register", "_keep_sinks", "_copy", "acquire_prefix",
    "rejected", "sectors_of", "most_tokens",
}  # fmt: skip
"""Methods of our classes that override nothing."""
SLIDING_STEP_TOKENS = 512
"""Most tokens of a step by default if there are sliding layers, whose mask is as wide as the pool."""
_CREATING = threading.Lock()


class Manager(continuous_batching.ContinuousBatchingManager):
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
            cache.max_tokens_read = MANY  # nothing is read through indices
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
            needed = cache.sectors_of(total_tokens(state))
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
    if Allocator.layer_type not in layers:
        raise ValueError(
            f"{plan.config.model_type} has no full-attention layer to compress in continuous batching, which counts "
            "windows of any width as sliding; use generate without it"
        )
    if sliding := layers.get(continuous_api.SLIDING_ATTENTION):
        sizes = cb_cache.find_num_key_value_heads(plan.config), cb_cache.find_head_dim(plan.config)
        page = FullAttentionCacheAllocator.get_bytes_per_page(*sizes, plan.dtype, plan.batching.page_size)
        plan.share_sectors(len(sliding) * page)
        plan.step_tokens = plan.batching.max_batch_tokens or SLIDING_STEP_TOKENS
    attention = plan.config._attn_implementation
    kinds = cb_cache.ATTN_TYPE_TO_ALLOCATOR | {Allocator.layer_type: partial(Allocator, plan)}
    replacements: list[tuple[Any, str, Any]] = [
        (cb_cache, "PagedAttentionMemoryHandler", Memory),
        (continuous_api, "PagedAttentionCache", Cache),
        (cb_cache, "ATTN_TYPE_TO_ALLOCATOR", kinds),
        (input_outputs, "attn_mask_is_needed", lambda config: bool(sliding) and "FLASH" not in attention),
    ]
    with _CREATING, ExitStack() as originals:
        for module, name, new in replacements:
            originals.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, new)
        yield


def check(kinds: Iterable[Any], own: Container[str], versions: str) -> None:
    """Raise `RuntimeError` if a method of Transformers that these classes override takes other arguments.

    `own` are methods that override nothing, and `versions` of Transformers are known to fit.
    """
    for kind in kinds:
        for name, method in vars(kind).items():
            if not inspect.isfunction(method) or name == "__init__" or name in own:
                continue
            base = getattr(kind.__base__, name, None)
            theirs = ["no such method"] if base is None else list(inspect.signature(base).parameters)
            ours = list(inspect.signature(method).parameters)
            if base is None or (ours != theirs and "args" not in ours):
                raise RuntimeError(
                    f"Transformers {transformers.__version__} is not the one that this release knows: "
                    f"{kind.__base__.__name__}.{name} takes {', '.join(theirs)}, not {', '.join(ours)}. Use "
                    f"Transformers {versions}"
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
    check((Allocator, Cache, Manager), _OWN, "5.19 to 5.24")
    cached = getattr(model, "_cached_continuous_batching_manager", None)
    if isinstance(cached, Manager) and cached.plan == plan:
        cached.switch_to_cb_friendly_attn(model)
        return cached
    config = generation_config or model.generation_config
    if config.eos_token_id is None:
        config.eos_token_id = -1
    passed = continuous_batching_config or getattr(config, "continuous_batching_config", None)
    batching = passed or ContinuousBatchingConfig()
    return Manager(plan, fused, model, config, batching, workload_hints)
