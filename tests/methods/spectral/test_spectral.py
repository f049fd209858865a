"""Spectral keys: exact anchoring, invariance, bits where they count, statistics and loss of models, and the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.spectral_files import coded_statistics, loss_of_keys, random_statistics, statistics_file
from support.method_cases import half_layout, make_codec
from support.models.family_cases import build
from support.models.saved_model import saved_model
from support.models.small_model import small_config
from support.models.toy_tokenizers import Letters
from transformers import AutoConfig
from typer.testing import CliRunner

from kvcache_compress import CompressedCache, SpectralCache
from kvcache_compress.cache.calibration import CONTEXT, calibrate_spectral
from kvcache_compress.cli import app
from kvcache_compress.codecs.quantizers import digits
from kvcache_compress.methods.spectral.moments import attention_costs
from kvcache_compress.methods.spectral.statistics_file import write_statistics
from kvcache_compress.methods.spectral.transform import mean_table, spectral_basis
from kvcache_compress.modeling.rope import Rope


def _options(bits: float) -> Callable[[int], dict[str, Any]]:
    return lambda head_dim: {"bits": bits, "statistics": statistics_file(head_dim)}


_SIDE = {"method": "spectral", "bits": 3, "statistics": statistics_file(32)}
CONTRACT = {
    "spectral": {"keys": _SIDE, "values": {"method": "turboquant", "bits": 3}},
    "spectral-kivi": {"keys": {**_SIDE, "bits": 2.25}, "values": {"method": "kivi", "bits": 4}},
    # Values whose codes are chosen one by one: a trellis that is a near tie would give a token other codes throughout.
    "spectral-prefill": {
        "keys": {"method": "spectral", "bits": 3, "group": 32},
        "values": {"method": "turboquant", "bits": 3, "codebook": "lloyd_max", "scalar": "norm"},
    },
}
KERNEL_PAIRS = {
    "spectral-4": (("spectral", _options(4)), ("turboquant", {"bits": 4})),
    "spectral-2.5": (("spectral", _options(2.5)), ("kivi", {"bits": 2, "group_size": 16})),
    "spectral-1": (("spectral", _options(1)), ("turboquant", {"bits": 2})),
}
ENCODERS: list[tuple[str, Any, str]] = [("spectral", _options(bits), "keys") for bits in (0.5, 1, 2, 3.25, 5)]
GROUP, DIM, HEADS = 32, 32, 2


def codec(bits: float = 3.0) -> Any:
    return make_codec("spectral", DIM, heads=HEADS, sinks=4, bits=bits, statistics=statistics_file(DIM))


def factors(start: int, tokens: int, scale: float = 1.0, batch: int = 2) -> Rope:
    """cos and sin of consecutive positions from `start` on, as the contract's model has them."""
    layout = half_layout(DIM)
    angles = (start + torch.arange(tokens))[:, None] * 10_000 ** -(torch.arange(layout.rotary) / layout.rotary)
    return (scale * angles.cos()).expand(batch, -1, -1), (scale * angles.sin()).expand(batch, -1, -1)


def anchors(rope: Rope) -> Rope:
    """cos and sin of each group's first token, from those of all tokens."""
    return rope[0][:, ::GROUP], rope[1][:, ::GROUP]


def keys(tokens: int = 4 * GROUP, seed: int = 0) -> torch.Tensor:
    """Keys before RoPE with the statistics of the file, `[2, H, T, D]`."""
    tensors = random_statistics(small_config(head_dim=DIM))
    y = torch.randn(2, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(seed))
    x = y * tensors["keys.0.deviation"][:, None] @ torch.linalg.inv(tensors["keys.0.basis"])
    return x + mean(tensors)


