"""Models with keys that are hard to code do what the model they were made from does."""

from pathlib import Path

import outlier_model
import torch
from support.models.saved_model import saved_model

from kvcache_compress.modeling.loading import load_model

IDS = torch.arange(40)[None]


def test_outlier_channels_change_keys_and_nothing_else(tmp_path: Path) -> None:
    outlier_model.main(tmp_path, model=saved_model(), factor=64.0, pair=[0, 3])
    (plain, _), (hard, tokenizer) = load_model(saved_model()), load_model(str(tmp_path))
    assert len(tokenizer) > 1
    with torch.inference_mode():
        before, after = plain(IDS, use_cache=True), hard(IDS, use_cache=True)
    torch.testing.assert_close(after.logits, before.logits, atol=1e-4, rtol=1e-4)
    keys, others = after.past_key_values.layers[0].keys, before.past_key_values.layers[0].keys
    dim = keys.shape[-1]
    factors = torch.ones(dim)
    factors[[0, 3, dim // 2, 3 + dim // 2]] = 64.0
    torch.testing.assert_close(keys, others * factors, atol=1e-3, rtol=1e-4)


def test_large_means_change_scores_little(tmp_path: Path) -> None:
    """The mean of the keys at the slowest pairs is the bias; attention hardly changes, as all scores do alike."""
    outlier_model.main(tmp_path, model=saved_model(), factor=1.0, bias=50.0)
    (plain, _), (hard, _) = load_model(saved_model()), load_model(str(tmp_path))
    with torch.inference_mode():
        before, after = plain(IDS, use_cache=True), hard(IDS, use_cache=True)
    assert after.logits.isfinite().all()
    assert not torch.equal(after.logits, before.logits)
    moved = after.past_key_values.layers[0].keys - before.past_key_values.layers[0].keys
    dim = moved.shape[-1]
    slow = torch.zeros(dim, dtype=torch.bool)
    slow[dim // 2 - 2 : dim // 2] = slow[dim - 2 :] = True
    assert moved[..., ~slow].abs().max() < 1e-4
    lengths = moved[..., slow].square().sum(-1).sqrt()
    torch.testing.assert_close(lengths, torch.full_like(lengths, 50.0 * 2**0.5), rtol=1e-3, atol=0)
