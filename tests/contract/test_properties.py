"""Random sequences of operations on a cache, compared with a model that keeps every token in a plain tensor.

The model has one dense tensor per side. It follows the documented rules of packing, and replaces packed tokens by those
that the codec, called directly, decodes.
"""

from __future__ import annotations

import copy
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.small_model import HEAD_DIM, HEADS, method_config, small_config

from kvcache_compress import CompressedCache
from kvcache_compress.backends.choice import resolve_backend
from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.config import LayerPlan, load_config
from kvcache_compress.modeling.rope import rope_layout, rotary_embedding

CONFIG = small_config(3)
ROPE = rope_layout(CONFIG, HEAD_DIM)
LAYERS = 3
BOTH = ("keys", "values")


def factors(rows: int, start: int, stop: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the groups at these positions, `[B, T / group, rotary]`, rounded to 16 bits as in a cache."""
    embedding = rotary_embedding(CONFIG)(torch.zeros(1), torch.arange(start, stop, group)[None])
    cos, sin = (part.half().expand(rows, -1, -1) for part in ROPE.factors(embedding))
    return cos, sin


class LayerModel:
    """Model of one layer: tokens `[B, H, T, D]` of both sides that a cache must return, `packed` of them decoded."""

    def __init__(self, index: int, plan: LayerPlan, seed: int) -> None:
        self.index, self.plan, self.seed = index, plan, seed
        self.reset()

    def reset(self) -> None:
        self.x = {side: torch.zeros(0, HEADS, 0, HEAD_DIM) for side in BOTH}
        self.packed = 0
        self.prepared = False
        self.codecs = {}
        for side in BOTH if self.plan.compresses else ():
            chosen = self.plan.side(side)
            context = CodecContext(
                side,
                HEAD_DIM,
                HEADS,
                self.index,
                self.seed,
                self.plan.sink_tokens,
                torch.float32,
                torch.device("cpu"),
                ROPE,
            )
            self.codecs[side] = chosen.codec()(chosen.options(), context)
        self.group = math.lcm(*(codec.group for codec in self.codecs.values())) if self.codecs else 1
        kinds = [(type(codec), codec.options, side) for side, codec in self.codecs.items()]
        self.backend = resolve_backend("auto", torch.device("cpu"), kinds)

    @property
    def tokens(self) -> int:
        return self.x["keys"].shape[2]

    @property
    def sinks(self) -> int:
        return min(self.tokens, self.plan.sink_tokens)

    def update(self, new: dict[str, torch.Tensor]) -> None:
        prompt = not self.tokens or new["keys"].shape[2] > 128
        if not prompt:
            self.flush()
        if self.tokens == 0 and len(self.x["keys"]) != len(new["keys"]):
            self.reset()
            self.x = new
        else:
            self.x = {side: torch.cat([self.x[side], new[side]], 2) for side in BOTH}
        if prompt:
            self.flush()

    def flush(self) -> None:
        block = math.lcm(32, self.group)
        leaving = max(0, self.tokens - self.sinks - self.packed - self.plan.recent_tokens) // block * block
        if not self.codecs or not leaving:
            return
        start = self.sinks + self.packed
        for side, codec in self.codecs.items():
            x = self.x[side]
            if not self.prepared:
                codec.prepare(x[:, :, start:])
            rope = factors(len(x), start, start + leaving, codec.group)
            decoded = codec.decode(self.backend.bind(codec).encode(x[:, :, start : start + leaving], rope), rope)
            self.x[side] = torch.cat([x[:, :, :start], decoded, x[:, :, start + leaving :]], 2)
        self.prepared = True
        self.packed += leaving

    def crop(self, count: int) -> None:
        kept = max(0, self.tokens - count)
        self.x = {side: x[:, :, :kept] for side, x in self.x.items()}
        self.packed = min(self.packed, kept - self.sinks) // self.group * self.group

    def rows(self, rows: list[int]) -> None:
        self.x = {side: x[rows] for side, x in self.x.items()}


OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.sampled_from([1, 1, 1, 2, 7, 16, 17, 33, 50, 80, 128, 129, 150])),
    st.tuples(st.just("steps"), st.integers(5, 36)),
    st.tuples(st.just("crop"), st.sampled_from([0, 1, 3, 9, 20, 45, 90, 400])),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 99), min_size=1, max_size=3)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 99), min_size=1, max_size=3)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.sampled_from(["save", "copy", "reset", "offload"]), st.just(0)),
)
RUNS = st.tuples(st.sampled_from([70, 70, 45, 20, 3]), st.lists(OPERATIONS, min_size=2, max_size=12))
CONFIGS: dict[str, dict[str, Any]] = {
    "kivi": method_config("kivi"),
    "commvq": method_config("commvq", 3),
    "turboquant-3.5": {**method_config("turboquant"), "keys": {"method": "turboquant", "bits": 3.5, "center": "on"}},
    "mixed": {
        **method_config("qjl"),
        "layers": [
            {"match": 1, "keys": method_config("commvq", 3)["keys"], "sink_tokens": 2},
            {"match": 2, "keys": {"method": "kivi", "bits": 2}, "recent_tokens": 12},
        ],
    },
    "polarquant_recursive": method_config("polarquant_recursive"),
    # Only a static cache takes statistics of a first prompt too short to be packed: here none are needed.
    "static": {
        "keys": {"method": "polarquant_recursive", "radius_bits": 16, "center": "off"},
        "values": {"method": "polarquant_recursive", "radius_bits": 16},
        "sink_tokens": 4,
        "recent_tokens": 8,
        "layers": [
            {"match": 1, "keys": method_config("commvq", 3)["keys"], "sink_tokens": 2},
            {"match": 2, "values": {"method": "kivi", "bits": 2}, "recent_tokens": 12},
        ],
        "max_cache_len": 96,
    },
    "mixed-none": {**method_config("polarquant_rope"), "layers": [{"match": 1, "method": "none"}]},
}
CONFIGS["static shapes"] = {**CONFIGS["static"], "max_cache_len": 1024}  # such steps do not refuse tokens at once


class Run:
    """A cache and its model, side by side."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.cache = CompressedCache(CONFIG, config)
        loaded = load_config(config)
        self.capacity = loaded.max_cache_len
        plans = loaded.plan(["full_attention"] * LAYERS)
        self.models = [LayerModel(index, plan, loaded.seed) for index, plan in enumerate(plans)]
        self.batch = 2
        self.most = self.refused = 0
        self.generator = torch.Generator().manual_seed(0)

    def update(self, tokens: int) -> None:
        full = self.capacity is not None and self.models[0].tokens + tokens > self.capacity
        for index, model in enumerate(self.models):
            keys, values = torch.randn(2, self.batch, HEADS, tokens, HEAD_DIM, generator=self.generator)
            if full:
                self.refused += 1
                with pytest.raises(ValueError, match=f"max_cache_len={self.capacity}"):
                    self.cache.update(keys, values, index)
                continue
            seen = dict(zip(BOTH, self.cache.update(keys, values, index), strict=True))
            model.update({"keys": keys, "values": values})
            if tokens <= 16:
                assert self.capacity is None or seen["keys"].shape[2] == self.capacity
                assert all(
                    torch.allclose(x[:, :, : model.tokens], model.x[side], atol=1e-5) for side, x in seen.items()
                )
        self.most = max(self.most, self.cache.packed_tokens)

    def do(self, operation: str, argument: Any) -> None:
        filled = self.models[0].tokens > 0
        if operation == "update":
            self.update(argument)
        elif operation == "steps":
            for _ in range(argument):
                self.update(1)
        elif operation == "crop":
            self.cache.crop(-argument)
            for model in self.models:
                model.crop(argument)
        elif operation in ("reorder", "select", "repeat"):
            rows = [row for row in range(self.batch) for _ in range(argument)] if operation == "repeat" else argument
            rows = [row % self.batch for row in rows][:4]
            if operation == "repeat":
                if self.batch * argument > 4:
                    return
                self.cache.batch_repeat_interleave(argument)
            elif operation == "reorder":
                self.cache.reorder_cache(torch.tensor(rows))
            else:
                self.cache.batch_select_indices(torch.tensor(rows))
            if filled:
                self.batch = len(rows)
                for model in self.models:
                    model.rows(rows)
        elif operation == "save":
            with tempfile.TemporaryDirectory() as folder:
                self.cache.save(Path(folder) / "cache")
                self.cache = CompressedCache.load(Path(folder) / "cache", CONFIG)
        elif operation == "copy":
            left, self.cache = self.cache, copy.deepcopy(self.cache)
            left.reset()
        elif operation == "offload":
            for layer in self.cache.layers:
                layer.offload()
                layer.prefetch()
        else:
            self.cache.reset()
            for model in self.models:
                model.reset()

    def compare(self, trace: list[Any]) -> None:
        for layer, model in zip(self.cache.layers, self.models, strict=True):
            assert layer.get_seq_length() == model.tokens, trace
            assert layer.get_mask_sizes(3) == (self.capacity or model.tokens + 3, 0), trace
            if model.codecs:
                assert layer.packed_tokens == model.packed, trace
            if model.tokens:
                for side in BOTH:
                    torch.testing.assert_close(
                        getattr(layer, side), model.x[side], atol=1e-5, rtol=1e-5, msg=str(trace)
                    )
        for track in self.cache.rope_tracks:
            assert track.tokens == self.models[0].tokens, trace


@pytest.mark.parametrize("name", CONFIGS)
def test_any_sequence_of_operations(name: str, request: pytest.FixtureRequest) -> None:
    """After every operation the cache holds the same tokens as the model, and packs when the model does."""
    if name == "static shapes":
        request.getfixturevalue("static_shapes")
    packed, refused = [], []

    @settings(
        max_examples=8 if "static" in name else 12,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(RUNS)
    def run(prompt_and_operations: tuple[int, list[tuple[str, Any]]]) -> None:
        prompt, operations = prompt_and_operations
        both = Run(CONFIGS[name])
        trace = [("update", prompt), *operations, ("update", 50), ("update", 50)]
        for number, (operation, argument) in enumerate(trace):
            both.do(operation, argument)
            both.compare(trace[: number + 1])
        packed.append(both.most)
        refused.append(both.refused)

    run()
    assert sum(most > 0 for most in packed) > len(packed) / 3, "most sequences pack tokens"
    assert all(refused) == (name == "static"), "all sequences end with more tokens than there is room for"
