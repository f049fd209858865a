"""CommVQ's codebook file: any damage is reported when the cache is built, with the file's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.commvq_files import CONTRACT_MODEL, FOLDER, codebook_file
from transformers import LlamaConfig

from kvcache_compress import CommVQCache


def damaged(change: Callable[[dict[str, Any], dict[str, str]], None]) -> str:
    """A copy of the contract model's file with tensors and metadata changed."""
    tensors = load_file(codebook_file(32))
    with safe_open(codebook_file(32), framework="pt") as file:
        metadata = file.metadata()
    del metadata["sha256"]  # else any change of a tensor is found by it
    change(tensors, metadata)
    path = FOLDER / "damaged.safetensors"
    save_file(tensors, path, metadata=metadata)
    return str(path)


def _renamed(name: str) -> Callable[[Any, Any], Any]:
    """Add a tensor of this name."""
    return lambda t, m: t.update({name: t["keys.0.codebooks"].clone()})


DAMAGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "version": (lambda t, m: m.update(version="2"), "format version '2', this release reads '1'"),
    "foreign": (lambda t, m: m.update(format="pt"), "not a codebook file of kvcache-compress"),
    "metadata": (lambda t, m: m.update(rope="{"), "its metadata is damaged"),
    "no heads": (lambda t, m: m.pop("kv_heads"), "its metadata is damaged .*kv_heads"),
    "layer": (lambda t, m: t.pop("values.1.codebooks"), "it holds no values of layer 1"),
    "shape": (lambda t, m: [t.update({n: t[n][:, :, :, :15].clone()}) for n in list(t)], "damaged: codebooks of keys"),
    "one shape": (
        lambda t, m: t.update({"keys.2.codebooks": t["keys.2.codebooks"][:, :, :1].clone()}),
        "another layer",
    ),
    "number": (
        _renamed("keys.3.codebooks"),
        "an unexpected tensor 'keys.3.codebooks'",
    ),
    "no number": (
        _renamed("keys.-1.codebooks"),
        "an unexpected tensor 'keys.-1.codebooks'",
    ),
    "errors": (
        lambda t, m: t.update({"keys.0.errors": torch.zeros(2, 3, dtype=torch.float16)}),
        r"damaged: errors of keys of shape \[2, 3\] for 2 heads",
    ),
    "rounds": (lambda t, m: m.update(data='{"rounds": {"keys": 9}}'), "damaged: rounds=9 of keys, which have 3"),
    "no rounds": (lambda t, m: m.update(data='{"rounds": "x"}'), "damaged: rounds='x'"),
    "half rounds": (lambda t, m: m.update(data='{"rounds": {"keys": 2.0}}'), "damaged: rounds=2.0 of keys"),
    "name": (lambda t, m: t.update(other=torch.zeros(1, dtype=torch.float16)), "an unexpected tensor 'other'"),
    "dtype": (lambda t, m: t.update({n: t[n].float() for n in list(t)}), "not F16"),
    "heads": (lambda t, m: m.update(kv_heads="4"), "damaged: codebooks of keys"),
    "layers": (lambda t, m: m.update(layers="30"), "30 layers with 2 key/value heads of 32, not 3 layers"),
    "RoPE": (lambda t, m: m.update(rope=m["rope"].replace("10000.0", "5000.0")), "other rotary .*5000.0.* in the file"),
    "model type": (lambda t, m: m.update(model_type="mistral"), "of type 'mistral', not 'llama'"),
    "model": (lambda t, m: m.update(model="org/other"), "made for 'org/other', not for 'org/tiny'.*any_model: true"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_files_that_do_not_fit(name: str) -> None:
    """Refused when the cache is built, with the file's name and what is wrong."""
    change, message = DAMAGES[name]
    config = LlamaConfig(**CONTRACT_MODEL, name_or_path="org/tiny")
    path = damaged(change)
    with pytest.raises(ValueError, match=rf"codebooks='.*damaged.safetensors' for commvq: .*{message}"):
        CommVQCache(config, path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    config = LlamaConfig(**CONTRACT_MODEL)
    whole = Path(codebook_file(32)).read_bytes()
    for content in (whole[: len(whole) // 2], whole[:20], b"", b"not safetensors at all"):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged, or no safetensors file"):
            CommVQCache(config, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"nowhere.safetensors' for commvq: there is no such file. .*calibrate"):
        CommVQCache(config, tmp_path / "nowhere.safetensors")
    with pytest.raises(ValueError, match=r"codebooks=None for commvq: .*kvcache-compress calibrate"):
        CommVQCache(config)
    path = damaged(lambda t, m: t["keys.0.codebooks"].view(-1)[3:4].fill_(torch.nan))
    broken = CommVQCache(config, path)
    with pytest.raises(ValueError, match=r"keys.0.codebooks holds NaN"), torch.no_grad():
        broken.update(torch.ones(1, 2, 200, 32), torch.ones(1, 2, 200, 32), 0)


@pytest.mark.parametrize("weight", [0.0, -1.0])
@pytest.mark.parametrize("count", [1, 32])
def test_weights_that_are_not_positive(weight: float, count: int) -> None:
    """Weights must be positive, as keys are divided by them."""

    def weigh(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        for layer in range(3):
            tensors[f"keys.{layer}.weights"] = torch.ones(2, 16, dtype=torch.float16)
            tensors[f"keys.{layer}.weights"].view(-1)[-count:] = weight

    cache = CommVQCache(LlamaConfig(**CONTRACT_MODEL), damaged(weigh))
    with pytest.raises(ValueError, match=r"damaged: keys.0.weights holds weights of zero or less"):
        cache.update(torch.ones(1, 2, 200, 32), torch.ones(1, 2, 200, 32), 0)


@pytest.mark.parametrize("version", ["9" * 5000, "x\n" * 2000])
def test_errors_are_one_line(version: str) -> None:
    with pytest.raises(ValueError, match="format version") as error:
        CommVQCache(LlamaConfig(**CONTRACT_MODEL), damaged(lambda t, m: m.update(version=version)))
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("at", [0.3, 0.6, 0.999])
def test_a_flipped_bit_is_found(at: float, tmp_path: Path) -> None:
    """A flipped bit anywhere in the tensors is detected when the cache is built; files without a digest still load."""
    config = LlamaConfig(**CONTRACT_MODEL)
    content = bytearray(Path(codebook_file(32)).read_bytes())
    content[int(at * len(content))] ^= 1
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x.safetensors' for commvq: damaged: its numbers have changed"):
        CommVQCache(config, path)
    CommVQCache(config, damaged(lambda t, m: t["keys.0.codebooks"].view(-1)[3:4].fill_(7)))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("org/tiny", "org/tiny", True),
        ("/models/org/tiny", "org/tiny", True),
        ("/home/a/digest/model", "/home/b/digest/model", True),
        ("tiny", "org/tiny", True),
        ("", "org/tiny", True),
        ("org/tiny", "others/tiny", False),
        ("/home/a/one/model", "/home/a/two/model", False),
    ],
)
def test_names_of_models(one: str, other: str, same: bool) -> None:
    config = LlamaConfig(**CONTRACT_MODEL, name_or_path=other)
    path = damaged(lambda t, m: m.update(model=one))
    if not same:
        with pytest.raises(ValueError, match="If both are the same model"):
            CommVQCache(config, path)
    CommVQCache(config, path, any_model=not same)
