"""The contract tests' configurations, and the independent oracle that caches are compared with.

Logits of two attention implementations differ by rounding, which decides the codes of later tokens.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from kvcache_compress import CompressedCache, CompressionConfig
from kvcache_compress.attention.interface import attends_fused, attention_forward
from kvcache_compress.backends.choice import resolve_backend
from kvcache_compress.codecs.base import Codec, CodecContext, Prompt
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.codecs.padding import LeftPadding
from kvcache_compress.config import LayerPlan, load_config
from kvcache_compress.modeling.rope import Rope, rope_layout
from kvcache_compress.storage.backend import Backend
from support.cache_name import feed
from support.method_cases import declared

FLIP = 6e-3
"""Largest change of a logit by one flipped code: a sign of QJL changes it by up to 4e-3 in these models, another scale
of a spectral key by 5.8e-3, while packing all tokens changes most logits by more than 1e-2."""
FLIPS = 3e-4
"""Largest RMS change of all logits by flipped codes. One flipped key of an early token changes every logit after it, by
1e-4 in RMS."""
FLIPPED = 0.5
"""Largest relative change of a decoded token by flipped codes. Seen was .31, where the errors of a key's best two
scales differ by 3e-6; another token in its place would change it by 1.4."""
FLIPPED_SHARE = 0.01
"""Largest share of tokens that flipped codes change by more than a hundredth; one in 260 was seen."""


def assert_close_but_for_flips(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that logits are equal up to rounding and a few flipped codes of numbers between two levels.

    Hidden states of the two implementations differ by 1e-7; the numbers whose codes that flips depend on the processor.
    """
    assert got.shape == expected.shape
    difference = (got - expected).abs().flatten()
    if not len(difference):
        return
    assert difference.max() <= FLIP
    assert difference.square().mean().sqrt() <= FLIPS


SINKS, RECENT, LAYERS, VOCAB = 4, 8, 3, 128
_DECLARED = declared("CONTRACT")


def _turboquant(bits: float, **options: Any) -> dict[str, Any]:
    return {"method": "turboquant", "bits": bits, **options}


_KIVI = {"method": "kivi", "bits": 4}
_COMMVQ = _DECLARED["commvq"]["keys"]
CONFIGS: dict[str, dict[str, Any]] = {
    "turboquant-4": {"keys": _turboquant(4, center="on"), "values": _turboquant(4)},
    "turboquant-3.5": {"keys": _turboquant(3.5), "values": _turboquant(3.5)},
    "turboquant-prod": {"keys": _turboquant(2, estimator="prod"), "values": _turboquant(2, estimator="prod")},
    "turboquant-uniform": {"keys": _turboquant(3, codebook="uniform"), "values": "none"},
    "kivi-4": {"keys": _KIVI, "values": _KIVI},
    "mixed": {
        "keys": _turboquant(3),
        "values": _turboquant(2),
        "layers": [{"match": 0, "method": "none"}, {"match": -1, "keys": _KIVI, "sink_tokens": 2, "recent_tokens": 12}],
    },
    "no-statistics": {
        "keys": _COMMVQ,
        "values": _KIVI,
        "layers": [
            {"match": 0, "values": _DECLARED["commvq"]["values"], "sink_tokens": 2},
            {"match": 2, "keys": {"method": "kivi", "bits": 2}, "recent_tokens": 12},
        ],
    },
    **_DECLARED,
}
"""Every kind of codec; "mixed" has layers of Transformers' own, "no-statistics" groups of two sizes and cos and sin."""
KINDS = (
    "turboquant-4", "kivi-4", "mixed", "no-statistics", "polar-centred", "polarquant-rope", "qjl-outliers",
    "spectral", "spectral-prefill", "own-method",
)  # fmt: skip
"""One configuration for each way of keeping state: statistics, groups, RoPE factors, and waiting for queries."""
UNFUSED = ("turboquant-4", "spectral-prefill")
"""Configurations that run with decoded tokens too, which no codec notices but one that waits for queries."""
CASES = [*((name, True) for name in KINDS), *((name, False) for name in UNFUSED)]
FEW = [("turboquant-4", True), ("no-statistics", False), ("no-statistics", True), ("spectral-prefill", True)]
"""Cases of what hardly depends on the method."""


def label(case: tuple[str, bool]) -> str:
    return case[0] if case[1] else f"{case[0]}, decoded"


