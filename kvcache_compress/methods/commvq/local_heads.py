"""The heads of a codebook file that belong to a process under tensor parallelism."""

from __future__ import annotations

import torch

from kvcache_compress.codecs.base import CodecContext

from .codebook_file import CodebookHeader


def own_heads(header: CodebookHeader, context: CodecContext) -> slice:
    """Heads of the file for this layer: all of them or, under tensor parallelism, this process's share.

    Transformers splits the key/value heads into runs, in the order of the ranks of the n processes that share a model.
    n is the fastest dimension of its device mesh, so ranks continue through data-parallel copies.

    Raises:
        ValueError: the file's heads do not match, or its encoder of values needs all heads of a token together.
    """
    shares, rest = divmod(header.kv_heads, context.heads)
    processes = torch.distributed.get_world_size() if _is_distributed() else 1
    if header.head_dim != context.head_dim or rest or not shares or processes % shares:
        raise ValueError(
            f"codebooks={header.path!r} for commvq: made for {header.kv_heads} heads of {header.head_dim}, not "
            f"{context.heads} of {context.head_dim} in each of {processes} processes"
        )
    if shares > 1 and context.side == "values" and header.encoder_bits:
        raise ValueError(
            f"codebooks={header.path!r} for commvq: its encoder of values takes all {header.kv_heads} heads of a token "
            f"together, and tensor parallelism leaves {context.heads} here: calibrate values without an encoder"
        )
    first = torch.distributed.get_rank() % shares * context.heads if shares > 1 else 0
    return slice(first, first + context.heads)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
