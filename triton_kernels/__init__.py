"""Triton kernels: the split-KV decode attention, its merge, and one file of device functions per method."""

if __name__ != "kvcache_compress.triton_kernels":
    raise ImportError(
        "this folder is installed as kvcache_compress.triton_kernels; a top-level package of this name would shadow "
        "Triton's own `triton_kernels`. Install the project (pip install -e .) and import kvcache_compress."
    )
