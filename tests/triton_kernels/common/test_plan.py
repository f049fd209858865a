"""Launches that are repeated without Triton inspecting their arguments; the emulator shows what they compute."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from support.files.spectral_files import statistics_file
from support.kernels.attention_cases import BARS, BF16, Case, attended, error, segments, tq
from support.kernels.device import EMULATED
from support.kernels.segment_makers import make_side
from support.models.small_model import small_config
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache_compress import CompressedCache
from kvcache_compress.attention.interface import attention_forward, fused_name
from kvcache_compress.backends import torch as reference
from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.bench.layers import use_backend
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.config import load_config
from kvcache_compress.storage import packed_store
from kvcache_compress.storage.adaptive.eras import Era
from kvcache_compress.triton_kernels.attention import launch
from kvcache_compress.triton_kernels.common.plan import Launch, Plan
from kvcache_compress.triton_kernels.encode import launch as encode

emulated = pytest.mark.skipif(not EMULATED, reason="only the emulator tells what was launched")
CASE = Case(tq(4), tq(3), packed=512, dtype=BF16)
PRESETS = ("turboquant-4bit", "polarquant-rope-4bit", "qjl-3bit", "polarquant-3.4bit")
TURBOQUANT = {"method": "turboquant"}
CONFIGS: dict[str, Any] = dict(zip(PRESETS, PRESETS, strict=True)) | {
    "apart": {"keys": TURBOQUANT | {"bits": 3, "estimator": "prod"}, "values": TURBOQUANT},
    "turned": {"keys": {"method": "spectral", "statistics": statistics_file(64)}, "values": TURBOQUANT},
}
"""PyTorch's operators encode the keys of `apart`; those of `turned` need one more kernel, `turn_kernel`."""


LAUNCH, RUN = triton.JITFunction.run, Plan.run


def run(plan: Plan, inputs: dict[str, Any], pointers: dict[str, Any], device: torch.device) -> None:
    """Run a plan; what it repeats must be the code that Triton would choose for these inputs."""
    given = inputs | {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in plan.scratch.items()}
    for one in plan.launches if plan.compiled else ():
        changing = {name: given[source] for name, source in one.changing.items()}
        assert LAUNCH(one.kernel, grid=one.grid, warmup=True, **one.constant, **changing) is one.compiled
    RUN(plan, inputs, pointers, device)


class Traced(TorchDispatchMode):
    """A call's result and what it ran: kernels, those among them that Triton launched itself, and PyTorch's operators.

    Views, new empty tensors, and how the emulator reads tensors do not count as operators.
    """

    def __init__(self, emulator: Any, call: Callable[[], Any]) -> None:
        super().__init__()
        self.operators: list[str] = []
        first = len(emulator.launches)
        by_triton = mock.patch.object(triton.JITFunction, "run", autospec=True, side_effect=LAUNCH)
        with self, mock.patch.object(Plan, "run", run), by_triton as launches:
            self.result = call()
        self.kernels = [one.name for one in emulator.launches[first:]]
        self.by_triton = [one.args[0].__name__ for one in launches.call_args_list]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or "empty" in func.name() or func.name().startswith("aten::set_")):
            self.operators.append(func.name())
        return func(*args, **(kwargs or {}))


def repeats(emulator: Any, sides: Any, count: int = 1, mask: Any = None, s_aux: Any = None) -> bool:
    """Attend as the reference does; True if all launches are repeated, False if Triton makes all of them."""
    query, call = torch.randn(2, 6, count, 64).to(BF16), {"scaling": 0.125, "s_aux": s_aux}
    traced = Traced(emulator, lambda: launch.attend(AttentionCall.of(query, mask, **call), *sides))
    assert error(traced.result, reference.attend(AttentionCall.of(query.float(), mask, **call), *sides)) <= BARS[BF16]
    assert traced.kernels == ["map_query_kernel", "attend_kernel", "merge_kernel"]
    assert traced.by_triton in ([], traced.kernels)
    return not traced.by_triton


