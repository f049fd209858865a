"""`compress` makes `generate` and `generate_batch` use compressed caches, within a `with` block or until `stop()`."""

import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel

from kvcache_compress.attention.interface import attends_fused, disable_fused_attention, enable_fused_attention
from kvcache_compress.attention.position_hooks import PositionHooks, register_position_hooks
from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.config import CompressionConfig, load_config
from kvcache_compress.modeling.adapters import compressible
from kvcache_compress.modeling.decoder import cache_argument

from .engine.plan import Plan, bytes_of
from .engine.statistics import ModelCodecs, model_codecs
from .prefix_store import PrefixStore, identity

logger = logging.getLogger(__name__)


class Compression:
    """Handle returned by `compress`: `stop()` ends the compression, `last_cache` is the latest cache.

    Attributes:
        compression: the config of the caches.
        cache: the cache of the latest `generate` call, or None.
    """

    def __init__(self, model: PreTrainedModel, compression: CompressionConfig, *options: Any) -> None:
        self.compression = compression
        self.cache: CompressedCache | None = None
        # Weak references: the handle must not keep the model alive, nor the model the handle's cache.
        self._model = weakref.ref(model)
        self._call = _Call(weakref.ref(self), compression, *options)
        _enter(model, self._call)

    @property
    def last_cache(self) -> CompressedCache:
        """The cache of the latest `generate` call; raises `RuntimeError` before the first call."""
        if self.cache is None:
            raise RuntimeError(
                "no cache yet: call model.generate first, without a cache of your own and without use_cache=False"
            )
        return self.cache

    def stop(self) -> None:
        """End this compression, from any thread and in any order; calling it again does nothing.

        Outside of `with` blocks it also ends the earlier calls that this one replaced.
        """
        model = self._model()
        if model is not None:
            _leave(model, self._call)

    def __enter__(self) -> Self:
        """Compress until the block ends; raises `RuntimeError` after `stop()` and in a second `with`."""
        with _ENTERING:
            model = self._model()
            blocks = None if model is None else _BLOCKS.get(model)
            if self._call.in_block or blocks is None or self._call not in blocks.open:
                raise RuntimeError(
                    "this compression has ended or already has a with block; call compress(model, ...) again"
                )
            self._call.in_block = True
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


@dataclass(eq=False)
class _Call:
    """An open `compress` call."""

    handle: weakref.ref[Compression]
    compression: CompressionConfig
    fused: bool | None
    memory: int | str
    statistics: torch.Tensor | None
    store: PrefixStore | None
    in_block: bool = False
    reported: bool = False
    codecs: ModelCodecs | None = None

    def plan(self, model: PreTrainedModel, batching: ContinuousBatchingConfig, most_tokens: int | None) -> Plan:
        """Plan the memory of continuous batching; the first call measures the statistics."""
        if self.codecs is None:
            self.codecs = model_codecs(model, self.compression, self.statistics, self.store)
        decoder = model.config.get_text_config(decoder=True)
        return Plan(
            decoder, self.codecs, batching, bytes_of(self.memory, model.device), most_tokens, model.dtype, model.device,
            self.fused is not False, self.store, "" if self.store is None else identity(model, self.compression),
        )  # fmt: skip

    def report_unfilled(self, model: PreTrainedModel, cache: CompressedCache) -> None:
        """Warn once if `generate` put no tokens into the compressed layers."""
        layers = cache.compressed_layers.values()
        if self.reported or not layers or any(int(layer.get_seq_length()) for layer in layers):
            return
        self.reported = True
        logger.warning(
            "nothing was compressed: %s did not use the compressed cache that generate passed to it. Its "
            "prepare_inputs_for_generation must pass the cache to forward, and forward to the attention layers",
            type(model).__name__,
        )


@dataclass
class _Blocks:
    """Open `compress` calls of a model, the latest last, and the model's state before the first of them."""

    generate: Callable[..., Any] | None
    fused: bool
    wrapper: weakref.ref[Callable[..., Any]] | None = None  # a strong reference would keep the model alive
    hooks: PositionHooks | None = None
    open: list[_Call] = field(default_factory=list)


_BLOCKS: weakref.WeakKeyDictionary[PreTrainedModel, _Blocks] = weakref.WeakKeyDictionary()
_ENTERING = threading.Lock()


