"""Evaluation of caches: benchmarks, studies of methods, comparisons and their reports."""
