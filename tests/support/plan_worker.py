"""Check that repeated launches equal Triton's own; `test_plan.py` runs this in a process that compiles kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from kvcache_compress import CompressedCache
from kvcache_compress.attention.interface import AttentionName, attention_forward
from kvcache_compress.bench.layers import encoded_side, use_backend
from kvcache_compress.config import load_config
from kvcache_compress.methods.turboquant.codec import TurboQuantOptions
from kvcache_compress.storage.side import encoded
from kvcache_compress.triton_kernels.attention import launch
from kvcache_compress.triton_kernels.common import plan
from kvcache_compress.triton_kernels.common.plan import Plan
from kvcache_compress.triton_kernels.encode import launch as encode
from support.fake_driver import Launched, launches_of, use_fake_driver
from support.spectral_files import statistics_file

KERNELS = (launch.map_query_kernel, launch.attend_kernel, launch.merge_kernel)
OUTPUTS = {"p_mapped", "p_rows", "p_acc", "p_dense", "p_stats", "p_out"}
DIM = 64
ENCODED = ["turboquant-4bit", "polarquant-rope-4bit", "qjl-3bit", "polarquant-3.4bit"]
"""Presets whose kernels encode and write in one launch."""
APART = {"keys": {"method": "turboquant", "bits": 3, "estimator": "prod"}, "values": {"method": "turboquant"}}
"""Config with keys that PyTorch's operators encode."""
TURNED = {
    "keys": {"method": "spectral", "statistics": statistics_file(DIM, 32)},
    "values": {"method": "turboquant"},
}
"""Config whose queries a launch of its own turns to each group of tokens."""


def address(x: Any) -> Any:
    """Address of a tensor: repeated launches pass addresses where Triton takes tensors."""
    if isinstance(x, tuple):
        return tuple(address(part) for part in x)
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


def check_equal(ours: list[Launched], theirs: list[Launched], repeated: bool) -> None:
    """Check that code, grids and arguments are equal; a call's own tensors must be the same in all its kernels."""
    own: dict[int, int] = {}
    assert len(ours) == len(theirs) == len(KERNELS)
    for kernel, one, other in zip(KERNELS, ours, theirs, strict=True):
        assert (one.name, one.code, one.grid) == (other.name, other.code, other.grid)
        assert one.name == kernel.__name__
        for name, x, y in zip(kernel.arg_names, one.arguments, other.arguments, strict=True):
            assert not (repeated and isinstance(x, torch.Tensor)), name
            ours_at, theirs_at = address(x), address(y)
            if name in OUTPUTS or ours_at in own:
                assert ours_at % 16 == theirs_at % 16 == 0, name
                assert own.setdefault(ours_at, theirs_at) == theirs_at, name
            else:
                assert ours_at == theirs_at, (name, ours_at, theirs_at)


class Layer:
    """Keys and values with a tail that grows in a buffer, and the calls of a decode step."""

    def __init__(self, packed: int) -> None:
        sides: tuple[Literal["keys", "values"], ...] = ("keys", "values")
        self.keys, self.values = (
            encoded_side(
                "turboquant", TurboQuantOptions(bits=4), name, DIM, torch.bfloat16,
                packed=packed, windows=(4, 8), codes="random",
            )
            for name in sides
        )  # fmt: skip
        self.grow(8, 40)

    def grow(self, tokens: int, capacity: int) -> None:
        """Replace the tail by one of other tokens and capacity."""
        self.keys, self.values = (
            replace(side, tail_buffer=torch.zeros(1, 2, capacity, DIM, dtype=torch.bfloat16), tail_tokens=tokens)
            for side in (self.keys, self.values)
        )

    def step(self, count: int = 1, mask: torch.Tensor | None = None, s_aux: torch.Tensor | None = None) -> bool:
        """Check a step's launches against Triton's own; True if they repeated an earlier step's."""
        query = torch.zeros(1, 6, count, DIM, dtype=torch.bfloat16)
        call: Callable[[], torch.Tensor] = lambda: launch.attend(  # noqa: E731
            query, self.keys, self.values, mask, scaling=0.125, s_aux=s_aux
        )
        plans = self.keys.codec.kernel_side.plans
        with mock.patch.object(triton.JITFunction, "run", autospec=True, side_effect=triton.JITFunction.run) as looked:
            ours = launches_of(call)
        kept = dict(plans)
        plans.clear()
        check_equal(ours, launches_of(call), repeated=not looked.called)
        plans |= kept
        return not looked.called