def mean(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean key before RoPE, `[H, 1, D]`, at the first place of a group."""
    return tensors["keys.0.places"][:, :1] @ tensors["keys.0.means"]


def test_codes_do_not_depend_on_where_a_group_stands() -> None:
    """Keys 5,000 positions later, or scaled by YaRN's factor, have the same codes."""
    spectral, layout, z = codec(), half_layout(DIM), keys()
    (*near, near_scale), (*far, far_scale) = (
        spectral.encode(layout.rotate(z, rope), anchors(rope))
        for rope in (factors(20, 128), factors(5020, 128, scale=1.3))
    )
    assert all((a == b).float().mean() > 0.98 for a, b in zip(near, far, strict=True))
    assert (near_scale.float() - far_scale.float()).abs().max() < 0.05


@pytest.mark.parametrize("bits", [2, 4])
def test_errors_are_those_that_the_bits_were_given_for(bits: int) -> None:
    """In spectral channels the error is the sum of the quantizers', and a little more for unbiased scalars."""
    spectral = codec(bits)
    tensors, layout = random_statistics(small_config(head_dim=DIM)), half_layout(DIM)
    cos, sin = anchors(factors(0, 512))
    turns = (cos.repeat_interleave(GROUP, 1), sin.repeat_interleave(GROUP, 1))
    x = keys(512) - mean(tensors) + spectral._mean_table().repeat(1, 512 // GROUP, 1)
    k = layout.rotate(x, turns)
    error = k - spectral.decode(spectral.encode(k, (cos, sin)), (cos, sin))
    measured = (layout.unrotate(error, turns) @ tensors["keys.0.basis"]).square().mean((0, 2))
    bits_of = digits.allocate_bits(spectral.deviation, spectral.counts)
    expected = spectral.deviation.square() * torch.tensor(digits.DISTORTION)[bits_of]
    ratio = measured.sum(-1) / expected.sum(-1)
    assert ((ratio > 0.55) & (ratio < 1.3)).all(), ratio


def test_outlying_tokens_do_not_saturate() -> None:
    """A token 30 times as long as the others comes back as exactly, relative to its length."""
    spectral, rope = codec(), factors(0, GROUP, batch=1)
    middle = mean(random_statistics(small_config(head_dim=DIM)))
    x = keys(GROUP)[:1] - middle
    k, anchor = half_layout(DIM).rotate(30 * x + middle, rope), anchors(rope)
    error = (spectral.decode(spectral.encode(k, anchor), anchor) - k).norm() / k.norm()
    plain = half_layout(DIM).rotate(x + middle, rope)
    usual = (spectral.decode(spectral.encode(plain, anchor), anchor) - plain).norm() / plain.norm()
    assert error < 1.5 * usual


def test_bits_go_where_they_remove_most() -> None:
    """The greedy choice is the best of all, by trying them all on three channels; every head has the same total."""
    deviation = torch.tensor([[4.0, 1.0, 0.3], [1.0, 1.0, 1.0]])
    found = digits.allocate_bits(deviation, digits.DigitCounts(1, 4))
    assert found.sum(-1).tolist() == [6, 6]
    variance = deviation[0].square().tolist()
    choices = [(a, b, 6 - a - b) for a in range(7) for b in range(7 - a)]
    loss = {bits: sum(v * digits.DISTORTION[b] for v, b in zip(variance, bits, strict=True)) for bits in choices}
    assert tuple(found[0].tolist()) == min(loss, key=loss.__getitem__)


@pytest.mark.parametrize(("bits", "dim"), [(0.5, 32), (1, 64), (2.5, 80), (3, 128), (6, 64)])
def test_digits_make_the_bits_of_every_channel(bits: float, dim: int) -> None:
    """However the bits are allocated, every head has the same digits of each kind, and they are all used."""
    deviation = torch.logspace(0, -2, dim) * torch.rand(8, dim, generator=torch.Generator().manual_seed(0))
    counts = digits.digit_counts(bits, dim)
    allocated = digits.allocate_bits(deviation, counts)
    twos, ones = digits.split_bits(allocated, counts)
    assert torch.equal(2 * twos + ones, allocated)
    assert (twos.sum(-1) == counts.twos).all()
    assert (ones.sum(-1) == counts.ones).all()
    found = digits.digit_codes(deviation, counts)
    assert found.channels.shape == (8, counts.twos + counts.ones)
    for head in range(8):
        places = set(zip(found.channels[head].tolist(), found.shifts[head].tolist(), strict=True))
        assert len(places) == counts.twos + counts.ones
        for channel, kind in enumerate(zip(twos[head].tolist(), ones[head].tolist(), strict=True)):
            assert list(digits.WEIGHTS)[found.kind[head, channel]] == kind
            own = found.weights[head, found.channels[head] == channel]
            assert torch.equal(own, torch.tensor(digits.WEIGHTS[kind]))


def test_distortions_are_those_of_the_digits() -> None:
    """Sums of weighted digits lose what the table says, by which bits are given out, and 14 % more at most."""
    z = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    points, bounds, codes, _ = digits.tables(torch.device("cpu"))
    for row, (twos, ones) in enumerate(digits.WEIGHTS):
        bits = 2 * twos + ones
        nearest = torch.bucketize(z, bounds[row])
        assert (z - points[row, nearest]).square().mean() < digits.DISTORTION[bits] * 1.19
        assert sorted(codes[row, : 2**bits].tolist()) == list(range(2**bits))
    for bits in range(7):
        found = [
            (z - points[row, torch.bucketize(z, bounds[row])]).square().mean().item()
            for row, (twos, ones) in enumerate(digits.WEIGHTS)
            if 2 * twos + ones == bits
        ]
        assert abs(min(found) / digits.DISTORTION[bits] - 1) < 0.03, (bits, found)


def test_mean_table_of_few_dimensions_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(HEADS, GROUP, 5, generator=generator) @ torch.randn(HEADS, 5, DIM, generator=generator)
    places, means = mean_table(table)
    assert (places @ means - table).abs().max() < 1e-5


def moments(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(3, HEADS, DIM, DIM, dtype=torch.float64, generator=generator)
    keys, plain, queries = roots @ roots.mT
    return keys, plain, queries


def test_basis_makes_channels_uncorrelated_and_errors_cost_alike() -> None:
    """Along the basis the mixed moment of keys is diagonal, and the cost of errors is their square."""
    keys, plain, queries = moments()
    basis, deviation = spectral_basis(keys, plain, queries)
    mixed = 0.9 * keys + 0.1 * plain
    covariance = basis.mT @ mixed @ basis
    assert (covariance - torch.diag_embed(deviation.square())).abs().max() < 1e-6 * covariance.abs().max()
    assert (deviation.diff() <= 0).all()
    inverse = torch.linalg.inv(basis)
    cost = inverse @ queries @ inverse.mT
    assert (cost - torch.eye(DIM, dtype=cost.dtype)).abs().max() < 1e-6


def test_weights_leave_the_dense_tokens_out() -> None:
    """Sinks and the recent window get nothing; the rest gets p (1 - p), also beside learned logits."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 1, DIM, generator=generator), torch.randn(1, 200, DIM, generator=generator)
    sinks, recent, at = 16, 64, torch.tensor([199])
    costs, by_group = attention_costs(query, key, at, DIM**-0.5, sinks, recent, GROUP)
    p = (query[0, 0] @ key[0].mT * DIM**-0.5).softmax(-1)
    expected = torch.zeros(6 * GROUP)
    expected[: 200 - recent - sinks] = (p * (1 - p))[sinks : 200 - recent]
    assert (costs[0] - expected).abs().max() < 1e-6
    assert (by_group[0, 0] - expected.view(6, GROUP).sum(-1)).abs().max() < 1e-6
    aux, _ = attention_costs(query, key, at, DIM**-0.5, sinks, recent, GROUP, s_aux=torch.full((1, 1), 5.0))
    assert aux.sum() < costs.sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: layers.pop(1), r"it holds no keys of layer 1 \(directions\)"),
        (lambda layers: layers[0]["deviation"].fill_(torch.nan), "holds NaN or infinity"),
    ],
)
def test_files_that_do_not_fit(change: Any, message: str, tmp_path: Path) -> None:
    config = small_config()
    layers = coded_statistics(config)
    change(layers)
    path = tmp_path / "x.safetensors"
    write_statistics(str(path), config, layers, 32, {})
    x = torch.randn(1, 2, 80, 32)
    with pytest.raises(ValueError, match=f"statistics='{path}' for spectral: .*{message}"):
        CompressedCache(config, {"keys": {**_SIDE, "statistics": str(path)}, "values": {"method": "none"}}).update(
            x, x, 0
        )


def test_other_models_and_missing_files() -> None:
    """A file of another model, and none, are refused at construction; so are values, and bits that split a byte."""
    sides = {"values": {"method": "none"}}
    with pytest.raises(ValueError, match=r"statistics='none\.safetensors'"):
        CompressedCache(small_config(), {"keys": {**_SIDE, "statistics": "none.safetensors"}, **sides})
    with pytest.raises(ValueError, match=r"keys\.group=64"):
        CompressedCache(small_config(), {"keys": {**_SIDE, "group": 64}, **sides})
    with pytest.raises(ValueError, match="group=48"):
        CompressedCache(small_config(), {"keys": {"method": "spectral", "group": 48}, **sides})
    with pytest.raises(ValueError, match="layers 3 in the file, 2 here"):
        CompressedCache(small_config(), {"keys": _SIDE, **sides})
    with pytest.raises(ValueError, match=r"bits=2\.1"):
        CompressedCache(small_config(), {"keys": {**_SIDE, "bits": 2.1}, **sides})
    with pytest.raises(ValueError, match="spectral for values"):
        CompressedCache(small_config(), {"keys": {"method": "none"}, "values": _SIDE})


def test_command(tmp_path: Path) -> None:
    """`calibrate --method spectral` writes a file that a cache of the same model accepts."""
    (tmp_path / "text").write_text("some words of a text, " * 200)
    output = tmp_path / "statistics.safetensors"
    arguments = ["calibrate", "--method", "spectral", "--model", saved_model(), "--text", str(tmp_path / "text")]
    arguments += ["--output", str(output), "--tokens", "4096"]
    refused = CliRunner().invoke(app, [*arguments, "--bits", "2"])
    assert (refused.exit_code, type(refused.exception)) == (1, SystemExit)
    assert "--bits: not an option of method 'spectral'" in refused.output
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    config = AutoConfig.from_pretrained(saved_model())
    cache = SpectralCache(config, statistics=output, bits=2.5, sink_tokens=0, recent_tokens=0)
    assert cache.compression.values.options().bits == 2.5  # type: ignore[attr-defined]
    heads, dim = config.num_key_value_heads, config.head_dim
    x = torch.randn(1, heads, 70, dim)
    cache.update(x, x, 0)
    assert cache.packed_tokens == 64


def test_calibration_refuses_what_is_not_finite(tmp_path: Path) -> None:
    """Infinite queries of the last layer, which no key shows, end in an error and no file."""
    model: Any = build("llama", **SIZES)
    model.model.layers[-1].self_attn.q_proj.weight.data.fill_(torch.inf)
    (tmp_path / "text").write_text(text(2100, seed=1))
    output = tmp_path / "statistics.safetensors"
    with pytest.raises(ValueError, match="logits of llama are not finite"):
        calibrate_spectral(model, Letters(), [str(tmp_path / "text")], output, CONTEXT)  # type: ignore[arg-type]
    assert not output.exists()


@pytest.mark.parametrize("dim", [24, 40, 72, 96, 112])
def test_all_whole_bytes_are_allowed(dim: int) -> None:
    """Bits that no float holds exactly round to whole bytes."""
    for count in range(dim // 16, 6 * dim // 8 + 1):
        counts = digits.digit_counts(8 * count / dim, dim)
        assert 2 * counts.twos + counts.ones == 8 * count
        assert digits.digit_counts(float(f"{8 * count / dim:.6g}"), dim) == counts


SIZES = {"max_position_embeddings": CONTEXT}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "no RoPE": ("opt", SIZES),
    "learned sinks": ("gpt_oss", SIZES),
    "heads of 128, 8 query heads each": (
        "llama",
        {**SIZES, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
    ),
    "RoPE on half of each head, neighbours": ("glm4", SIZES),
    "soft-capped scores": ("gemma2", SIZES),
}


def text(tokens: int, seed: int) -> str:
    """Random characters, each drawn from a few that may follow the last one, so that models see some order."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 64, (64, 4), generator=torch.Generator().manual_seed(0))
    found = [0]
    for choice in torch.randint(0, 4, (tokens - 1,), generator=generator).tolist():
        found.append(int(table[found[-1], choice]))
    return "".join(chr(64 + token) for token in found)


@pytest.mark.parametrize("name", MODELS)
def test_loses_less_than_turboquant(name: str, tmp_path: Path) -> None:
    """At two bits the loss is below that of the paper's TurboQuant, even with random weights and thus even keys."""
    family, changes = MODELS[name]
    model: Any = build(family, **changes)
    (tmp_path / "text").write_text(text(4200, seed=1))
    output = tmp_path / "statistics.safetensors"
    calibrate_spectral(model, Letters(), [str(tmp_path / "text")], output, 2 * CONTEXT)  # type: ignore[arg-type]
    ids = torch.tensor([Letters()(text(440, seed))["input_ids"] for seed in range(2, 10)])
    spectral = loss_of_keys(model, ids, {"method": "spectral", "bits": 2, "statistics": str(output)})
    paper = {"method": "turboquant", "bits": 2, "codebook": "lloyd_max", "scalar": "norm"}
    turboquant = loss_of_keys(model, ids, paper)
    assert 0 < spectral < turboquant, (spectral, turboquant)
