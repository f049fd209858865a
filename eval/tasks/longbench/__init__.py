"""LongBench, LongBench-E and LongBench v2."""
