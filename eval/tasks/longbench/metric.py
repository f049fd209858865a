"""LongBench's metrics as a module of Hugging Face's `evaluate`, which loads it by its path:

    evaluate.load(metric.__file__, "qa_f1").compute(predictions=["..."], references=[["...", "..."]])

`evaluate` copies this file and finds its imports line by line, so each import must be on one line.
"""

import statistics

import datasets
import evaluate

from kvcache_compress.eval.tasks.longbench.scores import METRICS, best_score


class LongBenchMetric(evaluate.Metric):
    """The metric of `scores.METRICS` that the configuration names."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in METRICS:
            raise ValueError(f"metric={self.config_name!r}: must be one of {', '.join(METRICS)}")
        texts = datasets.Value("string")
        return evaluate.MetricInfo(
            description="The best score, 0 to 1, over a sample's right answers, averaged over samples.",
            citation="Bai et al., LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding, 2023",
            inputs_description="predictions: texts; references: right answers of each; classes: for classification",
            features=datasets.Features({"predictions": texts, "references": datasets.Sequence(texts)}),
        )

    def _compute(
        self, predictions: list[str], references: list[list[str]], classes: tuple[str, ...] = ()
    ) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        scores = [best_score(self.config_name, prediction, answers, classes) for prediction, answers in pairs]
        return {self.config_name: statistics.fmean(scores)}
