"""LongBench and LongBench-E."""