@emulated
def test_steps_of_one_kind_repeat_the_first(emulator: Any) -> None:
    """Tails, memory and numbers of packed tokens may change; other splits, or a tile filled in part, are new kinds."""
    sides = segments(CASE)
    assert [repeats(emulator, sides) for _ in range(2)] == [False, True]
    for tokens, capacity in ((9, 40), (16, 64), (1, 1)):  # Triton would mark 16 as a multiple, and make 1 a constant
        tails = torch.randn(2, 2, 2, capacity, 64).to(BF16)
        sides = [replace(one, tail_tokens=tokens, tail_buffer=x) for one, x in zip(sides, tails, strict=True)]
        assert repeats(emulator, sides)
    for store in (side.store for side in sides):  # the same tokens in other memory, with more capacity
        store.buffers, store.capacity = tuple(torch.cat([x, x[:, :, :5]], 2) for x in store.buffers), store.capacity + 5
    assert repeats(emulator, sides)
    for packed, known in ((128, False), (192, True), (160, False), (150, True), (256, False)):
        assert repeats(emulator, [replace(side, packed=packed) for side in sides]) == known
    assert not repeats(emulator, segments(CASE)), "layers do not share launches"
    splits = {one.grid[0] for one in emulator.launches if one.name == "attend_kernel"}
    merges = {id(one.program) for one in emulator.launches if one.name == "merge_kernel"}
    assert (len(splits), len(merges)) == (3, 1), "a cache that grows to more splits would compile while it generates"


@emulated
def test_steps_with_masks_repeat_those_of_the_same_kind(emulator: Any) -> None:
    sides = [replace(side, packed=160) for side in segments(CASE)]
    masks, s_aux = torch.rand(2, 1, 2, 512) > 0.3, torch.randn(6)

    def masked(first: int) -> bool:
        return repeats(emulator, sides, 2, masks[..., first : first + sides[0].shape[2]], s_aux)

    assert not masked(0)
    sides = [replace(side, tail_tokens=4) for side in sides]
    assert masked(0)
    # Triton launches each mask that does not begin at a multiple of 16 bytes.
    assert [masked(first) for first in (1, 3, 1, 16)] == [False, False, False, True]
    masks = masks[..., :167].contiguous()
    assert masked(0)
    masks = masks.mT.contiguous().mT  # any strides
    assert masked(0)
    assert not repeats(emulator, sides, 2, masks.to(BF16), s_aux)
    assert not repeats(emulator, sides, 2, None, s_aux)
    assert masked(0)
    assert [repeats(emulator, sides) for _ in range(2)] == [False, True]


@emulated
def test_steps_over_eras_repeat_until_a_new_one(emulator: Any) -> None:
    keys, values = segments(replace(CASE, eras=(64, 256)))
    assert [repeats(emulator, (keys, values)) for _ in range(2)] == [False, True]
    newer = replace(keys, eras=(*keys.eras, Era(384, make_side(*CASE.keys, "keys", 64, 64).codec)))
    assert [repeats(emulator, (view, values)) for view in (newer, newer, keys, keys)] == [False, True, False, True]
    programs = {id(one.program) for one in emulator.launches if one.name == "attend_kernel"}
    assert len(programs) == 1, "a new era would compile while the model generates"


@emulated
def test_numbers_of_64_bits_take_another_kernel(emulator: Any) -> None:
    """The kernel for 32 bits would truncate them, so Triton launches each of them."""
    codec, x = make_side(*tq(4), "keys", 64, 64).codec, torch.randn(1, 2, 64, 64).to(BF16)
    wide = x.as_strided(x.shape, (2**31, *x.stride()[1:]))
    codes, repeated = codec.encode(x), []
    for given in (x, x, wide, wide, x):
        traced = Traced(emulator, lambda given=given: encode.encoded(codec.kernel_encoder, given, codec.fields))
        assert all(map(torch.equal, traced.result, codes))
        repeated.append(not traced.by_triton)
    assert repeated[1:] == [True, False, False, True]
    assert emulator.launches[1].program is not emulator.launches[2].program


