"""Models of each kind of attention, tiny and random, and the check that each passes with every method.

Kinds differ in what codecs and attention see: RoPE, head dimensions, masks, soft caps, sinks and layers. All families
run in `family_sweep.py`. `outcome` runs each pair once per process; `tests/modeling/test_families.py` tests the
outcomes, and `tests/support/models/support_table.py` writes them to `docs/reference/support.md`.
"""

from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvcache_compress import CompressedCache, CompressionConfig, compress, load_config
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.methods.commvq.codebook_file import codebook_facts, write_codebooks
from support.cache_name import feed
from support.files.commvq_files import FOLDER, codebook_file, random_codebooks
from support.files.spectral_files import statistics_of
from support.models import shrink
from support.recorded_paths import record_paths

VOCAB, SINKS, RECENT = 64, 4, 8
STEPS = [60, 1, 5, 20, 1]
"""Sizes of a prompt, of which 32 tokens are packed, a step, several tokens, a chunk, which packs more, and a step."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of models.

    about: its features, for the support table.
    options: options of its config, over `SIZES` and the small sizes of `shrink.py`.
    kind: its `model_type`, if that is not the family's name.
    rule: config rule for its layers without RoPE, with which methods work that need RoPE.
    """

    about: str
    options: dict[str, Any] = field(default_factory=dict)
    kind: str | None = None
    rule: dict[str, Any] | None = None


FAMILIES: dict[str, Family] = {
    "llama": Family("grouped queries"),
    "qwen2": Family(
        "7 query heads per key/value head", {"hidden_size": 224, "num_attention_heads": 7, "num_key_value_heads": 1}
    ),
    "gemma2": Family(
        "soft-capped scores; sliding attention in every other layer; the model's own attention is eager",
        {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32},
    ),
    "gemma3": Family("different RoPE in sliding and full layers", {"query_pre_attn_scalar": 32}, kind="gemma3_text"),
    "gemma4": Family(
        "full and sliding layers with different heads; later layers share keys and values",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 64,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "vocab_size_per_layer_input": VOCAB,
        },
        kind="gemma4_text",
    ),
    "phi3": Family("RoPE on half of each head", {"partial_rotary_factor": 0.5}),
    "phi3, 96": Family(
        "head dimension 96", {"head_dim": 96, "hidden_size": 192, "num_attention_heads": 2}, kind="phi3"
    ),
    "gpt_oss": Family(
        "learned logits (`s_aux`); sliding attention in every other layer; YaRN; the model's own attention is eager"
    ),
    "cohere2": Family("RoPE in sliding layers, none in full layers", {"logit_scale": 1.0}),
    "glm4": Family("RoPE on half of each head, in pairs of neighbours"),
    "qwen3_next": Family("linear attention in most layers; partial RoPE"),
    "falcon_h1": Family("attention and Mamba side by side in each layer", {"mamba_d_ssm": 64, "mamba_d_head": 16}),
    "deepseek_v3": Family(
        "caches a latent (as keys) and a rotary key (as values), decoded at each step",
        {
            "first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32, "v_head_dim": 48,
        },
    ),
    "smollm3": Family(
        "no RoPE in every fourth layer", {"no_rope_layers": [1, 0]}, rule={"match": 1, "method": "turboquant"}
    ),
    "gpt_neox": Family("RoPE on a quarter of each head", {"num_key_value_heads": 4}),
    "opt": Family("learned positions", {"word_embed_proj_dim": 128, "init_std": 0.1, "num_key_value_heads": 4}),
    "gpt2": Family("learned positions", {"num_key_value_heads": 4}),
}  # fmt: skip

TURBOQUANT = {"method": "turboquant", "bits": 4}
KIVI = {"method": "kivi", "bits": 4, "group_size": 16}
METHODS: dict[str, dict[str, Any]] = {
    "turboquant": {"keys": TURBOQUANT, "values": TURBOQUANT},
    "kivi": {"keys": KIVI, "values": KIVI},
    "polarquant_recursive": {"keys": "polarquant_recursive", "values": "polarquant_recursive"},
    "spectral": {"keys": {"method": "spectral", "bits": 3}, "values": TURBOQUANT},
    "polarquant_rope": {"keys": {"method": "polarquant_rope", "group_size": 32}, "values": TURBOQUANT},
    "qjl": {"keys": {"method": "qjl", "sketch_ratio": 4}, "values": TURBOQUANT},
    "commvq": {"keys": "commvq", "values": "commvq"},
}
"""Configs by method; methods for keys only are combined with TurboQuant for values."""
LARGEST_LOSS = {
    "turboquant": 0.15, "kivi": 0.1, "polarquant_recursive": 0.25, "polarquant_rope": 0.2, "qjl": 0.45,
    "commvq": 0.75, "spectral": 0.5,
}  # fmt: skip
"""Largest relative change of logits; large for CommVQ and spectral, whose codebooks and statistics are random here."""


@cache
def model(family: str) -> PreTrainedModel:
    """Model of a family in float32, made once, with its own attention."""
    return build(family)


def build(family: str, **changes: Any) -> PreTrainedModel:
    """Build a model of the family, or of another `model_type`, with changes to its config."""
    case = FAMILIES.get(family, Family(""))
    config = shrink.small_config(case.kind or family, **{**SIZES, **case.options, **changes})
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    for name, parameter in made.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return made.float().eval()


