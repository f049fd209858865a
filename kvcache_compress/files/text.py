"""Read users' text files and YAML.

All errors are one-line `ValueError`s that begin with the name that the caller gives the text.
"""

from os.path import isdir, isfile
from pathlib import Path
from typing import Any

import yaml

from kvcache_compress.validation import quoted

_LONGEST_NAME = 500


def read_text(path: str | Path, name: str | None = None, most: int = -1) -> str:
    """Read a text file in UTF-8, or its first `most` characters, with `\\n` for every line end.

    `name` is its name in messages.
    """
    path, name = Path(path), (name or str(path))[-_LONGEST_NAME:]
    if not isfile(path):
        raise ValueError(f"{name}: {'is a folder; pass a file' if isdir(path) else 'no such file'}")
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(most)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror or error}") from None


def read_yaml(path: str | Path, name: str | None = None) -> Any:
    """Read and parse a YAML file; raises `ValueError` as `read_text` and `parse_yaml` do."""
    return parse_yaml(read_text(path, name), name or str(path))


def parse_yaml(text: str, name: str) -> Any:
    """Parse a YAML text."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{name}: not YAML: {line}{error.problem}") from None
    except RecursionError:
        raise ValueError(f"{name}: not YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # the last comes from numbers and dates
        raise ValueError(f"{name}: not YAML: {str(error).splitlines()[0]}") from None


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses a key that appears twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    problem = f"key {quoted(key.value)} appears twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)
