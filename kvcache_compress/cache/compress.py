"""`compress`: a block in which a model's `generate` uses compressed caches, for clients that only call `generate`."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcache_compress.attention.interface import attends_fused, disable_fused_attention, enable_fused_attention
from kvcache_compress.attention.position_hooks import PositionHooks, register_position_hooks
from kvcache_compress.config import CompressionConfig, load_config
from kvcache_compress.modeling.adapters import compressible
from kvcache_compress.modeling.decoder import cache_argument

from .compressed_cache import CompressedCache

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Compression:
    """Handle of a `compress` block, with the cache of the latest `generate` call in it."""

    compression: CompressionConfig
    cache: CompressedCache | None = None
    fused: bool | None = None
    reported: bool = False

    @property
    def last_cache(self) -> CompressedCache:
        """The cache of the latest `generate` call; raises `RuntimeError` before the first one."""
        if self.cache is None:
            raise RuntimeError(
                "no cache yet: no call of generate in this block made one (nor do use_cache=False or your own cache)"
            )
        return self.cache

    def report_unfilled(self, model: PreTrainedModel) -> None:
        """Warn, once, if the latest `generate` put no tokens into the layers that compress them."""
        layers = self.last_cache.compressed_layers.values()
        if self.reported or not layers or any(int(layer.get_seq_length()) for layer in layers):
            return
        self.reported = True
        logger.warning(
            "nothing was compressed: %s did not use the compressed cache that generate gave it. Its forward must pass "
            "the cache on to its attention, and prepare_inputs_for_generation to its forward",
            type(model).__name__,
        )


@dataclass
class _Blocks:
    """Open `compress` blocks of a model, the innermost last, and the model's state before the first of them."""

    generate: Callable[..., Any] | None
    fused: bool
    hooks: PositionHooks | None = None
    thread: int = field(default_factory=threading.get_ident)
    open: list[Compression] = field(default_factory=list)


_BLOCKS: weakref.WeakKeyDictionary[PreTrainedModel, _Blocks] = weakref.WeakKeyDictionary()
_ENTERING = threading.Lock()


@contextmanager
def compress(
    model: torch.nn.Module,
    compression: CompressionConfig | str | Path | Mapping[str, Any],
    *,
    fused: bool | None = None,
) -> Iterator[Compression]:
    """Make `model.generate` use a compressed cache within the block, wherever it would create a cache itself.

    Pipelines and other clients that only call `generate` work unchanged; a `cache_implementation` that they ask for is
    ignored. Calls with a cache or `use_cache=False` are left alone, and so are calls that `generate` makes of
    itself: drafts of early exit have a dense cache. Any thread may call `generate`. Blocks of one thread can be nested,
    and the innermost one applies.

    Args:
        model: a decoder-only model, or a PEFT model around one.
        compression: a preset's name, a path, a dictionary or a config, as for `load_config`.
        fused: fused attention on, off, or (None) on if the model's attention can be switched.

    Raises:
        ValueError: `CompressedCache` refuses the model or the config, the model is in a block of another thread, or it
            always uses a cache of its own (PEFT's prefix tuning).
    """
    inner = compressible(model)
    block = Compression(load_config(compression), fused=fused)
    CompressedCache(inner.config, block.compression)
    _enter(inner, block)
    try:
        yield block
    finally:
        _leave(inner, block)


def _enter(model: PreTrainedModel, block: Compression) -> None:
    with _ENTERING:
        blocks = _BLOCKS.get(model) or _Blocks(vars(model).get("generate"), attends_fused(model))
        if blocks.thread != threading.get_ident():
            raise ValueError(
                f"model={type(model).__name__}: it is in a `compress` block of another thread; allowed are blocks of "
                "one thread at a time, in which any thread may call generate"
            )
        _switch(model, block, blocks)
        blocks.open.append(block)
        if model not in _BLOCKS:
            model.generate = _compressing(model, blocks)
            _BLOCKS[model] = blocks


def _leave(model: PreTrainedModel, block: Compression) -> None:
    with _ENTERING:
        blocks = _BLOCKS[model]
        blocks.open.remove(block)
        if blocks.open:
            _switch(model, blocks.open[-1], blocks)
            return
        del _BLOCKS[model]
        if blocks.generate is None:
            del model.generate
        else:
            model.generate = blocks.generate
        (enable_fused_attention if blocks.fused else disable_fused_attention)(model)
        if blocks.hooks is not None:
            blocks.hooks.remove()


def _switch(model: PreTrainedModel, block: Compression, blocks: _Blocks) -> None:
    """Switch the model's fused attention on or off as the block asks; without it, hook the model for positions."""
    if block.fused or (block.fused is None and model._can_set_attn_implementation()):
        enable_fused_attention(model)
        return
    if block.fused is None:
        logger.warning("the attention of %s cannot be switched: decoding each step instead", type(model).__name__)
    else:
        disable_fused_attention(model)
    if blocks.hooks is None:
        blocks.hooks = register_position_hooks(model)


def _compressing(model: PreTrainedModel, blocks: _Blocks) -> Callable[..., Any]:
    """Wrap the model's `generate` to use a cache of the innermost block."""
    generate = model.generate
    running = threading.local()

    @functools.wraps(generate)
    def generate_compressed(*args: Any, **kwargs: Any) -> Any:
        # Early exit drafts with a `generate` of the first layers inside the `generate` of the whole model.
        opened = tuple(blocks.open)  # The thread that opened the blocks may leave them meanwhile.
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
            block = opened[-1]
            block.cache = CompressedCache(model.config, block.compression)
            kwargs.pop("past_key_values", None)
            kwargs[cache_argument()] = block.cache
            kwargs.pop("cache_implementation", None)
            if any(one.cache_implementation for one in settings):  # `generate` refuses both at once.
                kwargs["cache_implementation"] = None
            output = generate(*args, **kwargs)
            block.report_unfilled(model)
            return output
        finally:
            del running.generate

    return generate_compressed
