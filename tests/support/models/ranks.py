"""Process groups of one process, to stand in for a rank among many."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_process(rank: int, processes: int) -> Iterator[None]:
    """Be one rank of a distributed run while the block runs; a single process has no group."""
    if processes == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