def compress(
    model: torch.nn.Module,
    compression: CompressionConfig | str | Path | Mapping[str, Any],
    *,
    fused: bool | None = None,
    memory: int | str = "50%",
    statistics: torch.Tensor | Sequence[int] | None = None,
    prefix_store: PrefixStore | str | Path | None = None,
) -> Compression:
    """Make `model.generate` and `model.generate_batch` use compressed caches wherever they would create one themselves.

    Compression is on from the call until `stop()` of the returned handle, or until the end of a `with` block:

        compression = compress(model, "best-3bit")    # on until compression.stop()
        with compress(model, "best-3bit") as compression:    # on in the block

    Pipelines and other clients that only call `generate` work unchanged; their `cache_implementation` is ignored. Calls
    that pass a cache or `use_cache=False` are left alone. So are `generate` calls within `generate`: drafts of early
    exit use a dense cache.

    The latest call on a model applies, in all threads. A `with` block interrupts earlier calls, which apply again after
    it. A call without a block replaces earlier calls, and its `stop()` ends them too. Dropping a handle ends nothing.

    Args:
        model: a decoder-only model, or a PEFT model around one.
        compression: a preset's name, a path, a dictionary or a config, as for `load_config`.
        fused: fused attention on, off, or (None) on if the model's attention can be switched.
        memory: memory for the tokens of continuous batching, in bytes or as `"8GiB"` or `"50%"` of what is free (the
            default).
        statistics: token ids of about a thousand tokens of text for the statistics of continuous batching, which all
            requests share; by default a built-in text, with the tokenizer in the model's folder.
        prefix_store: a `PrefixStore`, or its folder. `generate` begins with the longest stored prefix of its prompt, if
            that is a single one without padding, and stores its own cache; continuous batching loads and stores pages.

    Raises:
        ValueError: `CompressedCache` refuses the model or the config, the model always uses a cache of its own (PEFT's
            prefix tuning), `memory` is not a size, or weights are offloaded where there is a `prefix_store`.
    """
    inner = compressible(model)
    config = load_config(compression)
    CompressedCache(inner.config, config)
    text = None if statistics is None else torch.as_tensor(statistics).flatten()
    bytes_of(memory)
    if prefix_store is not None and any(p.is_meta for p in inner.parameters()):
        raise ValueError("prefix_store: some weights are offloaded, so this model cannot be told from others; drop it")
    store = PrefixStore(prefix_store) if isinstance(prefix_store, str | Path) else prefix_store
    return Compression(inner, config, fused, memory, text, store)


def _enter(model: PreTrainedModel, call: _Call) -> None:
    with _ENTERING:
        blocks = _BLOCKS.get(model) or _Blocks(vars(model).get("generate"), attends_fused(model))
        _switch(model, call, blocks)
        blocks.open.append(call)
        if model not in _BLOCKS:
            model.generate = _compressing(model, blocks)
            model.init_continuous_batching = _batching(model, blocks)
            blocks.wrapper = weakref.ref(model.generate)
            _BLOCKS[model] = blocks


def _leave(model: PreTrainedModel, call: _Call) -> None:
    with _ENTERING:
        blocks = _BLOCKS.get(model)
        if blocks is None or call not in blocks.open:
            return
        at = blocks.open.index(call)
        earlier = blocks.open[:at]
        while not call.in_block and earlier and not earlier[-1].in_block:  # calls that this one replaced
            earlier.pop()
        blocks.open[: at + 1] = earlier
        plan = getattr(vars(model).get("_cached_continuous_batching_manager"), "plan", None)
        if (owner := getattr(plan, "__self__", None)) is not None and owner not in blocks.open:
            model.destroy_cached_continuous_batching_manager()
        if blocks.open:
            _switch(model, blocks.open[-1], blocks)
            return
        del _BLOCKS[model], model.init_continuous_batching
        if blocks.wrapper is None or vars(model).get("generate") is not blocks.wrapper():
            pass  # Other code has wrapped our `generate`; from now on it just passes calls on.
        elif blocks.generate is None:
            del model.generate
        else:
            model.generate = blocks.generate
        (enable_fused_attention if blocks.fused else disable_fused_attention)(model)
        if blocks.hooks is not None:
            blocks.hooks.remove()


