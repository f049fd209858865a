"""CPU kernels: encoders and attention over compressed caches, in C++ that is compiled on first use."""

if __name__ != "kvcache_compress.cpu_kernels":
    raise ImportError(
        "this folder is installed as kvcache_compress.cpu_kernels; install the project (pip install -e .) and import "
        "kvcache_compress."
    )