class Operators(TorchDispatchMode):
    """Record PyTorch's operators that do work on a device: all but new empty tensors and views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = [x.alias_info for x in func._schema.returns]
        is_view = isinstance(out, torch.Tensor) and any(x is not None and not x.is_write for x in aliases)
        if not (is_view or "empty" in func.name()):
            self.names.append(func.name())
        return out


def decoding(capacity: int | None, chosen: str | dict[str, Any] = "turboquant-4bit") -> tuple[Any, Callable[[], None]]:
    """Filled layer of a model with a compressed cache, and a function that decodes a step with it."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": DIM, "hidden_size": 6 * DIM}
    config = LlamaConfig(num_hidden_layers=3, **sizes)
    config._attn_implementation = AttentionName("sdpa")
    preset = load_config(chosen)
    cache = CompressedCache(config, preset.model_copy(update={"max_cache_len": capacity}))
    layer = cache.layers[1]
    prompt, step = (torch.zeros(1, 2, tokens, DIM, dtype=torch.bfloat16) for tokens in (700, 1))
    cache.update(prompt, prompt, 1)
    if chosen is TURNED:  # a file's tensors begin anywhere in memory, those on a GPU at multiples of 16 bytes
        codec: Any = layer.sides["keys"].codec
        codec.means, codec.places = codec.means.clone(), codec.places.clone()
    use_backend(layer, "triton")  # only now: a prompt needs results, and the fake driver computes none
    query = torch.zeros(1, 6, 1, DIM, dtype=torch.bfloat16)
    module = SimpleNamespace(config=config, is_causal=True)

    def decode() -> None:
        keys, values = cache.update(step, step, 1)
        attention_forward(module, query, keys, values, None, scaling=0.125)

    return layer, decode


