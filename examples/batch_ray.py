"""Answer a file of prompts with workers of Ray Data, each with a model and a compressed cache.

    python examples/batch_ray.py smollm2-135m prompts.jsonl answers/ --preset best-3bit --workers 2

Each line of `prompts.jsonl` is `{"id": ..., "prompt": ...}`; answers have the same ids, in no order. The batch of a
worker that dies is done again by another.
"""

from typing import Any

import ray
import typer

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


def main(
    model: str, prompts: str, answers: str, preset: str = "best-3bit", new: int = 64, batch: int = 8, workers: int = 2,
    cpus: float = 0.5, gpus: float = 0,
) -> None:  # fmt: skip
    """Answer PROMPTS, lines `{"id": ..., "prompt": ...}`, with at most NEW tokens each.

    Each worker has CPUS and GPUS.
    """
    ray.init()
    cores = ray.cluster_resources()["CPU"]
    if workers * cpus >= cores:  # reading would wait for ever
        raise typer.BadParameter(f"--workers times --cpus must leave cores to read and write; there are {cores:g}")
    rows = ray.data.read_json(prompts, lines=True).repartition(4 * workers)
    pool = ray.data.ActorPoolStrategy(size=workers)
    rows.map_batches(
        Answer, fn_constructor_args=(model, preset, new), compute=pool, batch_size=batch,
        num_cpus=cpus, num_gpus=gpus,
    ).write_json(answers)  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
