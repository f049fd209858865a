"""Running benchmarks over caches: shared, resumable, in one process or several."""
