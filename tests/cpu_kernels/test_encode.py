"""The C++ encoders against their torch twins: codes to the bit, stored scalars to one unit in the last place."""

import itertools
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from support.kernels.encode_cases import SIDES, assert_equal_fields, unit_vectors
from support.kernels.segment_makers import make_codec
from support.method_cases import half_layout, random_track
from support.models.small_model import method_config, small_model
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache_compress import CompressedCache
from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.codecs.quantizers import polar_pairs, polar_tree, scalar
from kvcache_compress.codecs.quantizers.lloyd_max import lloyd_max_levels, outward, uniform_levels
from kvcache_compress.cpu_kernels.encode import launch as encode
from kvcache_compress.methods import kivi
from kvcache_compress.methods.commvq import additive
from kvcache_compress.methods.polarquant.codebooks import offline_codebook, online_codebook
from kvcache_compress.methods.spectral.moments import attention_costs

pytestmark = pytest.mark.usefixtures("built")

IN_CPP = ("turboquant", "kivi", "qjl", "polarquant_rope", "polarquant_recursive", "commvq", "spectral")
CASES = [entry for entry in SIDES if entry[0] in IN_CPP]
ORDERS = (torch.clone, outward)
"""Codebooks: levels in the order of their codes."""


@pytest.mark.parametrize("bits", range(1, 7))
def test_levels(bits: int) -> None:
    widths = ((8, 64, 96), (48, 72, 128), (64, 80, 256))[bits % 3]
    for order, kind, width in itertools.product(ORDERS, get_args(scalar.Scalar), widths):
        levels = order((lloyd_max_levels if width % 16 else uniform_levels)(width, bits).float())
        z, norm = unit_vectors(width, levels)
        z[0, 0, 0] = -z[0, 0, 1]
        norm[0, 0, 1] = 1e6
        expected = scalar.quantize(z, norm, levels, bits, kind)
        assert_equal_fields(encode.quantize_levels(z, norm, levels, bits, kind), expected)


@pytest.mark.parametrize("bits", [1, 2, 3, 6])
@pytest.mark.parametrize("order", ORDERS, ids=["ascending", "outward"])
def test_ties_take_the_level_below(order: Callable[[torch.Tensor], torch.Tensor], bits: int) -> None:
    """Numbers on a boundary get the level below: all boundaries, adjacent floats, and numbers beyond all levels."""
    levels = order(lloyd_max_levels(64, bits).float())
    bounds = scalar.boundaries(levels)
    infinity = torch.full_like(bounds, torch.inf)
    near = torch.cat([bounds, bounds.nextafter(infinity), bounds.nextafter(-infinity), -infinity, infinity])
    z = torch.cat([near, near.new_zeros(-len(near) % 64)]).view(-1, 64)
    ours = encode.quantize_levels(z, z[:, 0].contiguous(), levels, bits, "norm")
    assert all(map(torch.equal, ours[:-1], scalar.quantize(z, z[:, 0], levels, bits, "norm")[:-1]))


SHAPES = [(128, 32, 1), (72, 16, 1), (64, 1, 32), (80, 16, 1), (96, 1, 16), (80, 1, 16)]


@pytest.mark.parametrize(
    ("bits", "width", "tokens", "channels"), [(1 + (i + j) % 6, *SHAPES[i]) for i in range(6) for j in (0, 2, 3)]
)
def test_groups(bits: int, width: int, tokens: int, channels: int) -> None:
    x = torch.randn(2, 2, 64, width, generator=torch.Generator().manual_seed(bits))
    x[0, 0, :32, :32] = 3.0
    x[1, 1, 40] *= 1e4
    grouped = x.unflatten(2, (-1, tokens)) if tokens > 1 else x.unflatten(3, (-1, channels))
    axis = 3 if tokens > 1 else 4
    zero = grouped.amin(axis).half()
    scale = ((grouped.amax(axis) - grouped.amin(axis)) / (2**bits - 1)).half()
    x[0, 1, 3, 5] = torch.nan
    expected = kivi.quantize(x, scale, zero, bits, tokens, channels)
    assert_equal_fields(encode.quantize_groups(x, scale, zero, bits, tokens, channels), expected)


