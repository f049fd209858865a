"""One process of a tensor-parallel model, started by `torchrun`; see `test_tensor_parallel.py`.

Arguments: the model's folder, a file for the results of rank 0, a CommVQ file for 4 heads, one with an encoder, and a
file of spectral statistics.
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvcache_compress import CommVQCache, CompressedCache, disable_fused_attention, enable_fused_attention
from support.cache_name import with_cache
from support.models.small_model import VOCAB, method_config


def cases(codebooks: str, statistics: str) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Name, fused or not, and the cache's configuration."""
    files = {"codebooks": codebooks, "statistics": statistics}
    for name in ("turboquant", "kivi", "qjl", "commvq", "spectral"):
        config = method_config(name)
        for side in ("keys", "values"):
            config[side] |= {option: path for option, path in files.items() if option in config[side]}
        yield name, True, config
        if name == "commvq":
            yield name, False, config
    first_prompt = method_config("spectral")
    first_prompt["keys"] |= {"statistics": "text", "group": 32}
    yield "spectral-prefill", True, first_prompt


class Found(NamedTuple):
    """Generated tokens, their logits, tokens packed and heads held by the cache, and a layer's keys, decoded."""

    sequences: torch.Tensor
    logits: torch.Tensor
    sizes: list[int]
    keys: torch.Tensor


def generate(model: PreTrainedModel, fused: bool, config: Any) -> Found:
    """Generate 16 tokens after a prompt with padding, long enough for statistics of the text."""
    (enable_fused_attention if fused else disable_fused_attention)(model)
    tokens = 300 if isinstance(config, dict) and config["keys"].get("statistics") == "text" else 60
    ids = torch.randint(1, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    cache = CompressedCache(model.config, config)
    how = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, attention_mask=mask, **with_cache(cache), **how)
    layer = cache.layers[1]
    keys = layer.sides["keys"].view().stored()
    return Found(output.sequences, torch.stack(output.logits), [cache.packed_tokens, layer.keys.shape[1]], keys)


def main(folder: str, results: str, codebooks: str, encoder: str, statistics: str) -> None:
    sharded = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    found: dict[str, Any] = {}
    for name, fused, config in cases(codebooks, statistics):
        found[f"{name}-{fused}"] = tuple(generate(sharded, fused, config))
    try:
        generate(sharded, True, CommVQCache(sharded.config, codebooks=encoder).compression)
    except ValueError as error:
        found["encoder"] = str(error)
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = next(config for name, _, config in cases(codebooks, statistics) if name == "commvq")
    found["data-parallel"] = tuple(generate(whole, True, config))
    if torch.distributed.get_rank() == 0:
        torch.save(found, results)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