def traced(call: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Names of the kernels and of PyTorch's operators that a call runs."""
    with Operators() as operators:
        launched = launches_of(call)
    return [one.name for one in launched], operators.names


def check_launches_of_a_step() -> None:
    """A step of a layer makes four launches and runs no operator of PyTorch."""
    _, decode = decoding(None)
    decode()  # compiles the plan that later steps repeat
    for _ in range(3):
        assert traced(decode) == (["append_kernel", *(kernel.__name__ for kernel in KERNELS)], [])


def check_launches_of_static_layers() -> None:
    """A step of static capacity makes four launches too, plus encoding and storing without a kernel encoder."""
    four = ["write_slots_kernel", "map_step_kernel", "attend_kernel", "merge_kernel"]
    for preset in ENCODED:
        layer, decode = decoding(1024, preset)
        decode()
        for _ in range(layer.flush_tokens):  # one of these steps encodes
            assert traced(decode) == (four, []), preset
    _, decode = decoding(1024, TURNED)
    decode()
    assert traced(decode)[0] == [*four[:2], "turn_kernel", *four[2:]]

    layer, decode = decoding(1024, APART)
    sides = layer.sides

    def encode() -> None:
        for state in sides.values():
            encoded(state.codec, torch.zeros(1, 2, state.codec.group, DIM, dtype=torch.bfloat16))

    decode()
    keys, values = (state.codec.kernel_encoder for state in sides.values())
    assert keys is None
    assert values is not None
    kernels, operators = traced(encode)
    kernels.remove("encode_kernel")  # of the values, which steps encode while writing
    operators = [name for name in operators if "zeros" not in name]
    for _ in range(3):
        launched, ran = traced(decode)
        assert launched == [four[0], *kernels, "store_groups_kernel", *four[1:]], launched
        assert ran == operators, ran


def check_arguments_of_a_step(capacity: int | None, chosen: str | dict[str, Any]) -> None:
    """Repeated launches have Triton's code, grids and arguments, for all kernels from one flush to the next."""
    layer, decode = decoding(capacity, chosen)
    if capacity:
        layer.device = torch.device("cuda")
    seen: set[str] = set()
    repeat = Plan.run

    def run(plan: Plan, inputs: dict[str, Any], found: dict[str, Any], device: torch.device) -> None:
        assert plan.compiled
        ours = launches_of(lambda: repeat(plan, inputs, found, device))
        given = inputs | {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in plan.scratch.items()}
        theirs = launches_of(lambda: [each.first(given) for each in plan.launches])
        for each, one, other in zip(plan.launches, ours, theirs, strict=True):
            assert (one.name, one.code, one.grid) == (other.name, other.code, other.grid)
            for name, x, y in zip(each.kernel.arg_names, one.arguments, other.arguments, strict=True):
                if each.changing.get(name) not in plan.scratch:
                    assert address(x) == address(y), (one.name, name)
            seen.add(one.name)

    for _ in range(layer.flush_tokens + 1):
        decode()
    with mock.patch.object(Plan, "run", run):
        for _ in range(layer.flush_tokens):
            decode()
    expected = {"attend_kernel", "merge_kernel"}
    expected |= {"write_slots_kernel", "map_step_kernel"} if capacity else {"append_kernel", "map_query_kernel"}
    if chosen is TURNED:
        expected.add("turn_kernel")
    if capacity and chosen is APART:
        expected.add("store_groups_kernel")
    if not capacity:
        expected.add("encode_kernel" if chosen is APART else "flush_kernel")
    assert seen == expected, seen


def check_wide_numbers() -> None:
    """Triton compiles another kernel for 64-bit numbers, which the 32-bit kernel would truncate."""
    layer, _ = decoding(None)
    state = layer.sides["keys"]
    encoder, x = state.codec.kernel_encoder, torch.zeros(1, 2, 64, DIM, dtype=torch.bfloat16)
    wide = x.as_strided(x.shape, (2**31, *x.stride()[1:]))
    for given in (x, x, wide, wide, x):

        def call(given: torch.Tensor = given) -> None:
            encode.encode(encoder, given, state.store.buffers, 0)

        (ours,) = launches_of(call)
        known = dict(plan._plans)
        plan._plans.clear()
        (theirs,) = launches_of(call)
        plan._plans.update(known)
        assert (ours.name, ours.code, ours.grid) == (theirs.name, theirs.code, theirs.grid)
        assert [address(each) for each in ours.arguments] == [address(each) for each in theirs.arguments]


def check_one_merge() -> None:
    """A cache that grows to more splits needs no other `merge_kernel`, which would be compiled while it generates."""
    query = torch.zeros(1, 6, 1, DIM, dtype=torch.bfloat16)
    merges = []
    for packed in (128, 512, 2048, 4096):
        layer = Layer(packed)
        *_, merge = launches_of(lambda layer=layer: launch.attend(query, layer.keys, layer.values, scaling=0.125))
        merges.append(merge)
    splits = [merge.arguments[launch.merge_kernel.arg_names.index("splits")] for merge in merges]
    assert len({launch.next_power_of_2(count + 1) for count in splits}) > 2, splits
    assert len({merge.code for merge in merges}) == 1


def tokens(layer: Layer) -> int:
    return layer.keys.shape[2]


def main() -> None:
    use_fake_driver()
    layer = Layer(512)
    assert not layer.step()
    assert layer.step()
    layer.grow(9, 40)
    assert layer.step()
    layer.grow(16, 64)  # numbers that Triton would otherwise make constants or mark as multiples of 16
    assert layer.step()
    layer.grow(1, 1)
    assert layer.step()
    for side in (layer.keys, layer.values):  # the same tokens in other memory, with more capacity
        side.store.buffers = tuple(torch.zeros_like(x).repeat(1, 1, 2, *[1] * (x.ndim - 3)) for x in side.store.buffers)
    assert layer.step()
    layer.keys, layer.values = (replace(side, packed=384) for side in (layer.keys, layer.values))
    assert not layer.step()  # other splits
    layer.keys, layer.values = (replace(side, packed=576) for side in (layer.keys, layer.values))
    assert layer.step()  # the same number of splits, with more tokens
    layer.keys, layer.values = (replace(side, packed=480) for side in (layer.keys, layer.values))
    assert not layer.step()  # no longer whole tiles, and other splits
    assert layer.step()

    mask = torch.ones(1, 1, 2, 1024, dtype=torch.bool)
    s_aux = torch.zeros(6)
    assert not layer.step(2, mask[..., : tokens(layer)], s_aux)
    layer.grow(12, 40)
    assert layer.step(2, mask[..., : tokens(layer)], s_aux)
    assert not layer.step(2, mask[..., 1 : tokens(layer) + 1], s_aux)  # does not begin at a multiple of 16 bytes,
    assert not layer.step(2, mask[..., 3 : tokens(layer) + 3], s_aux)  # so Triton launches it each time
    assert not layer.step(2, mask[..., : tokens(layer)].bfloat16(), s_aux)
    assert not layer.step(2, None, s_aux)
    assert layer.step(2, mask[..., : tokens(layer)], s_aux)
    assert layer.step(1)
    other = Layer(512)
    assert not other.step()
    check_one_merge()
    check_launches_of_a_step()
    check_launches_of_static_layers()
    # Kernels do not run here, so their outputs stay as allocated; zeros pass the check for NaN.
    with mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros):
        for chosen in (*ENCODED, APART, TURNED):
            for capacity in (None, 1024):
                check_arguments_of_a_step(capacity, chosen)
    check_wide_numbers()
    print("all launches are as Triton's")


if __name__ == "__main__":
    main()
