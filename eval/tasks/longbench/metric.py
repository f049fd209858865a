"""LongBench's metrics as a local module of Hugging Face's `evaluate`, loaded by its path without the hub:

    evaluate.load(metric.__file__, "qa_f1").compute(predictions=["..."], references=[["...", "..."]])

`evaluate` copies this file elsewhere and finds imports by reading lines, so each import must be on one line.
"""

import statistics

import datasets
import evaluate

from kvcache_compress.eval.tasks.longbench.scores import METRICS, best_score

DESCRIPTION = "Metrics of LongBench, 0 to 1: the mean over samples of the best score over a sample's right answers."
CITATION = "Bai et al., LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding, arXiv:2308.14508"


class LongBenchMetric(evaluate.Metric):
    """One of `scores.METRICS`, named by the configuration."""

    def _info(self) -> evaluate.MetricInfo:
        """Describe the metric.

        Raises:
            ValueError: the configuration is not a metric.
        """
        if self.config_name not in METRICS:
            raise ValueError(f"metric={self.config_name!r}: allowed {', '.join(METRICS)}")
        texts = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description="predictions: texts; references: for each a list of right answers; classes: of "
            "classification, all class names",
            features=datasets.Features({"predictions": texts, "references": datasets.Sequence(texts)}),
        )

    def _compute(
        self, predictions: list[str], references: list[list[str]], classes: tuple[str, ...] = ()
    ) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        scores = [best_score(self.config_name, prediction, answers, classes) for prediction, answers in pairs]
        return {self.config_name: statistics.fmean(scores)}
