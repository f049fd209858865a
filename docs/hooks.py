"""Hook of `mkdocs build`: pages made from files outside of docs/, links to such files, and the commands' page.

In Markdown, links are relative to the file, as repository browsers show them. The site has only pages: a link to a file
outside of docs/ becomes the page made from it, an address in the repository (`Repository` in the `[project.urls]` of
pyproject.toml), or, as long as there is none, plain text. A link to a file that does not exist stops the build.
"""

from __future__ import annotations

import html
import itertools
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "dev/contributing.md",
    "CHANGELOG.md": "dev/changes.md",
    "benchmarks/README.md": "dev/running-benchmarks.md",
}
"""Pages made from files outside of docs/."""
NAME = "kvcache-compress"
COMMANDS = "reference/command-line.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def repository() -> str | None:
    """Address of the repository, or None while the project names none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address: str | None = project.get("urls", {}).get("Repository")
    return address


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of docs/."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, COMMANDS, content=commands()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point the links of a page at the site, and hide the navigation beside a page that is a section of its own."""
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])
    named = {page_path: path for path, page_path in PAGES.items()}
    source = named.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return with_site_links(markdown, source, page.file.src_uri, repository())


def with_site_links(markdown: str, source: str, page: str, address: str | None) -> str:
    """Rewrite the links of a file `source` of the repository for its `page`, whose path is relative to docs/.

    Raises:
        PluginError: a link to a file that does not exist.
    """

    def rewritten(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        text = LINK.sub(rewritten, text)  # an image within a link
        if address is not None:
            target = re.sub(rf"^{re.escape(address)}/(?:blob|raw)/main/", "/", target)
        if image and re.match(r"https?:", target):
            return ""  # badges: the site fetches nothing from other hosts
        if re.match(r"[a-z]+:|#", target):
            return f"{image}[{text}]({target})"
        path, hash_sign, anchor = target.partition("#")
        full = path[1:] if path.startswith("/") else os.path.normpath(os.path.join(os.path.dirname(source), path))
        if not (ROOT / full).exists():
            raise PluginError(f"{source}: {target}: no such file")
        of_site = PAGES.get(full) or (full.removeprefix("docs/") if full.startswith("docs/") else None)
        if of_site is not None:
            relative = os.path.relpath(of_site, os.path.dirname(page) or ".")
            return f"{image}[{text}]({relative}{hash_sign}{anchor})"
        return text if address is None else f"{image}[{text}]({address}/blob/main/{full}{hash_sign}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else LINK.sub(rewritten, part) for index, part in enumerate(parts))


def commands() -> str:
    """Page of all commands, from their own help."""
    from kvcache_compress.cli import app
    from kvcache_compress.cli.evaluate.app import app as evaluations

    lines = [
        "# Command line",
        "",
        "Every command shows this with `--help`. Options that are *repeatable* are given once per value.",
        "",
    ]
    found = {name: typer.main.get_command(one) for name, one in ((NAME, app), (f"{NAME} eval", evaluations))}
    for path, command, context in itertools.chain.from_iterable(_leaves(one, name) for name, one in found.items()):
        if path in found:
            continue
        lines += [f"## `{path}`", "", _plain(command.help), ""]
        rows = [_option(parameter, context) for parameter in command.params if not getattr(parameter, "hidden", False)]
        if rows:
            lines += ["| option | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """All commands that are no groups, with their paths and contexts."""
    context = command.context_class(command, info_name=path)
    if not hasattr(command, "list_commands"):
        yield path, command, context
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        if not inner.hidden:
            yield from _leaves(inner, f"{path} {name}")


def _option(parameter: Any, context: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    is_option = parameter.param_type_name == "option"
    name = ", ".join(f"`{one}`" for one in names) if is_option else f"`{names[0].upper()}`"
    default = parameter.get_default(context)
    default = default.name if isinstance(default, Path) else default
    shown = "required" if parameter.required else "" if default in (None, False, [], ()) else f"`{default}`"
    return f"| {name} | {shown} | {_plain(getattr(parameter, 'help', None))} |"


def _plain(text: str | None) -> str:
    """Text for a cell of a table, on one line."""
    return html.escape(" ".join((text or "").split()), quote=False).replace("|", "\\|").replace("*", "\\*")
