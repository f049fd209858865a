"""Embeddings for distortion and neighbours: unit vectors from a file or a model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.small_model import small_model

from kvcache_compress.eval.studies.vectors import Embeddings, embeddings_from, hidden_states, load_embeddings


class Characters:
    """A tokenizer with a token per character."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) % 64 for character in text]}


TEXT = "".join(chr(97 + (7 * number * number + number // 5) % 26) for number in range(1200))


def saved(folder: Path, array: Any) -> Path:
    np.save(folder / "x.npy", array, allow_pickle=True)
    return folder / "x.npy"


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_file_becomes_unit_vectors(tmp_path: Path, dtype: str) -> None:
    found = load_embeddings(saved(tmp_path, np.array([[3, 4], [0, -2]], dtype)))
    torch.testing.assert_close(found.vectors, torch.tensor([[0.6, 0.8], [0.0, -1.0]]))
    assert found.source == "x.npy"


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.ones(4), r"shape \(4,\)"),
        (np.ones((0, 4)), "empty"),
        (np.array([[1.0, np.nan]]), "finite"),
        (np.array([[1e300, 1.0]]), "finite"),
        (np.array([[1.0, 2.0], [0.0, 0.0]]), "row 1"),
        (np.array([["a", "b"]]), "embeddings="),
        (np.array([[1j, 2]]), "embeddings="),
        (np.array([[object()]]), "embeddings="),
        (None, "embeddings="),
    ],
)
def test_bad_arrays(tmp_path: Path, array: Any, named: str) -> None:
    path = tmp_path / "none.npy" if array is None else saved(tmp_path, array)
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=named):
        load_embeddings(path)


@pytest.mark.parametrize(("layer", "index"), [(-1, 2), (1, 1), (0, 0)])
def test_hidden_states_are_the_models_own(layer: int, index: int) -> None:
    model = small_model()
    found = hidden_states(model, Characters(), TEXT, layer=layer, tokens=600, text_name="letters")
    ids = torch.tensor([Characters()(TEXT)["input_ids"]])
    with torch.inference_mode():
        parts = [
            model(input_ids=part, output_hidden_states=True).hidden_states[index][0, 1:]
            for part in (ids[:, :512], ids[:, 512:1024])
        ]
    expected = torch.cat(parts)[:600]
    torch.testing.assert_close(found.vectors, expected / expected.norm(dim=1, keepdim=True), atol=1e-5, rtol=1e-4)
    assert found.source == f"LlamaForCausalLM, layer {index} of 2, letters"


def test_bad_layers_and_short_texts() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="layer=3: "):
        hidden_states(model, Characters(), TEXT, layer=3)
    with pytest.raises(ValueError, match="tokens=1198: "):
        hidden_states(model, Characters(), TEXT, tokens=1198)
    assert len(hidden_states(model, Characters(), TEXT, tokens=1197).vectors) == 1197


def test_split_is_disjoint_and_repeatable() -> None:
    rows = torch.nn.functional.one_hot(torch.arange(10)).float()
    base, queries = Embeddings(rows, "rows").split(6, 3, seed=1)
    assert (base.shape, queries.shape) == ((6, 10), (3, 10))
    assert len({int(row.argmax()) for row in [*base, *queries]}) == 9
    assert torch.equal(base, Embeddings(rows, "rows").split(6, 3, seed=1)[0])
    assert not torch.equal(base, Embeddings(rows, "rows").split(6, 3, seed=2)[0])
    for sizes in ((8, 3), (0, 3), (3, 0)):
        with pytest.raises(ValueError, match=f"base={sizes[0]}, queries={sizes[1]}"):
            Embeddings(rows, "rows").split(*sizes, seed=0)


def test_source_is_one_or_the_other(tmp_path: Path) -> None:
    path = saved(tmp_path, np.eye(4))
    options: dict[str, Any] = {"layer": -1, "tokens": 8, "dtype": "float32", "device": "cpu"}
    assert embeddings_from(path, None, None, **options).vectors.shape == (4, 4)
    for given in ((None, None, None), (path, "m", path), (None, "m", None), (path, None, path)):
        with pytest.raises(ValueError, match="--embeddings"):
            embeddings_from(*given, **options)
