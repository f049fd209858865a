"""CommVQ: codebooks that commute with RoPE, exact search, stored bits, positions, and the codebook file."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.files.commvq_files import CONTRACT_MODEL, FOLDER, HEADS, codebook_file
from support.files.saved_files import changed
from support.method_cases import bits_per_number, half_layout, make_codec, random_track
from support.models.small_model import small_model
from transformers import Glm4Config, LlamaConfig, Phi3Config

from kvcache_compress import CommVQCache, CompressedCache, enable_fused_attention, load_config, register_position_hooks
from kvcache_compress.config import get_method
from kvcache_compress.methods.commvq import additive
from kvcache_compress.methods.commvq.codebook_file import group_count, rounds_for, write_codebooks
from kvcache_compress.modeling.rope import rope_layout, rotary_embedding
from kvcache_compress.storage.shared.rope_track import _warn_once


def commvq(**shape: Any) -> tuple[str, Callable[[int], dict[str, Any]]]:
    """A codec of one side for the kernel tests, with a codebook file for its head dimension."""
    scalar = {"scalar": shape.pop("scalar", None)}
    return "commvq", lambda head_dim: {"codebooks": codebook_file(head_dim, **shape), **scalar}


def encoder(head_dim: int) -> dict[str, Any]:
    return {"codebooks": codebook_file(head_dim, encoder_bits=3 * head_dim)}


_SIDE = {"method": "commvq", "codebooks": codebook_file(32)}
_TURBOQUANT = {"method": "turboquant", "bits": 3}
CONTRACT = {
    "commvq": {"keys": _SIDE, "values": _SIDE},
    "commvq-encoder": {"keys": _TURBOQUANT, "values": {"method": "commvq", **encoder(32)}},
    "commvq-turboquant": {"keys": _SIDE, "values": _TURBOQUANT},
}
KERNEL_PAIRS = {
    "commvq": (commvq(), commvq()),
    "commvq-groups": (commvq(groups=2, key_shape=(2, 64)), commvq(groups=2, value_shape=(4, 64), scalar="norm")),
    "commvq-short-rows": (commvq(groups=2, key_shape=(1, 8)), commvq(groups=2, value_shape=(2, 8))),
    "commvq-none": (commvq(key_shape=(2, 8), scalar="norm"), ("none", {})),
    "none-commvq-encoder": (("none", {}), ("commvq", encoder)),
    "turboquant-commvq": (("turboquant", {"bits": 3}), commvq(value_shape=(3, 256))),
}
ENCODERS = [
    commvq(),
    commvq(groups=2),
    commvq(groups=2, key_shape=(2, 64), value_shape=(2, 256)),
    ("commvq", encoder, "values"),
]


@pytest.mark.parametrize("batch", [(), (3, 2)])
@pytest.mark.parametrize(("centres", "pairs"), [(16, 8), (64, 5)])
def test_search_equals_brute_force(batch: tuple[int, ...], centres: int, pairs: int) -> None:
    """Every round picks the nearest of all N² points, which the search never builds."""
    torch.manual_seed(centres)
    z, books = torch.randn(*batch, 40, pairs, 2), torch.randn(*batch, 3, centres, pairs, 2)
    tables = additive.complex_tables(books)
    codes = additive.encode(z.flatten(-2), tables)
    residual = z
    for r in range(3):
        c = books[..., r, :, :, :]
        points = (c[..., :, None, :, :] + additive.times_i(c)[..., None, :, :, :]).flatten(-4, -3)
        distances = (residual[..., :, None, :, :] - points[..., None, :, :, :]).square().sum((-1, -2))
        best = distances.argmin(-1)
        assert torch.equal(codes[..., r, 0] * centres + codes[..., r, 1], best)
        residual = residual - points.flatten(-2).take_along_dim(best[..., None], -2).view_as(residual)
    torch.testing.assert_close(z.flatten(-2) - additive.decode(codes, tables), residual.flatten(-2))


@pytest.mark.parametrize(("bits", "count"), [(1, 1), (3, 7), (6, 21), (8, 2), (10, 7), (12, 21)])
def test_packed_codes(bits: int, count: int) -> None:
    codes = torch.randint(2**bits, (3, 5, count), generator=torch.Generator().manual_seed(bits))
    packed = additive.pack_codes(codes, bits)
    assert packed.shape[-1] == -(-bits * count // 8)
    assert torch.equal(additive.unpack_codes(packed, count, bits), codes)


def test_hand_packed_codes() -> None:
    """Two rounds of 12 bits are three bytes."""
    assert additive.pack_codes(torch.tensor([0xABC, 0x123]), 12).tolist() == [0xBC, 0x3A, 0x12]


def test_points_of_the_codebook_come_back() -> None:
    """Keys ‖k‖ (± e_a ± i e_b) / √2, rotated by RoPE, come back exactly but for 16-bit rounding of their length."""
    config = LlamaConfig(hidden_size=128, num_hidden_layers=1, num_attention_heads=2)
    path = FOLDER / "exact.safetensors"
    eye = torch.cat([torch.eye(32), -torch.eye(32)]) / 2**0.5
    books = torch.stack([eye, torch.zeros(64, 32)], -1).expand(HEADS, 1, 1, 64, 32, 2)
    write_codebooks(path, config, {"keys.0.codebooks": books})
    codec = make_codec("commvq", 64, "keys", heads=HEADS, codebooks=str(path))
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(4096, (HEADS, 1, 48, 1), generator=generator)
    z = codec.books._by_token(codec.books.points(index), torch.empty(2, HEADS, 24))
    z = z / z.norm(dim=-1, keepdim=True) * (torch.rand(2, HEADS, 24, 1, generator=generator) * 50 + 1)
    rope = random_track(half_layout(64), 2, 24).read(0, 24)
    x = half_layout(64).rotate(half_layout(64).join(z[..., ::2], z[..., 1::2]), rope)
    decoded = codec.decode(codec.encode(x, rope), rope)
    assert float(((decoded - x).norm(dim=-1) / x.norm(dim=-1)).max()) < 2**-10


ROPES = {
    "llama": LlamaConfig(hidden_size=128, num_attention_heads=2),
    "yarn": LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    ),
    "phi3-partial": Phi3Config(
        hidden_size=128, num_attention_heads=2, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "glm4-partial-interleaved": Glm4Config(hidden_size=128, num_attention_heads=2, head_dim=64),
}


@pytest.mark.parametrize("name", ROPES)
def test_codes_do_not_depend_on_position(name: str) -> None:
    """Keys rotated by the model's function get the codes of unrotated keys, and decode to the rotated points."""
    config = ROPES[name]
    layout, embed = rope_layout(config, 64), rotary_embedding(config)
    codec = make_codec("commvq", 64, "keys", heads=HEADS, codebooks=codebook_file(64, key_shape=(4, 64)))
    codec.context = replace(codec.context, rope=layout)
    torch.manual_seed(1)
    before = torch.randn(2, HEADS, 30, 64)
    given = embed(before, torch.arange(30)[None] * 11 + torch.tensor([[0], [500]]))
    apply = sys.modules[type(config).__module__.replace("configuration", "modeling")].apply_rotary_pos_emb
    after = apply(before, before, *given)[1]
    factors = layout.factors(given)
    still = torch.ones_like(factors[0]), torch.zeros_like(factors[1])
    plain, turned = codec.encode(before, still), codec.encode(after, factors)
    assert torch.equal(plain[0], turned[0])
    torch.testing.assert_close(codec.decode(turned, factors), apply(*[codec.decode(plain, still)] * 2, *given)[1])
    assert float(given[0].square().max()) > 1.01 or name != "yarn", "the attention factor is in it"


