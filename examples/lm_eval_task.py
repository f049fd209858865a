"""Run a generation task of lm-eval with a compressed cache: `python examples/lm_eval_task.py`.

Needs `pip install "kvcache-compress[clients]"`. The task is defined below, so nothing is downloaded; `--task gsm8k`
runs one of lm-eval's own tasks. Tasks that score given answers need `kvcache_compress.eval.runner.harness.CachedLM`.
"""

import argparse
import json
import logging
import tempfile
from pathlib import Path

import yaml
from datasets import disable_progress_bars
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvcache_compress import compress
from kvcache_compress.modeling.loading import load_model

NAMES = {"keeper": "Amos", "cook": "Ruth", "pilot": "Silas", "teacher": "Edith", "baker": "Otto", "smith": "Wanda"}
TEXT = " ".join(f"The {job} of the village is called {name}." for job, name in NAMES.items()) + "\n"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="hub id, folder or .gguf file")
parser.add_argument("--preset", action="append", help="repeatable; by default turboquant-4bit")
parser.add_argument("--task", default="villagers")
parser.add_argument("--limit", type=int, default=6, help="questions")
arguments = parser.parse_args()
logging.disable(logging.WARNING)
disable_progress_bars()
model, tokenizer = load_model(arguments.model)

with tempfile.TemporaryDirectory() as folder:
    rows = [{"text": TEXT * 4 + f"The {job} of the village is called", "answer": name} for job, name in NAMES.items()]
    (Path(folder) / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": "villagers",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{folder}/rows.json"}, "cache_dir": folder},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": " {{answer}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "ignore_case": True}],
    }
    (Path(folder) / "villagers.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3)
    tasks = TaskManager(include_path=folder, include_defaults=arguments.task != "villagers")
    for preset in arguments.preset or ["turboquant-4bit"]:
        with compress(model, preset) as compression:
            found = simple_evaluate(
                lm, tasks=[arguments.task], task_manager=tasks, limit=arguments.limit, bootstrap_iters=0
            )
        scores = found["results"][arguments.task]
        listed = ", ".join(f"{name} {value:.3f}" for name, value in scores.items() if isinstance(value, float))
        print(f"{preset}: {listed}; {compression.last_cache.packed_tokens} tokens packed")
