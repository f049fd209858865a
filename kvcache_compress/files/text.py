"""Reading of users' text files, YAML and JSON, bounded in size and depth.

All errors are one-line `ValueError`s that begin with the name that the caller gives the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

import yaml

from kvcache_compress.validation import one_line, quoted

MOST_YAML_BYTES = 1 << 18
MOST_NODES = 5_000
"""Mappings, lists and scalars of a YAML text, each counted as often as aliases repeat it."""
MOST_DEPTH = 50
_LONGEST_NAME = 500


def read_text(path: str | Path, name: str | None = None, most_bytes: int | None = None) -> str:
    """Read a text file in UTF-8, with `\\n` for every line end.

    Args:
        path: the file.
        name: its name in messages, by default the path.
        most_bytes: largest size that is accepted, by default any.

    Raises:
        ValueError: The file is missing, a folder, too large, unreadable or not UTF-8.
    """
    path, name = Path(path), (name or str(path))[-_LONGEST_NAME:]
    if not isfile(path):
        raise ValueError(f"{name}: {'a folder; a file is needed' if isdir(path) else 'no such file'}")
    try:
        size = path.stat().st_size
        if most_bytes is not None and size > most_bytes:
            raise ValueError(f"{name}: {size} bytes; allowed up to {most_bytes}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not a text in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror or error}") from None


def read_yaml(path: str | Path, name: str | None = None) -> Any:
    """Read and parse a YAML file; raises `ValueError` as `read_text` and `parse_yaml` do."""
    return parse_yaml(read_text(path, name, MOST_YAML_BYTES), name or str(path))


def parse_yaml(text: str, name: str) -> Any:
    """Parse a YAML text.

    Raises:
        ValueError: It is not YAML, a key appears twice, or it has more than `MOST_NODES` nodes or `MOST_DEPTH` levels.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{name}: not YAML: {line}{error.problem}") from None
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:  # the last two come from numbers and dates
        raise ValueError(f"{name}: not YAML: {str(error).splitlines()[0]}") from None
    except (LookupError, AttributeError, TypeError) as error:  # from explicit tags on values they do not fit
        raise ValueError(f"{name}: not YAML: a tag on a value that it does not fit ({one_line(error)})") from None


def parse_json(text: str, name: str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: It is not JSON, a key appears twice, it is nested too deeply, or an integer has thousands of digits.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError(f"{name}: not JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name}: not JSON: {error}") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {quoted(key)} appears twice")
        found[key] = value
    return found


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys and texts beyond the limits, before anything large is built."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._started = 0
        self._extent: dict[yaml.Node, tuple[int, int]] = {}
        """Number of nodes and levels of each composed node."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if node not in self._extent:
                self._refuse(f"alias {quoted(event.anchor)} within what it stands for", event.start_mark)
            return node
        self._depth += 1
        self._started += 1
        self._check(self._started, self._depth, event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        assert node is not None
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            keys = [key for key, _ in node.value]
            self._check_distinct(keys)
            children = [*keys, *(value for _, value in node.value)]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        extents = [self._extent[child] for child in children]
        nodes, levels = 1 + sum(size for size, _ in extents), 1 + max((depth for _, depth in extents), default=0)
        self._check(nodes, levels, node.start_mark)
        self._extent[node] = nodes, levels
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace merge keys by what they stand for; of equal keys the last one stays, the mapping's own.

        PyYAML 6.0.4 would take the first one where the mapping is merged into another.
        """
        super().flatten_mapping(node)
        last = {
            (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key): (key, value)
            for key, value in node.value
        }
        node.value = list(last.values())

    def _check_distinct(self, keys: Iterable[yaml.Node]) -> None:
        seen = set()
        for key in keys:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    self._refuse(f"key {quoted(key.value)} appears twice", key.start_mark)
                seen.add((key.tag, key.value))

    def _check(self, nodes: int, levels: int, mark: Any) -> None:
        if nodes > MOST_NODES:
            self._refuse(f"more than {MOST_NODES} values, with what aliases repeat", mark)
        if levels > MOST_DEPTH:
            self._refuse(f"more than {MOST_DEPTH} levels", mark)

    def _refuse(self, problem: str, mark: Any) -> None:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