def decoding(emulator: Any, chosen: Any, capacity: int | None) -> tuple[Any, Any, Callable[[bool], Traced]]:
    """Two filled layers, and a function that adds a token to both: with kernels, which attend too, and without."""
    torch.manual_seed(0)
    config = small_config(3, num_attention_heads=6, head_dim=64, hidden_size=384)
    config._attn_implementation = fused_name("sdpa")
    module = SimpleNamespace(config=config, is_causal=True)
    preset = load_config(chosen).model_copy(update={"max_cache_len": capacity, "backend": "torch"})
    caches = [CompressedCache(config, preset) for _ in range(2)]
    prompt = torch.randn(2, 1, 2, 719, 64).to(BF16)  # the second step after it is the first that flushes
    for cache in caches:
        cache.update(*prompt, 1)
    layer, twin = (cache.layers[1] for cache in caches)
    codec = layer.sides["keys"].codec
    # A file's tensors begin anywhere in memory, those on a GPU at multiples of 16 bytes.
    vars(codec).update({name: x.clone() for name, x in vars(codec).items() if isinstance(x, torch.Tensor)})
    use_backend(layer, "triton")

    def decode(attends: bool) -> Traced:
        keys, values, query = *torch.randn(2, 1, 2, 1, 64).to(BF16), torch.randn(1, 6, 1, 64).to(BF16)

        for cache in caches:
            cache.receive_positions(1, tuple(torch.rand(2, 1, 1, 64).to(BF16)), 1)

        def step() -> Any:
            views = caches[0].update(keys, values, 1)
            return attention_forward(module, query, *views, None, scaling=0.125)[0] if attends else None

        traced, _ = Traced(emulator, step), caches[1].update(keys, values, 1)
        if attends:
            expected = attended(layer.views(), AttentionCall.of(query.float(), scaling=0.125), BACKENDS["torch"])
            assert error(traced.result, expected) <= BARS[BF16]
        return traced

    return layer, twin, decode


@emulated
@pytest.mark.parametrize("capacity", [None, 1024], ids=["growing", "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_repeats_all_launches(name: str, capacity: int | None, emulator: Any, monkeypatch: Any) -> None:
    """From one flush to the next: the same launches, and no operator but two copies to growing tails.

    Keys encoded apart take operators too.
    """
    monkeypatch.setattr(packed_store, "SLACK", 1 / 8)  # room for a flush: launches are planned anew in new buffers
    layer, twin, decode = decoding(emulator, CONFIGS[name], capacity)
    keys, apart, turned = layer.sides["keys"].codec, name == "apart", name == "turned"
    group = torch.zeros(1, 2, keys.group, 64, dtype=BF16)
    alone = Traced(emulator, lambda: BACKENDS["triton"].encoded(keys, group) if apart else None)
    attending = ["turn_kernel" if turned else "map_query_kernel", "attend_kernel", "merge_kernel"]
    flushing, writing = [*alone.kernels, "encode_kernel"] if apart else ["encode_kernel"] * 2, list[str]()
    if capacity:
        flushing, writing = [], ["step_kernel", *alone.kernels]
    decode(True)
    assert decode(True).kernels == flushing + writing + attending
    for left in reversed(range(layer.flush_tokens)):
        attends, flushes = left in (0, layer.flush_tokens - 1), left == 0
        traced = decode(attends)
        assert traced.kernels == flushing * flushes + writing + attending * attends
        assert traced.by_triton == [kernel for kernel in traced.kernels if kernel in alone.kernels]
        if not (apart if capacity else flushes):
            assert traced.operators == ([] if capacity else ["aten::copy_"] * 2)
    for ours, theirs in zip(layer.views(), twin.views(), strict=True):
        # A token that is wrong or lies elsewhere is an error of 0.03, a flipped code one of 0.001.
        assert error(ours.dense(), theirs.dense()) <= 0.01


@pytest.mark.parametrize("moved", [False, True])
def test_a_lane_table_that_the_compiler_moves_is_refused(moved: bool) -> None:
    """A launch looks at what was compiled for its device; one that is refused is not repeated."""
    line = "ttg.convert_layout %8 : tensor<1x1xi32, #blocked> -> tensor<1x1xi32, #mma>" if moved else "tt.return"
    compiled = SimpleNamespace(
        name="attend", hash=f"moved: {moved}", asm={"ptx": "mov.u32 %r1, %laneid;", "ttgir": line}
    )
    kernel = mock.MagicMock(arg_names=["p_x"])
    kernel.__getitem__.return_value.return_value = compiled
    launch = Launch((kernel, (1, 1, 1), {"p_x": torch.zeros(1)}), {})
    for _ in range(2):
        refused = pytest.raises(RuntimeError, match=r"attend moves a tile \[1, 1\] between lanes")
        with refused if moved else nullcontext():
            launch.first({})
    assert launch.compiled is (None if moved else compiled)