few = pytest.mark.parametrize("case", FEW, indirect=True, ids=label)
TOLERANCE = {"atol": 1e-4, "rtol": 0}


def examples(count: int) -> settings:
    """Hypothesis' settings for a few examples, the same in every run, each of which takes long."""
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


class Rotary:
    """Source of cos and sin of new tokens: the model's own while attention is fused, else those of their indices."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.layout = rope_layout(model.config, model.config.head_dim)
        self._model = model
        self.waiting: dict[int, OracleLayer] = {}
        """Layers whose codecs wait for the queries of the step, by index."""
        self.padding: list[int] = []
        """Padding of the rows of the batch, of which a cache learns while attention is fused."""
        self._used: Rope | None = None
        model.model.rotary_emb.register_forward_hook(self._remember)
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _remember(self, module: Any, args: Any, output: Rope) -> None:
        self._used = output

    def _look(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and self.fused:
            self.padding = (mask == 0).cumprod(-1).sum(-1).tolist()

    def attention(self, module: Any, query: torch.Tensor, key: Any, value: Any, *mask: Any, **options: Any) -> Any:
        """Fused attention that first shows a step's queries to an oracle's layer that waits for them."""
        if waiting := self.waiting.pop(getattr(module, "layer_idx", None), None):
            waiting.close(AttentionCall.of(query, *mask, scaling=options["scaling"]))
        return attention_forward(module, query, key, value, *mask, **options)

    @property
    def fused(self) -> bool:
        return attends_fused(self._model)

    def factors(self, start: int, states: torch.Tensor) -> Rope:
        """cos and sin, each `[B, 1, T, rotary]` as a cache layer holds keys, rounded to 16 bits."""
        used = self._used
        if not self.fused:
            used = self._model.model.rotary_emb(states, torch.arange(start, start + states.shape[2])[None])
        cos, sin = (factor.half()[:, None].expand(states.shape[0], -1, -1, -1) for factor in self.layout.factors(used))
        return cos, sin

    def places(self, group: int) -> Rope:
        """cos and sin of the first positions, `[1, group, rotary]`."""
        used = self._used
        found = self.layout.factors(self._model.model.rotary_emb(torch.zeros(1), torch.arange(group)[None]))
        self._used = used
        return found


class OracleLayer(DynamicLayer):
    """Oracle: a dense layer in which tokens that leave the window are encoded and decoded by the codec.

    It shares nothing but the codecs with the package: all operations are those of Transformers' `DynamicLayer`, and a
    second one holds the tokens' cos and sin.
    """

    def __init__(self, index: int, plan: LayerPlan, config: CompressionConfig, rotary: Rotary) -> None:
        super().__init__()
        self.index, self.plan, self.config, self.rotary = index, plan, config, rotary
        self.rope = DynamicLayer()
        self.codecs: list[Codec] = []
        self.packed = 0
        self.prepared = False
        self.learned: list[Codec] = []
        """Codecs that have measured their statistics without queries."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        for side, plan, x in (("keys", self.plan.keys, key_states), ("values", self.plan.values, value_states)):
            context = CodecContext(
                side, x.shape[-1], x.shape[1], self.index, self.config.seed, self.plan.sink_tokens, x.dtype, x.device,
                self.rotary.layout,
            )  # fmt: skip
            self.codecs.append(plan.codec()(plan.options(), context))
        self.group = math.lcm(*(codec.group for codec in self.codecs))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        prompt = not self.get_seq_length() or key_states.shape[2] > 129
        if not prompt and (self.config.quantize_generated or key_states.shape[2] > 16):
            self._flush()
        self.rope.update(*self.rotary.factors(self.get_seq_length(), key_states))
        seen = super().update(key_states, value_states)
        if prompt:
            self._flush()
        if not self.rotary.fused and self.rotary.waiting.pop(self.index, None):
            self.close(None)
        return seen

    def close(self, queries: AttentionCall | None) -> None:
        """Take the statistics of codecs that need queries from all tokens, and pack what is due."""
        first = min(self.plan.sink_tokens, self.get_seq_length())
        padding = LeftPadding(torch.tensor(found), max(found)) if (found := self.rotary.padding) else None
        for codec, x in zip(self.codecs, map(self._stored, (self.keys, self.values)), strict=True):
            if codec in self.learned:
                continue
            if codec.least_tokens():
                rope = self.rope.keys[:, 0, first :: codec.group], self.rope.values[:, 0, first :: codec.group]
                places = self.rotary.places(codec.group)
                keys = x[:, :, :first], x[:, :, first:]
                # Statistics of the backends agree up to rounding, which may put a number on the other side of a level.
                codec.native = self._backend.bind(codec).native
                codec.observe(Prompt(*keys, self.plan.recent_tokens, rope, places, queries, padding))
            else:
                codec.prepare(self._without_padding(x[:, :, first:]))
        self.prepared = True
        self._flush(self.due)

    @property
    def _backend(self) -> Backend:
        kinds = [(type(codec), codec.options, codec.context.side) for codec in self.codecs]
        return resolve_backend(self.config.backend, self.keys.device, kinds)

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens in the order in which they are stored: in rows with padding, sinks change places with it.

        In stored order it gives the tokens in their own.
        """
        order = [list(range(x.shape[2])) for _ in x]
        for row, padding in zip(order, self.rotary.padding, strict=False):
            for i in range(min(padding, self.plan.sink_tokens)):
                j = max(padding, self.plan.sink_tokens) + i
                if j < len(row):
                    row[i], row[j] = j, i
        return torch.stack([one[:, numbers] for one, numbers in zip(x, order, strict=True)])

    def _without_padding(self, x: torch.Tensor) -> torch.Tensor:
        """Stored tokens after the sinks, without those of padding, which come first."""
        if not any(self.rotary.padding):
            return x
        return torch.cat([one[:, n:] for one, n in zip(x, self.rotary.padding, strict=True)], 1)[None]

    def _flush(self, length: int | None = None) -> None:
        """Pack what is due of the first `length` tokens, by default all."""
        length = self.get_seq_length() if length is None else length
        start = min(self.plan.sink_tokens, length) + self.packed
        block = math.lcm(32, self.group) if self.codecs else 32
        leaving = max(0, length - start - self.plan.recent_tokens) // block * block
        if not leaving:
            return
        stored = [self._stored(x) for x in (self.keys, self.values)]
        if not self.prepared:
            for codec, x in zip(self.codecs, stored, strict=False):
                if codec.least_tokens() and codec.prepare(self._without_padding(x[:, :, start:]), may_wait=True):
                    self.learned.append(codec)
        if any(codec.least_tokens() and codec not in self.learned for codec in self.codecs if not self.prepared):
            self.rotary.waiting[self.index], self.due = self, length
            return
        both = []
        for codec, x in zip(self.codecs, stored, strict=True):
            tail = x[:, :, start:]
            if not self.prepared and codec not in self.learned:
                codec.prepare(self._without_padding(tail))
            begins = slice(start, start + leaving, codec.group)
            rope = (self.rope.keys[:, 0, begins], self.rope.values[:, 0, begins])
            decoded = codec.decode(self._backend.bind(codec).encode(tail[:, :, :leaving], rope), rope).to(x.dtype)
            both.append(self._stored(torch.cat([x[:, :, :start], decoded, tail[:, :, leaving:]], 2)))
        self.keys, self.values = both
        self.prepared = True
        self.packed += leaving

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        kept = min(self.packed, length - min(self.plan.sink_tokens, length))
        self.packed = kept // self.group * self.group
        self.rope.crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.rope.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.rope.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.rope.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.rope.batch_select_indices(indices)


@dataclass
class Case:
    """A configuration on a model, with fused attention on or off."""

    name: str
    model: LlamaForCausalLM
    config: CompressionConfig
    fused: bool
    rotary: Rotary

    def cache(self, **changes: Any) -> CompressedCache:
        return CompressedCache(self.model.config, self.config.model_copy(update=changes))

    def oracle(self, **changes: Any) -> Cache:
        config = self.config.model_copy(update=changes)
        plans = config.plan(["full_attention"] * LAYERS)
        return Cache(
            layers=[
                OracleLayer(index, plan, config, self.rotary) if plan.compresses else DynamicLayer()
                for index, plan in enumerate(plans)
            ]
        )

    def feed(
        self, cache: Cache, ids: torch.Tensor, sizes: list[int] | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return feed(self.model, cache, ids, sizes, mask)


def make_case(name: str, model: LlamaForCausalLM, fused: bool, rotary: Rotary) -> Case:
    rotary.waiting.clear()
    rotary.padding = []
    config = load_config({"sink_tokens": SINKS, "recent_tokens": RECENT, **CONFIGS[name]})
    return Case(name, model, config, fused, rotary)
