"""Run any family of decoders of Transformers, shrunk, with compressed caches: `verdict` says what came of it."""

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from kvcache_compress import CompressedCache, compress, load_config
from kvcache_compress.modeling.decoder import cache_argument
from support.models.shrink import FAMILIES, HEAD_DIM, WORDS, small_config, small_model
from support.recorded_paths import record_paths

PROMPT, STEPS, PADDING, IMAGE_AT = 60, 5, 9, 2
_SIX = {"method": "turboquant", "bits": 6}
_WINDOWS = {"sink_tokens": 4, "recent_tokens": 8, "backend": "torch"}
SIX_BITS = load_config({"keys": _SIX, "values": _SIX, **_WINDOWS})
DENSE = load_config({"keys": "none", "values": "none", **_WINDOWS})


def _groups(queries: int) -> dict[str, Any]:
    return {"num_attention_heads": queries, "num_key_value_heads": 1, "hidden_size": queries * HEAD_DIM}


VARIANTS: dict[str, dict[str, Any]] = {
    "falcon, alibi": {"alibi": True},
    **{f"llama, {queries} queries per head": _groups(queries) for queries in (1, 3, 5, 7, 12)},
    **{f"falcon, {queries} queries per head": _groups(queries) for queries in (1, 3)},
    "mistral, no sliding window": {"sliding_window": None},
    **{
        f"{family}, no sliding window": {"text_config": {"sliding_window": None}} for family in ("idefics2", "mistral3")
    },
}
"""More cases: a family, and changes to its config."""
CASES = sorted([*FAMILIES, *VARIANTS])
_TIMM = "needs the package timm"
_DRAFTS = "drafts for another model, whose keys and values it reads"
_TWO_TOKENIZERS = "its generate needs an image and the tokens of a second tokenizer"
NOT_RUN = {
    "diffusion_gemma": "generates by diffusion, with a loop of its own",
    "evolla": "needs protein inputs, and no auto class builds it",
    "fast_vlm": _TIMM,
    "gemma3n": f"{_TIMM} (its decoder is gemma3n_text)",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "instructblip": _TWO_TOKENIZERS,
    "instructblipvideo": _TWO_TOKENIZERS,
    "musicgen": "its decoder takes a config that no auto class builds",
    "musicgen_melody": "its decoder takes a config that no auto class builds",
    "perception_lm": _TIMM,
}
"""Families that are not run, and why."""


_CROSS_ATTENTION = {"mllama": 6, "idefics": 5, "blip": 4}
"""Models whose layers attend to an image, which takes one token in the text or none; dimensions of the image."""


@dataclass(frozen=True)
class Verdict:
    """What came of a family.

    kind: `fused`; `unfused`: tokens are packed, and each step decodes them; `refused`: by the cache; `fails`: with
        Transformers' own cache too; `not run`.
    reason: why not more, without the family's name.
    queries: query heads per key/value head.
    images: True if the prompt had an image.
    """

    kind: Literal["fused", "unfused", "refused", "fails", "not run"]
    reason: str = ""
    queries: int = 0
    images: bool = False


class _Force(LogitsProcessor):
    """Let `generate` choose given tokens, so that two runs stay comparable."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 1 + 7 * input_ids.shape[1] % (WORDS - 1)] = 0
        return forced


@torch.no_grad()
def logits(model: PreTrainedModel, inputs: dict[str, Any], cache: Cache) -> torch.Tensor:
    """Logits `[B, STEPS, vocab]` of given tokens after the prompt, by `generate`."""
    torch.manual_seed(0)
    output = model.generate(
        **inputs, **{cache_argument(): cache}, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False,
        use_cache=True, logits_processor=[_Force()], output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(output.logits, 1)


def refusal(config: Any) -> str:
    """Message with which the cache refuses a model's config; empty if it accepts it."""
    try:
        CompressedCache(config, SIX_BITS)
    except ValueError as error:
        return str(error)
    return ""


