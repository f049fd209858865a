"""Record how attention calls over compressed layers attend."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from kvcache_compress.attention import interface
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.view import AttentionPath, View


class PathTaken(NamedTuple):
    """Path of one attention call, and its number of queries."""

    path: str
    queries: int


@contextmanager
def record_paths() -> Iterator[list[PathTaken]]:
    """Record the path of every attention call over a compressed layer, in order, within the block.

    It is "decode" where a layer is decoded whole. Calls of a first prompt are not recorded, because nothing is
    compressed yet.
    """
    taken: list[PathTaken] = []
    attend, choose = View.attend, interface._path

    def attended(keys: View, call: AttentionCall, values: View, path: AttentionPath | None = None) -> torch.Tensor:
        path = path or keys.path(call, values) or keys.backend
        assert path is not None
        taken.append(PathTaken(path.name, call.query.shape[2]))
        return attend(keys, call, values, path)

    def chosen(keys: View, values: View, call: AttentionCall, *others: Any) -> AttentionPath | None:
        path = choose(keys, values, call, *others)
        if path is None and not (keys.awaited_queries or torch.compiler.is_compiling()):
            taken.append(PathTaken("decode", call.query.shape[2]))
        return path

    with mock.patch.object(View, "attend", attended), mock.patch.object(interface, "_path", chosen):
        yield taken
