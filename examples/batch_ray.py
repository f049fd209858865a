"""Answer a file of prompts with workers of Ray Data, each with a model and a compressed cache.

    python examples/batch_ray.py smollm2-135m prompts.jsonl answers/ --preset best-3bit --workers 2

Each line of `prompts.jsonl` is `{"id": ..., "prompt": ...}`; answers have the same ids, in no order. The batch of a
worker that dies is done again by another.
"""

import argparse
from typing import Any

import ray

from kvcache_compress import compress


class Answer:
    """A worker: loads the model once, and answers batches of rows."""

    def __init__(self, model: str, preset: str, new: int) -> None:
        from kvcache_compress.eval.runner.load import load

        self.model, self.tokenizer = load(model, "bfloat16", None)
        self.preset, self.new = preset, new

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        inputs = self.tokenizer(list(rows["prompt"]), padding=True, return_tensors="pt").to(self.model.device)
        with compress(self.model, self.preset):
            tokens = self.model.generate(**inputs, max_new_tokens=self.new, do_sample=False)
        answers = tokens[:, inputs.input_ids.shape[1] :]
        return {**rows, "answer": self.tokenizer.batch_decode(answers, skip_special_tokens=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("answers")
    parser.add_argument("--preset", default="best-3bit")
    parser.add_argument("--new", type=int, default=64, help="most new tokens of an answer")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=0.5, help="cores of a worker")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of a worker")
    args = parser.parse_args()
    ray.init()
    cores = ray.cluster_resources()["CPU"]
    if args.workers * args.cpus >= cores:  # reading would wait for ever
        parser.error(f"--workers times --cpus must leave cores to read and write; there are {cores:g}")
    rows = ray.data.read_json(args.prompts, lines=True).repartition(4 * args.workers)
    workers = ray.data.ActorPoolStrategy(size=args.workers)
    rows.map_batches(
        Answer, fn_constructor_args=(args.model, args.preset, args.new), compute=workers, batch_size=args.batch,
        num_cpus=args.cpus, num_gpus=args.gpus,
    ).write_json(args.answers)  # fmt: skip


if __name__ == "__main__":
    main()