@cache
def verdict(case: str) -> Verdict:
    """Generate with a family: with Transformers' cache, without compression, with 6 bits, fused and not.

    Raises:
        AssertionError: A result is wrong.
    """
    family = case.split(",")[0]
    if family in NOT_RUN:
        return Verdict("not run", NOT_RUN[family])
    model = small_model(small_config(family, **VARIANTS.get(case, {})))
    if reason := refusal(model.config):
        return Verdict("refused", reason.removeprefix(f"{family} "))
    inputs = prompt(model)
    images = "pixel_values" in inputs
    try:
        plain = logits(model, inputs, DynamicCache(config=model.config))
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return Verdict("fails", str(error), images=images)
    with compress(model, SIX_BITS, fused=False):
        cache = CompressedCache(model.config, SIX_BITS)
        unfused = logits(model, inputs, cache)
    assert torch.equal(logits(model, inputs, CompressedCache(model.config, DENSE)), plain)
    assert cache.packed_tokens >= 32
    loss = (unfused - plain).norm() / plain.norm()
    assert 0 < loss < 0.3, f"6 bits change the logits by {loss:.2g}"
    layer = next(iter(cache.compressed_layers.values()))
    heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", 0)
    queries = heads // layer.keys.shape[1]
    try:
        with compress(model, SIX_BITS, fused=True), record_paths() as taken:
            cache = CompressedCache(model.config, SIX_BITS)
            fused = logits(model, inputs, cache)
    except ValueError as error:
        return Verdict("unfused", str(error).removeprefix(f"{type(model).__name__} "), queries, images)
    assert cache.packed_tokens >= 32
    torch.testing.assert_close(fused, unfused, atol=1e-5, rtol=1e-5)
    paths = {call.path for call in taken}
    if paths - {"decode"}:
        return Verdict("fused", "", queries, images)
    transforms = "transforms cached keys and values before it attends"
    reason = "passes an option that fused attention does not know" if paths else transforms
    return Verdict("unfused", reason, queries, images)


def prompt(model: PreTrainedModel) -> dict[str, Any]:
    """Two rows of text, one left-padded; or one row of an image and text, for models that take images."""
    image, count = next(((one, n) for one in _images(model) if (n := _image_tokens(model, one))), ({}, 0))
    ids = torch.randint(1, WORDS, (1 if image else 2, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if not image:
        mask[0, :PADDING] = 0
        return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    ids[:, IMAGE_AT : IMAGE_AT + count] = _first(model.config, "image_token_id", "image_token_index") or WORDS
    pictured = torch.zeros_like(ids)
    pictured[:, IMAGE_AT : IMAGE_AT + count] = 1
    made = {
        "mm_token_type_ids": pictured,
        "token_type_ids": pictured,
        "image_embeds_position_mask": pictured,
        "cross_attention_mask": torch.ones(1, PROMPT, 1, 4, dtype=torch.long),
        "image_attention_mask": torch.ones(1, PROMPT, 1, dtype=torch.long),
    }
    names = inspect.signature(model.forward).parameters
    return {"input_ids": ids, "attention_mask": mask, **image, **{name: made[name] for name in made if name in names}}


def _images(model: PreTrainedModel) -> list[dict[str, Any]]:
    """One image, in each of the forms that models ask for."""
    if model.config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return []
    names = inspect.signature(model.forward).parameters
    vision = getattr(model.config, "vision_config", None) or getattr(model.config, "vq_config", model.config)
    patch, size = _first(vision, "patch_size") or 14, _first(vision, "image_size") or 56
    patch, size = (x[0] if isinstance(x, (list, tuple)) else x for x in (patch, size))
    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(2))
    found: list[dict[str, Any]] = []
    if "aspect_ratio_ids" in names:
        ratio = {"aspect_ratio_ids": torch.tensor([[1]]), "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]])}
        return [{"pixel_values": image.repeat(4, 1, 1, 1)[None, None], **ratio}]
    if "image_grid_thw" in names:
        times = _first(vision, "temporal_patch_size", "patch_temporal") or 1
        flat = image.repeat(1, times, 1, 1)[..., : 4 * patch, : 4 * patch].reshape(16, -1)
        patches = image[..., : 4 * patch, : 4 * patch].reshape(16, 3, patch, patch)
        for pixels in (flat, patches.flatten(1), patches):
            found.append({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])})
    sizes = {"image_sizes": torch.tensor([[size, size]])}
    found += [{"pixel_values": image}, {"pixel_values": image[None]}, {"pixel_values": image, **sizes}]
    found += [{"pixel_values": image.repeat(2, 1, 1, 1)[None], **sizes}]
    return found


def _image_tokens(model: PreTrainedModel, image: dict[str, Any]) -> int:
    """Number of tokens that an image in this form takes; 0 if the model does not know the form."""
    if not hasattr(model, "get_image_features"):
        return int(image["pixel_values"].ndim == _CROSS_ATTENTION.get(model.config.model_type))
    try:
        with torch.no_grad():
            output = model.get_image_features(**image)
    except (AttributeError, KeyError, IndexError, RuntimeError, TypeError, ValueError):
        return 0
    pooled = getattr(output, "pooler_output", None)
    output = pooled if pooled is not None else getattr(output, "last_hidden_state", output)
    parts = output if isinstance(output, (list, tuple)) else [output]
    return sum(part.numel() // part.shape[-1] for part in parts)


def _first(config: Any, *names: str) -> Any:
    """First value that a config or its sub-configs have under one of these names."""
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))]
    return next((found for name in names for part in parts if (found := getattr(part, name, None)) is not None), None)