@cache
def codebooks(family: str) -> str:
    """CommVQ file with random codebooks for the family's model, or for another model if it cannot have any."""
    path = FOLDER / f"{family}.safetensors"
    try:
        facts = codebook_facts(model(family).config)
    except ValueError:
        return codebook_file(32)
    shape = {"head_dim": facts.head_dim, "num_key_value_heads": facts.kv_heads, "num_hidden_layers": facts.layers}
    write_codebooks(path, model(family).config, random_codebooks(SimpleNamespace(**shape), 1, (6, 64), (12, 64)))
    return str(path)


@cache
def statistics(family: str) -> str:
    """Spectral's file with random statistics for the family's model."""
    return statistics_of(model(family).config, family)


def method_config(family: str, method: str, rule: dict[str, Any] | None = None) -> CompressionConfig:
    """Cache config of a method on a family, with an optional rule for some layers."""
    layers = [] if rule is None else [rule]
    config = load_config({**METHODS[method], "sink_tokens": SINKS, "recent_tokens": RECENT, "layers": layers})
    if method == "spectral":
        return config.with_files(statistics=statistics(family))
    return config.with_files(codebooks=codebooks(family)) if method == "commvq" else config


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask `[2, T]`; the first row begins with padding."""
    ids = torch.randint(1, VOCAB, (2, sum(STEPS)), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    return ids.masked_fill(mask == 0, 0), mask


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    """Float32 logits of all tokens that are not padding, `[n, vocab]`, of a left-padded batch given in `STEPS`."""
    ids, mask = prompt()
    return feed(model, cache, ids, STEPS, mask)[mask.bool()].float()


class Both(NamedTuple):
    """Logits `[n, vocab]` with fused attention off and on, and the cache of each."""

    unfused: torch.Tensor
    fused: torch.Tensor
    unfused_cache: CompressedCache
    cache: CompressedCache


def assert_alike(both: Both) -> None:
    """Assert equal logits up to float32 rounding, or up to 2e-3 if rounding changed a few codes of later layers."""
    words = [
        (ours != theirs).flatten()
        for one, other in zip(both.cache.layers, both.unfused_cache.layers, strict=True)
        if isinstance(one, CompressedLayer)
        for side in ("keys", "values")
        for ours, theirs in zip(
            *(layer.sides[side].store.read(0, layer.packed_tokens) for layer in (one, other)), strict=True
        )
        if not ours.is_floating_point()
    ]
    different = torch.cat(words)
    assert different.sum() <= different.numel() // 1000, f"{int(different.sum())} of {different.numel()} words"
    if different.any():
        assert (both.fused - both.unfused).norm() <= 2e-3 * both.unfused.norm()
    else:
        torch.testing.assert_close(both.fused, both.unfused, atol=1e-4, rtol=0)


def both_ways(model: PreTrainedModel, config: CompressionConfig, backend: str = "torch") -> Both:
    """Logits with fused attention off and on, and the caches; both get the model's positions.

    With the torch backend prompt chunks have the same attention in both; C++ attention rounds differently, which can
    flip codes.
    """
    found, caches = [], []
    config = config.model_copy(update={"backend": backend})
    for fused in (False, True):
        with compress(model, config, fused=fused):
            caches.append(CompressedCache(model.config, config))
            found.append(logits(model, caches[-1]))
    return Both(*found, *caches)


@cache
def exact(family: str) -> torch.Tensor:
    """Logits of the family's model with Transformers' own cache."""
    return logits(model(family), DynamicCache(config=model(family).config))


@dataclass(frozen=True)
class Outcome:
    """Result of a method on a family: it works, works with the family's rule for some layers, or is refused.

    reason: message of the refusal without the rule.
    fused: True if attention read packed tokens without decoding them, in the run that worked.
    """

    support: Literal["yes", "rules", "no"]
    reason: str = ""
    fused: bool = False


@cache
def outcome(family: str, method: str) -> Outcome:
    """Run a method on a family.

    Raises:
        AssertionError: The method was accepted, but its results are wrong.
    """
    config = method_config(family, method)
    reason = refusal(family, config)
    if reason is None:
        return Outcome("yes", fused=check(family, config, LARGEST_LOSS[method]))
    ruled = method_config(family, method, FAMILIES[family].rule)
    if refusal(family, ruled) is not None:
        return Outcome("no", reason)
    return Outcome("rules", reason, fused=check(family, ruled, LARGEST_LOSS[method]))


def refusal(family: str, config: CompressionConfig) -> str | None:
    """Message with which a cache for this family refuses a config; None if it accepts it."""
    try:
        CompressedCache(model(family).config, config)
    except ValueError as error:
        return str(error)
    return None


def check(family: str, config: CompressionConfig, largest_loss: float) -> bool:
    """Assert that fused and unfused logits agree, that only full attention is compressed, and that it changes logits.

    Returns:
        True if fused attention was used.
    """
    with record_paths() as taken:
        both = both_ways(model(family), config)
    unfused, cache = both.unfused, both.cache
    assert cache.packed_tokens == 64, f"{cache.packed_tokens} tokens packed"
    assert_alike(both)
    loss = (unfused - exact(family)).norm() / exact(family).norm()
    assert 1e-3 < loss < largest_loss, f"compression changes the logits by {loss:.2g}"
    in_cpp = both_ways(model(family), config, "auto").fused
    assert (in_cpp - unfused).norm() <= 2e-3 * unfused.norm()
    for ours, own in zip(cache.layers, DynamicCache(config=model(family).config).layers, strict=True):
        full = isinstance(own, DynamicLayer) and not own.is_sliding
        assert isinstance(ours, CompressedLayer) if full else type(ours) is type(own)
    return any(call.path != "decode" for call in taken)
