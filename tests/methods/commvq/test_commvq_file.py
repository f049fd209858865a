"""CommVQ's codebook file: what does not fit is refused by name. `tests/cache/test_saving.py` tests what files share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.commvq_files import CONTRACT_MODEL, FOLDER, codebook_file
from support.files.saved_files import changed
from transformers import LlamaConfig

from kvcache_compress import CommVQCache


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
    path = damaged(_model(name=one))
    if not same:
        with pytest.raises(ValueError, match="If both have the same weights"):
            CommVQCache(config, codebooks=path)
    CommVQCache(config, codebooks=path, any_model=not same)
