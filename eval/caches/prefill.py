"""One prefill per prompt, from which every cache under test is filled.

In its first prefill a cache returns the keys and values that it receives, so these are the same for every cache. They
are kept and passed to each cache by `update`, as the model would. The cache then holds, bit for bit, what a prefill of
its own would have left. A comparison of thirty caches pays for one prefill per prompt instead of thirty.

If a cache takes statistics from the prompt's queries, a second pass records them. Models with layers other than full
attention (sliding windows, states) prefill each cache anew.
"""

import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from functools import partial

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_compress import disable_fused_attention, enable_fused_attention
from kvcache_compress.attention.interface import attends_fused
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.storage.side import SideState
from kvcache_compress.storage.view import View

from .caches import CacheSpec, Measured, full_cache

STEP_TOKENS = 16
"""Forced tokens per pass. The KL is that of single steps, in a fifth of the time."""


@dataclass
class Prefill:
    """A prompt `[1, T]` after its one pass through the model.

    Attributes:
        question: tokens `[1, Q]` that follow the prompt through the cache under test; often empty.
        logits: logits `[V]` after the prompt's last token.
        states: keys and values `[1, H, T, D]` of each layer; None if they cannot be shared.
        seconds: time of that pass.
    """

    model: PreTrainedModel
    ids: torch.Tensor
    question: torch.Tensor
    logits: torch.Tensor
    states: list[tuple[torch.Tensor, torch.Tensor]] | None
    seconds: float
    _calls: dict[int, AttentionCall] = field(default_factory=dict)
    _full: dict[bytes, torch.Tensor] = field(default_factory=dict)

    def run(self, spec: CacheSpec) -> "CacheRun":
        """Fill a new cache of this kind with the prompt.

        Raises:
            ValueError: The cache does not fit the model.
        """
        started = _now(self.ids.device)
        cache = self._fill(spec)
        if self.ids.device.type == "cpu":
            decode_once(cache)
        return CacheRun(self, spec, cache, spec.measure(cache), self.logits, _now(self.ids.device) - started)

    @torch.inference_mode()
    def _fill(self, spec: CacheSpec) -> Cache:
        cache = spec.make(self.model)
        compressed = any(isinstance(layer, CompressedLayer) for layer in cache.layers)
        with fused_attention(self.model) if compressed else nullcontext():
            if self.states is None:
                _pass(self.model, cache, self.ids, last=True)
                return cache
            for index, (keys, values) in enumerate(self.states):
                cache.update(keys, values, index)
                layer = cache.layers[index]
                if isinstance(layer, CompressedLayer) and layer.awaits_queries:
                    layer.close(self._call(index, spec))
        return cache

    def _call(self, layer: int, spec: CacheSpec) -> AttentionCall:
        """The prompt's queries in a layer, recorded in a fused pass of their own through a cache of this kind."""
        if layer not in self._calls:
            cache = spec.make(self.model)
            for index, one in enumerate(cache.layers):
                one.close = partial(self._record, index)
            _pass(self.model, cache, self.ids, last=True)
        return self._calls[layer]

    def _record(self, layer: int, call: AttentionCall | None) -> None:
        if call is not None:
            self._calls[layer] = call

    def full_logits(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        """`forced` with the full cache, `[S + 1, V]`: the reference for all other caches, computed once."""
        key = tokens.cpu().numpy().tobytes() + step.to_bytes(8)
        if key not in self._full:
            self._full = {key: self.run(full_cache()).forced(tokens, step)}
        return self._full[key]


@dataclass
class CacheRun:
    """A cache under test that holds the prompt; it takes one continuation.

    Attributes:
        measured: the cache's size after the prompt, or after the question (see `forced`).
        logits: logits `[V]` after the prompt's last token.
        seconds: time to fill the cache, and of all passes through it.
    """

    prefill: Prefill
    spec: CacheSpec
    cache: Cache
    measured: Measured
    logits: torch.Tensor
    seconds: float
    _used: bool = False

    @torch.inference_mode()
    def forced(
        self, tokens: torch.Tensor, step: int = STEP_TOKENS, question_passes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Feed the question, then `tokens` `[S]` with `step` tokens per pass.

        Args:
            tokens: the continuation.
            step: tokens of it per pass.
            question_passes: tokens of the question in each pass, after which the cache's size is measured again. By
                default the question is fed in one pass, and the size is that after the prompt.

        Returns:
            float32 logits `[S + 1, V]`: before the first token, then after each.

        Raises:
            ValueError: Logits are not finite, or the model has positions for fewer tokens.
        """
        with self._continuing(len(tokens)):
            logits = [self._ask(question_passes)]
            for part in tokens[None].to(self.logits.device).split(step, dim=1) if len(tokens) else ():
                logits.append(_pass(self.prefill.model, self.cache, part)[0])
            return self._finite(torch.cat(logits).float())

    @torch.inference_mode()
    def generate(self, max_new_tokens: int, ends: Collection[int] = (), min_new_tokens: int = 0) -> torch.Tensor:
        """Feed the question and generate new token ids `[S]` greedily, whatever the model's own generation config says.

        The first `min_new_tokens` tokens are none of `ends`; the first that is one is the last.

        Raises:
            ValueError: Logits are not finite, or the model has positions for fewer tokens.
        """
        new: list[int] = []
        with self._continuing(max_new_tokens):
            logits = self._ask()[-1]
            while True:
                self._finite(logits)
                if len(new) < min_new_tokens:
                    logits = logits.index_fill(
                        0, torch.tensor([*ends], dtype=torch.long, device=logits.device), -torch.inf
                    )
                new.append(int(logits.argmax()))
                if len(new) == max_new_tokens or new[-1] in ends:
                    return torch.tensor(new)
                ids = torch.tensor([new[-1:]], device=logits.device)
                logits = _pass(self.prefill.model, self.cache, ids, last=True)[0, -1]

    @contextmanager
    def _continuing(self, new: int) -> Iterator[None]:
        """Check a continuation by `new` tokens, and time the block that computes it."""
        prefill = self.prefill
        _check_length(prefill.model, prefill.ids.shape[1] + prefill.question.shape[1] + new)
        if self._used:
            raise ValueError(f"cache={self.spec.name!r}: this run has had its continuation; fill another cache")
        self._used = True
        started = _now(self.logits.device)
        yield
        self.seconds += _now(self.logits.device) - started

    def _finite(self, logits: torch.Tensor) -> torch.Tensor:
        if not logits.sum(dtype=torch.float32).isfinite():
            raise ValueError(f"cache={self.spec.name!r}: the model's logits are not finite; try another dtype")
        return logits

    def _ask(self, passes: Sequence[int] | None = None) -> torch.Tensor:
        """Logits `[1, V]` before the first new token."""
        question, logits = self.prefill.question, self.logits[None]
        for part in question.split(list(passes or [question.shape[1]]), dim=1) if question.numel() else ():
            logits = _pass(self.prefill.model, self.cache, part, last=True)[0]
        if passes is not None:
            self.measured = self.spec.measure(self.cache)
        return logits


@torch.inference_mode()
def prefill(model: PreTrainedModel, ids: torch.Tensor, question: torch.Tensor | None = None) -> Prefill:
    """Run a prompt `[1, T]` through the model; `question` `[1, Q]` is left to the caches under test.

    Raises:
        ValueError: The model has positions for fewer tokens.
    """
    ids = ids.to(model.device)
    question = ids[:, :0] if question is None else question.to(model.device)
    _check_length(model, ids.shape[1] + question.shape[1])
    started = _now(model.device)
    cache = DynamicCache(config=model.config)
    logits = _pass(model, cache, ids, last=True)[0, -1]
    shared = all(type(layer) is DynamicLayer for layer in cache.layers)
    states = [(layer.keys, layer.values) for layer in cache.layers] if shared else None
    return Prefill(model, ids, question, logits, states, _now(model.device) - started)


def decode_once(cache: Cache) -> None:
    """Make a filled cache keep what it decodes; it may no longer be copied, cropped or reordered.

    Packed tokens never change, so the figures are those of decoding at each step, which takes most of the time on some
    machines. The decoded tokens take the memory of an uncompressed cache, which only an evaluation can afford.
    """
    for layer in cache.layers:
        if isinstance(layer, CompressedLayer):
            for state in layer.sides.values():
                # A strong reference would close a circle, which holds all decoded tokens until the next collection.
                state.view = partial(_kept_view, weakref.proxy(state), [])  # type: ignore[method-assign]


def _kept_view(
    state: SideState, decoded: list[torch.Tensor], packed: int | None = None, tail: torch.Tensor | None = None
) -> View:
    view = SideState.view(state, packed, tail)
    return _KeptView(**{name.name: getattr(view, name.name) for name in fields(View)}, decoded=decoded)


@dataclass(slots=True, eq=False, repr=False)
class _KeptView(View):
    """A view that adds what it decodes to `decoded`, runs of packed tokens `[B, H, tokens, D]` from the first on."""

    decoded: list[torch.Tensor] = field(default_factory=list)

    def stored(self) -> torch.Tensor:
        if (start := sum(part.shape[2] for part in self.decoded)) < self.packed:
            fresh = self.sinks.new_empty(*self.sinks.shape[:2], self.packed - start, self.sinks.shape[3])
            self.decode_into(fresh, start)
            self.decoded.append(fresh)
        packed = torch.cat(self.decoded, dim=2)[:, :, : self.packed] if self.decoded else self.sinks[:, :, :0]
        return torch.cat([self.sinks, packed, self.tail], dim=2)


@contextmanager
def fused_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch fused attention on in the block if the model allows it, so that caches see the queries."""
    before = attends_fused(model)
    with suppress(ValueError):
        enable_fused_attention(model)
    try:
        yield
    finally:
        if not before:
            disable_fused_attention(model)


def _now(device: torch.device) -> float:
    """The time in seconds, after the device has finished its work."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def positions_of(model: PreTrainedModel) -> int | None:
    """Number of positions that the model was made for; None if it has no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _check_length(model: PreTrainedModel, tokens: int) -> None:
    if (positions := positions_of(model)) is not None and tokens > positions:
        raise ValueError(f"prompt and continuation have {tokens} tokens, but the model only {positions} positions")


def _pass(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, *, last: bool = False) -> torch.Tensor:
    """Logits `[1, S, V]` of a forward pass of tokens `[1, S]`, or those after the last token alone."""
    how = {cache_argument(): cache, "use_cache": True, "logits_to_keep": int(last)}
    return model(input_ids=ids, **how).logits
