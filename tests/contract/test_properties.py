"""Random sequences of operations on a cache, each followed by a comparison of all tokens with the oracle."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvcache_compress import CompressedCache

BOTH = ("keys", "values")
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


class Run:
    """A cache and its oracle, side by side."""

    def __init__(self, case: Any, capacity: int | None) -> None:
        self.case, self.capacity = case, capacity
        self.cache, self.oracle = case.cache(max_cache_len=capacity), case.oracle()
        self.batch = 2
        self.most = self.refused = 0
        self.generator = torch.Generator().manual_seed(0)

    @property
    def tokens(self) -> int:
        return int(self.oracle.get_seq_length())

    def update(self, tokens: int) -> None:
        full = self.capacity is not None and self.tokens + tokens > self.capacity
        self.refused += full
        for index, twin in enumerate(self.oracle.layers):
            keys, values = torch.randn(2, self.batch, 2, tokens, 32, generator=self.generator)
            if full:
                with pytest.raises(ValueError, match=f"max_cache_len={self.capacity}"):
                    self.cache.update(keys, values, index)
                continue
            seen = self.cache.update(keys, values, index)
            expected = twin.update(keys, values)
            if tokens <= 16:
                assert self.capacity is None or seen[0].shape[2] == self.capacity
                held = twin.get_seq_length()
                assert all(torch.allclose(x[:, :, :held], y, atol=1e-5) for x, y in zip(seen, expected, strict=True))
        self.most = max(self.most, self.cache.packed_tokens)

    def do(self, operation: str, argument: Any) -> None:
        filled = self.tokens > 0
        if operation == "update":
            self.update(argument)
        elif operation == "steps":
            for _ in range(argument):
                self.update(1)
        elif operation == "crop":
            self.cache.crop(-argument)
            if argument:
                self.oracle.crop(-argument)
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
                self.oracle.batch_select_indices(torch.tensor(rows))
        elif operation == "save":
            with tempfile.TemporaryDirectory() as folder:
                self.cache.save(Path(folder) / "cache")
                self.cache = CompressedCache.load(Path(folder) / "cache", self.case.model.config)
        elif operation == "copy":
            left, self.cache = self.cache, copy.deepcopy(self.cache)
            left.reset()
        elif operation == "offload":
            for layer in self.cache.layers:
                layer.offload()
                layer.prefetch()
        else:
            self.cache.reset()
            self.oracle = self.case.oracle()

    def compare(self, trace: list[Any]) -> None:
        for layer, twin in zip(self.cache.layers, self.oracle.layers, strict=True):
            assert layer.get_seq_length() == self.tokens, trace
            assert layer.get_mask_sizes(3) == (self.capacity or self.tokens + 3, 0), trace
            assert getattr(layer, "packed_tokens", 0) == getattr(twin, "packed", 0), trace
            if self.tokens:
                for side in BOTH:
                    ours, theirs = (getattr(one, side)[:, :, : self.tokens] for one in (layer, twin))
                    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=str(trace))
        for track in self.cache.rope_tracks:
            assert track.tokens == self.tokens, trace


NAMES = ("kivi-4", "turboquant-4", "mixed", "polarquant-rope", "no-statistics")


@pytest.mark.parametrize(
    ("case", "capacity", "kind"),
    [
        *(((name, False), None, "") for name in NAMES),
        # A static cache takes statistics of a first prompt too short to be packed, and a growing one does not.
        (("no-statistics", False), 96, ""),
        (("no-statistics", False), 1024, "static_shapes"),  # such steps do not refuse tokens at once
    ],
    indirect=["case"],
    ids=[*NAMES, "static", "static shapes"],
)
def test_any_sequence_of_operations(case: Any, capacity: int | None, kind: str, request: pytest.FixtureRequest) -> None:
    """After every operation the cache holds the same tokens as the oracle, and packs when the oracle does."""
    if kind:
        request.getfixturevalue(kind)
    packed, refused = [], []

    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(RUNS)
    def run(prompt_and_operations: tuple[int, list[tuple[str, Any]]]) -> None:
        prompt, operations = prompt_and_operations
        both = Run(case, capacity)
        trace = [("update", prompt), *operations, ("update", 50), ("update", 50)]
        for number, (operation, argument) in enumerate(trace):
            both.do(operation, argument)
            both.compare(trace[: number + 1])
        packed.append(both.most)
        refused.append(both.refused)

    run()
    assert sum(most > 0 for most in packed) > len(packed) / 3, "most sequences pack tokens"
    assert all(refused) == (capacity == 96), "all sequences end with more tokens than there is room for"