def _switch(model: PreTrainedModel, call: _Call, blocks: _Blocks) -> None:
    """Switch the model's fused attention as the call asks; without it, add hooks for position embeddings."""
    if call.fused or (call.fused is None and model._can_set_attn_implementation()):
        enable_fused_attention(model)
        return
    if call.fused is None:
        logger.warning(
            "%s does not use Transformers' attention interface, so each step decodes its cache, which is slower",
            type(model).__name__,
        )
    else:
        disable_fused_attention(model)
    if blocks.hooks is None:
        blocks.hooks = register_position_hooks(model)


def _compressing(model: PreTrainedModel, blocks: _Blocks) -> Callable[..., Any]:
    """Wrap the model's `generate` so that it uses a cache of the latest open call."""
    generate = model.generate
    running = threading.local()

    @functools.wraps(generate)
    def generate_compressed(*args: Any, **kwargs: Any) -> Any:
        # Early exit calls `generate` on the first layers, for drafts, inside `generate` of the whole model.
        opened = tuple(blocks.open)  # another thread may end calls meanwhile
        if vars(running) or not opened:
            return generate(*args, **kwargs)
        passed = inspect.signature(generate).bind_partial(*args, **kwargs).arguments.get("generation_config")
        settings = [one for one in (passed, model.generation_config) if one is not None]
        asked = [kwargs.get("use_cache"), *(one.use_cache for one in settings)]
        running.generate = True
        try:
            own = any(kwargs.get(name) is not None for name in ("past_key_values", cache_argument()))
            if own or next((one for one in asked if one is not None), True) is False:
                return generate(*args, **kwargs)
            call = opened[-1]
            store = call.store
            prompt = None if store is None else _single_prompt(model, generate, args, kwargs)
            cache = None
            if store is not None and prompt is not None:
                cache = store.get(model, call.compression, prompt[0].tolist())
                kwargs.setdefault("attention_mask", torch.ones_like(prompt))  # tells `generate` that this is all
            if cache is None:
                cache = CompressedCache(model.config, call.compression)
            handle = call.handle()
            if handle is not None:
                handle.cache = cache
            del handle  # let it be dropped while `generate` runs
            kwargs.pop("past_key_values", None)
            kwargs[cache_argument()] = cache
            kwargs.pop("cache_implementation", None)
            if any(one.cache_implementation for one in settings):  # `generate` refuses it next to a cache
                kwargs["cache_implementation"] = None
            output = generate(*args, **kwargs)
            call.report_unfilled(model, cache)
            if store is not None and prompt is not None:
                store.put(model, cache, getattr(output, "sequences", output)[0, : cache.get_seq_length()].tolist())
            return output
        finally:
            del running.generate

    return generate_compressed


def _single_prompt(model: PreTrainedModel, generate: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor | None:
    """The token ids `[1, T]` of a `generate` call, if it continues one text without padding, and nothing else."""
    passed = inspect.signature(generate).bind_partial(*args, **kwargs).arguments
    passed = {**passed, **passed.pop("kwargs", {}), **passed.pop("model_kwargs", {})}
    ids: torch.Tensor | None = passed.pop("inputs", passed.pop("input_ids", None))
    mask = passed.pop("attention_mask", None)
    others = (x for value in passed.values() for x in (value if isinstance(value, list | tuple) else [value]))
    if ids is None or len(ids) != 1 or any(isinstance(x, torch.Tensor) for x in others):
        return None
    config = passed.get("generation_config") or model.generation_config
    padding = passed.get("pad_token_id", getattr(config, "pad_token_id", None))
    unpadded = mask.all() if mask is not None else padding is None or not (ids == padding).any()
    several = ("num_beams", "num_return_sequences")
    alone = all((passed.get(name) or getattr(config, name, None) or 1) == 1 for name in several)
    return ids if unpadded and alone else None


def _batching(model: PreTrainedModel, blocks: _Blocks) -> Callable[..., Any]:
    """Make the model's `init_continuous_batching`, which `generate_batch` calls, use pages of the latest open call."""

    @functools.wraps(model.init_continuous_batching)
    def init_compressed(*args: Any, **kwargs: Any) -> Any:
        try:
            from .engine.manager import manager
        except ImportError as error:
            raise RuntimeError(f"continuous batching needs Transformers 5.19 to 5.24 ({error})") from error

        call = blocks.open[-1]
        return manager(model, call.plan, call.fused is not False, *args, **kwargs)

    return init_compressed
