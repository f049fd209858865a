"""Metrics of the server for Prometheus."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

FIRST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
NEXT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
PREFIX = "kvcache_compress"


class Metrics:
    """Counters and histograms; `registry` also has the gauges once the engine has been added to it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def make(kind: Any, name: str, help: str, **options: Any) -> Any:
            return kind(name, help, namespace=PREFIX, registry=self.registry, **options)

        self.requests = make(Counter, "requests", "Requests by HTTP status.", labelnames=["status"])
        self.prompt_tokens = make(Counter, "prompt_tokens", "Tokens of admitted prompts.")
        self.shared_tokens = make(Counter, "shared_tokens", "Prompt tokens found in shared pages.")
        self.written_tokens = make(Counter, "written_tokens", "Tokens of answers.")
        self.first_token = make(Histogram, "first_token_seconds", "Time to the first token.", buckets=FIRST_SECONDS)
        self.next_token = make(Histogram, "next_token_seconds", "Time between tokens.", buckets=NEXT_SECONDS)
        self.verified_tokens = make(Counter, "verified_tokens", "Tokens compared with a full cache.")
        self.verified_equal = make(Counter, "verified_equal", "Of these, tokens that the full cache writes too.")
        self.verified_kl = make(Counter, "verified_kl", "Sum of their KL divergences from the full cache, in nats.")


class Gauges(Collector):
    """Gauges of the pages and the queue, read at each scrape.

    Args:
        cache: the engine's cache.
        waiting: number of requests that wait.
    """

    def __init__(self, cache: Any, waiting: Any) -> None:
        self.cache, self.waiting = cache, waiting

    def collect(self) -> Iterator[Metric]:
        requests = list(self.cache.pages.requests.values())
        free = self.cache.compute_free_capacity(relative=False)
        used = self.cache.num_sectors * self.cache.bytes_per_sector - free
        packed = sum(one.packed for one in requests)
        for name, help, value in (
            ("requests_running", "Requests with a slot.", len(requests)),
            ("requests_waiting", "Requests that wait for one.", self.waiting()),
            ("packed_tokens", "Packed tokens of running requests.", packed),
            ("dense_tokens", "Dense tokens of running requests.", sum(one.tokens for one in requests) - packed),
            ("used_bytes", "Bytes of pages in use, shared prefixes included.", used),
            ("free_bytes", "Bytes of free pages.", free),
        ):
            yield GaugeMetricFamily(f"{PREFIX}_{name}", help, value)