@pytest.mark.parametrize("switch", [enable_fused_attention, register_position_hooks, None])
def test_left_padding_does_not_change_codes(switch: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A padded row's tokens are encoded at their actual positions, which the attention modules pass on."""
    model, path = small_model(**CONTRACT_MODEL), codebook_file(32)
    ids = torch.randint(1, 128, (1, 90), generator=torch.Generator().manual_seed(2))
    padded = torch.cat([torch.zeros(1, 13, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 13, dtype=torch.long), torch.ones_like(ids)], 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    decoded = []
    if switch is not None:
        switch(model)
    for given in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": mask, "position_ids": positions}):
        compressed = CommVQCache(model.config, codebooks=path, sink_tokens=0, recent_tokens=0)
        with torch.no_grad():
            model(**given, **with_cache(compressed))
        assert compressed.packed_tokens >= 64
        decoded.append([layer.keys[:, :, -90:][:, :, :51] for layer in compressed.layers])
    error = max(float((a - b).norm() / a.norm()) for a, b in zip(*decoded, strict=True))
    assert error < 1e-5 if switch else error > 0.01
    assert not caplog.records, "one row is encoded consistently, whatever its positions are"


def test_rows_without_their_positions_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    model = small_model(**CONTRACT_MODEL)
    for _ in range(2):
        with torch.no_grad():
            model(
                torch.ones(2, 90, dtype=torch.long),
                **with_cache(CommVQCache(model.config, codebooks=codebook_file(32))),
            )
    assert [record.message for record in caplog.records if "left-padded" in record.message] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("side", ["keys", "values"])
def test_more_bits_are_more_rounds(side: str) -> None:
    """Fewer bits use the file's first rounds; the error falls with every step, and so do the bytes."""
    path = codebook_file(64, key_shape=(8, 64), value_shape=(16, 64))
    x = torch.randn(1, HEADS, 64, 64, generator=torch.Generator().manual_seed(0))
    rope = random_track(half_layout(64), 1, 64).read(0, 64) if side == "keys" else None
    errors, sizes = [], []
    for bits in (0.5, 1, 1.5):
        codec = make_codec("commvq", 64, side, heads=HEADS, codebooks=path, bits=bits)
        fields = codec.encode(x, rope)
        assert 8 * sum(field.nbytes for field in fields) / x.numel() == bits_per_number(codec)
        errors.append(float((codec.decode(fields, rope) - x).square().mean()))
        sizes.append(bits_per_number(codec))
    assert sorted(errors, reverse=True) == errors
    assert len(set(sizes)) == 3
    with pytest.raises(ValueError, match=rf"bits=6 for commvq: .* has only 1.5 for {side}"):
        make_codec("commvq", 64, side, heads=HEADS, codebooks=path, bits=6)


def test_rounds_are_the_papers() -> None:
    """Table 8: N = 64 and g = 64 take R = 11 for 1 bit and R = 21 for 2; the scalar comes on top."""
    assert [rounds_for(bits, "keys", 128, group_count(128)) for bits in (1, 2)] == [11, 21]
    assert [group_count(dim) for dim in (64, 80, 96, 112, 128, 256)] == [1, 1, 1, 1, 1, 2]
    fields = get_method("commvq").layout(get_method("commvq").Options(bits=2), "keys", 128)
    assert [field.bytes_per_token for field in fields] == [32, 2], "21 pairs of 6-bit indices, without gaps"


def test_a_vector_unlike_all_is_not_blown_up() -> None:
    """The unbiased scalar divides by ⟨z, ẑ⟩, which may be next to nothing."""
    codec = make_codec("commvq", 64, "values", heads=HEADS, codebooks=codebook_file(64, value_shape=(1, 4)))
    x = torch.randn(1, HEADS, 256, 64, generator=torch.Generator().manual_seed(4))
    scale = codec.encode(x)[1].float()
    assert (scale <= 2.01 * x.norm(dim=-1)).all()
    assert (codec.encode(torch.zeros_like(x))[1] == 0).all()


def test_encoder_is_deterministic_and_codes_whole_tokens() -> None:
    codec = make_codec("commvq", 64, "values", heads=HEADS, codebooks=codebook_file(64, encoder_bits=1024))
    x = torch.randn(2, HEADS, 20, 64, generator=torch.Generator().manual_seed(5))
    fields = codec.encode(x)
    assert fields[0].shape == (2, HEADS, 20, 64), "an equal share of the bits with each head"
    assert all(torch.equal(a, b) for a, b in zip(fields, codec.encode(x), strict=True))
    assert float(torch.nn.functional.cosine_similarity(codec.decode(fields), x, dim=-1).mean()) > 0.8
    weights = torch.rand(2, HEADS, 3, 20, generator=torch.Generator().manual_seed(6))
    expected = weights @ codec.decode(fields)
    assert (codec.map_output(codec.accumulate(weights, fields)) - expected).norm() <= 1e-5 * expected.norm()


def test_the_papers_preset() -> None:
    """The paper's preset: encoder for values, plain norms, and no dense tokens but those of an incomplete block."""
    model, path = small_model(**CONTRACT_MODEL), codebook_file(32, key_shape=(5, 64), encoder_bits=128)
    compressed = CompressedCache(model.config, load_config("commvq-paper").with_files(codebooks=path))
    with torch.no_grad():
        model(torch.randint(1, 128, (1, 96)), **with_cache(compressed))
    report = compressed.memory_report()
    assert (report.packed_tokens, report.dense_tokens) == (96, 0)
    assert set(report.fields) == {"dense", "keys.codes", "keys.scale", "values.codes", "values.scale", "rope"}
    keys = compressed.layers[0].sides["keys"]
    x = torch.randn(1, HEADS, 8, 32)
    still = torch.ones(1, 8, 16), torch.zeros(1, 8, 16)
    torch.testing.assert_close(keys.codec.encode(x, still)[1], x.norm(dim=-1).half())


def test_options() -> None:
    config = LlamaConfig(**CONTRACT_MODEL)
    with pytest.raises(ValueError, match="bits=7 "):
        CommVQCache(config, codebooks=codebook_file(32), bits=7)
    with pytest.raises(ValueError, match="head_dim=72 "):
        get_method("commvq").layout(get_method("commvq").Options(), "keys", 72)
    with pytest.raises(ValueError, match=r"bits=2 .* 1\.5"):
        CommVQCache(config, codebooks=codebook_file(32, encoder_bits=96), value_bits=2)


def damaged(change: Callable[[dict[str, Any], dict[str, Any], dict[str, str]], Any]) -> str:
    """A copy of the contract model's file with header, tensors and metadata changed, and a right checksum."""
    return str(changed(Path(codebook_file(32)), change, name=FOLDER / "damaged.safetensors"))


def _model(**facts: Any) -> Callable[[Any, Any, Any], Any]:
    return lambda h, t, m: h["model"].update(facts)


DAMAGES: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "layer": (lambda h, t, m: t.pop("values.1.codebooks"), "it holds no values of layer 1"),
    "heads": (_model(kv_heads=4), "kv_heads 4 in the file, 2 here"),
    "model": (_model(name="org/other"), "made for 'org/other', not for 'org/tiny'.*any_model"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_files_that_do_not_fit(name: str) -> None:
    change, message = DAMAGES[name]
    config = LlamaConfig(**CONTRACT_MODEL, name_or_path="org/tiny")
    path = damaged(change)
    with pytest.raises(ValueError, match=rf"codebooks='.*damaged.safetensors' for commvq: .*{message}") as refused:
        CommVQCache(config, codebooks=path)
    assert len(str(refused.value)) < 1000
    assert "\n" not in str(refused.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    config = LlamaConfig(**CONTRACT_MODEL)
    (tmp_path / "x.safetensors").write_bytes(Path(codebook_file(32)).read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"damaged, or not a safetensors file"):
        CommVQCache(config, codebooks=tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"nowhere.safetensors' for commvq: no such file. .*calibrate"):
        CommVQCache(config, codebooks=tmp_path / "nowhere.safetensors")
    with pytest.raises(ValueError, match=r"codebooks=None for commvq: .*kvcache-compress calibrate"):
        CommVQCache(config)
    path = damaged(lambda h, t, m: t["keys.0.codebooks"].view(-1)[3:4].fill_(torch.nan))
    broken = CommVQCache(config, codebooks=path)
    with pytest.raises(ValueError, match=r"keys.0.codebooks holds NaN"), torch.no_grad():
        broken.update(torch.ones(1, 2, 200, 32), torch.ones(1, 2, 200, 32), 0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("org/tiny", "org/tiny", True), ("/models/org/tiny", "org/tiny", True),
        ("/home/a/digest/model", "/home/b/digest/model", True), ("tiny", "org/tiny", True), ("", "org/tiny", True),
        ("org/tiny", "others/tiny", False), ("/home/a/one/model", "/home/a/two/model", False),
    ],
)  # fmt: skip
def test_names_of_models(one: str, other: str, same: bool) -> None:
    config = LlamaConfig(**CONTRACT_MODEL, name_or_path=other)
    path = damaged(_model(name=one))
    if not same:
        with pytest.raises(ValueError, match="If both have the same weights"):
            CommVQCache(config, codebooks=path)
    CommVQCache(config, codebooks=path, any_model=not same)