@pytest.mark.parametrize(
    ("pairs", "angle_bits", "radius_bits"), [(8, 2, 6), (40, 3, 5), (64, 4, 4), (8, 5, 3), (64, 6, 2), (40, 5, 4)]
)
def test_pairs(pairs: int, angle_bits: int, radius_bits: int) -> None:
    """Points in all directions, on axes and diagonals, and zeros of either sign; radii below and beyond the cells."""
    turns = torch.linspace(-4, 4, 6 * pairs).view(2, 1, 3, pairs)
    real, imaginary = turns.cos(), turns.sin()
    signs = torch.tensor([0.0, -0.0, 1.0, -1.0])
    real[1, 0, 0], imaginary[1, 0, 0] = signs.repeat(pairs // 4), signs.repeat_interleave(4).repeat(4)[:pairs]
    steps = torch.linspace(-2, 66, 6 * pairs).view(2, 1, 3, pairs)
    steps[0, 0, 1] = steps[0, 0, 1].round()
    real[1, 0, 1, 3], imaginary[1, 0, 2, 3], steps[1, 0, 1, 4] = torch.nan, torch.nan, torch.nan
    given = real, imaginary, steps, polar_pairs.quarter_bounds(angle_bits), angle_bits, radius_bits
    assert_equal_fields(encode.quantize_pairs(*given), polar_pairs.quantize(*given))


@pytest.mark.parametrize(
    ("dim", "bits"),
    [
        *((32, (2,)), (48, (6, 5, 4, 1)), (64, (3, 2, 3)), (64, (4, 3, 2)), (80, (4, 3, 2)), (96, (2,))),
        *((112, (6, 5, 4, 1)), (128, (4, 3, 2)), (128, (6, 5, 4, 1)), (256, (3, 2, 3)), (256, (4, 3, 2))),
    ],
)
def test_tree(dim: int, bits: tuple[int, ...]) -> None:
    """Online codebooks with arbitrary boundaries; vectors with zeros and NaN."""
    levels = (dim & -dim).bit_length() - 1
    bits = (bits + bits[-1:] * levels)[:levels]
    tree = polar_tree.polar_tree(dim, bits)
    y = torch.randn(2, 3, 37, dim, generator=torch.Generator().manual_seed(dim))
    found = zip(bits, polar_tree.angles(y, levels), strict=True)
    books = tuple(online_codebook(angles.flatten(), own, i == 0, 0) for i, (own, angles) in enumerate(found))
    y[0, 0, 3], y[0, 1, 4, : dim // 2], y[1, 1, 5, 7] = 0.0, 0.0, torch.nan
    ours, theirs = encode.quantize_tree(y, tree, books), polar_tree.encode(y, tree, books)
    assert_equal_fields(ours[0], theirs[0])
    for mine, yours in zip(ours[1:], theirs[1:], strict=True):
        assert torch.equal(mine.nan_to_num(7.0), yours.nan_to_num(7.0))
        assert mine.isnan().any()


@pytest.mark.parametrize("bits", [1, 4, 6])
def test_angles_on_boundaries(bits: int) -> None:
    """Angles on all boundaries of the circle and adjacent floats, with axes in either order."""
    book = offline_codebook(1, bits)
    tree = polar_tree.polar_tree(32, (bits,))
    cos, sin = book.bounds.unbind(-1)
    near = [cos, cos.nextafter(2 * cos), cos.nextafter(0 * cos), -cos]
    x, y = torch.cat(near), torch.cat([sin, sin, sin.nextafter(2 * sin), -sin])
    pairs = torch.stack([x, y]).unflatten(1, (-1, min(16, len(x))))
    pairs = torch.nn.functional.pad(pairs, (0, 16 - pairs.shape[-1]))
    z = torch.cat([*pairs], -1)
    assert_equal_fields(encode.quantize_tree(z, tree, (book,))[0], polar_tree.encode(z, tree, (book,))[0])


@pytest.mark.parametrize(
    ("width", "centres", "paired"),
    [
        *((10, 2, True), (64, 4, True), (10, 8, True), (64, 64, True), (10, 64, True)),
        *((10, 2, False), (48, 4, False), (64, 8, False), (10, 64, False), (64, 64, False), (48, 256, False)),
    ],
)
def test_nearest(width: int, centres: int, paired: bool) -> None:
    """The nearest rows of one table, or sums of two rows of two, among equal ones and zeros."""
    generator = torch.Generator().manual_seed(centres)
    x = torch.randn(2, 3, 50, width, generator=generator)
    tables = torch.randn(2, 3, 1 + paired, centres, width, generator=generator)
    costs = torch.randn(2, 3, *[centres] * (1 + paired), generator=generator)
    tables[0, 1, 0, 1], tables[1, 2], costs[0, 1], costs[1, 2] = tables[0, 1, 0, 0], 0.0, 1.0, 0.0
    spoil(x)
    ours, theirs = encode.nearest(x, tables, costs), additive.nearest(x, tables, costs)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0, equal_nan=True)


def spoil(x: torch.Tensor) -> None:
    """Put zeros, NaN or infinity into some vectors of `x` `[2, 3, 50, w]`."""
    x[0, 0, 3], x[0, 1, 4, 2], x[1, 1, 5, 0], x[1, 2, 6, 1] = 0.0, torch.nan, torch.inf, -torch.inf


@pytest.mark.parametrize(
    ("method", "options", "side", "dtype", "head_dim"),
    [
        (*case, (torch.float32, torch.bfloat16, torch.float16)[i % 3], (64, 96)[i // 3 % 2])
        for i, case in enumerate(CASES)
    ],
)
def test_codecs_encode_alike(method: str, options: Any, side: Any, dtype: torch.dtype, head_dim: int) -> None:
    codec = make_codec(method, options, side, head_dim, dtype=dtype, layout=half_layout(head_dim))
    x = torch.randn(2, 2, 256, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 1, 5] = 0.0
    codec.prepare(x)
    part = x[:, :, 64:192]
    rope = random_track(half_layout(head_dim), 2, 256, 64, codec.group).read(0, 128)
    expected, cpp = codec.encode(part, rope), BACKENDS["cpp"].bind(codec)
    assert_equal_fields(cpp.encode(part, rope), expected)
    for strided in (part.transpose(1, 2).contiguous().transpose(1, 2), part.mT.contiguous().mT):
        assert_equal_fields(cpp.encode(strided, rope), expected)
    empty = cpp.encode(part[:0], (rope[0][:0], rope[1][:0]))
    assert [(x.shape, x.dtype) for x in empty] == [(x[:0].shape, x.dtype) for x in expected]


def test_codes_do_not_depend_on_threads() -> None:
    levels = lloyd_max_levels(64, 3).float()
    z, norm = torch.randn(2, 3, 1000, 64) / 8, torch.rand(2, 3, 1000)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(encode.quantize_levels(z, norm, levels, 3, "unbiased"))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize(
    ("method", "taken"),
    [
        ("turboquant", ["quantize_levels", "quantize_trellis"]),
        ("kivi", ["quantize_groups"] * 2),
        ("qjl", ["quantize_levels", "quantize_groups"]),
        ("polarquant_rope", ["quantize_pairs", "quantize_levels"]),
        ("polarquant_recursive", ["quantize_tree"] * 2),
        ("commvq", ["subtract_nearest"] * 8),
    ],
)
def test_caches_take_it(method: str, taken: list[str]) -> None:
    """Caches encode prompts and flushed tokens in C++, also those that need gradients, but not with torch."""
    config, model = {**method_config(method), "sink_tokens": 4, "recent_tokens": 8}, small_model()
    packed = {}
    prompt, step = (torch.randn(1, 2, count, 32, requires_grad=method == "turboquant") for count in (64, 1))
    for backend in ("torch", "auto", "cpp"):
        cache = CompressedCache(model.config, {**config, "backend": backend})
        with _Operators() as operators:
            cache.update(prompt, prompt, 0)
            for _ in range(33):
                cache.update(step, step, 0)
        calls = [name for name in operators.names if name in taken]
        assert calls == ([] if backend == "torch" else 2 * taken)
        packed[backend] = cache.layers[0].packed_tokens
    assert packed == dict.fromkeys(packed, 64)


class _Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition("::")[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [21, 100, 345])
def test_costs_of_attention(tokens: int) -> None:
    """Sums of p (1 - p) by key and by query and group, of queries at any positions and a last group that is cut."""
    query, keys = torch.randn(2, 12, 16), torch.randn(2, tokens, 16)
    at = torch.randint(16, tokens, (12,)).index_fill(0, torch.tensor([3]), tokens - 1)
    arguments = query, keys, at, 1.5, 4, 10, 32
    found, expected = encode.attention_costs(*arguments), attention_costs(*arguments)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.sum() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
