"""Hook of `mkdocs build`: adds pages from files outside of docs/ and a page of commands, and rewrites links.

In Markdown, links are relative to the file, as repository browsers show them. On the site, a link to a file outside of
docs/ becomes the page made from it, or plain text. A link to a file that does not exist stops the build.
"""

import os
import re
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, COMMANDS, content=commands()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite the links of a page, and hide the navigation beside a page that is a section of its own."""
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])
    named = {page_path: path for path, page_path in PAGES.items()}
    source = named.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return with_site_links(markdown, source, page.file.src_uri)


def with_site_links(markdown: str, source: str, page: str) -> str:
    """Rewrite the links of a file `source` of the repository for its `page`, a path relative to docs/.

    Raises:
        PluginError: a link to a file that does not exist.
    """

    def rewritten(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        text = LINK.sub(rewritten, text)  # an image within a link
        if image and re.match(r"https?:", target):
            return ""  # badges: the site fetches nothing from other hosts
        if re.match(r"[a-z]+:|#", target):
            return f"{image}[{text}]({target})"
        path, hash_sign, anchor = target.partition("#")
        full = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if not (ROOT / full).exists():
            raise PluginError(f"{source} links to {target}, which does not exist")
        of_site = PAGES.get(full) or (full.removeprefix("docs/") if full.startswith("docs/") else None)
        if of_site is None:
            return text
        return f"{image}[{text}]({os.path.relpath(of_site, os.path.dirname(page) or '.')}{hash_sign}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else LINK.sub(rewritten, part) for index, part in enumerate(parts))


def commands() -> str:
    """Write the page of all commands from their own help."""
    from kvcache_compress.cli import app
    from kvcache_compress.cli.evaluate.app import app as evaluations

    pages = []
    for indent, (name, title, one) in enumerate((("", "Command line", app), (" eval", None, evaluations))):
        command: Any = typer.main.get_command(one)
        context = command.context_class(command, info_name=f"{NAME}{name}")
        pages.append(get_docs_for_click(obj=command, ctx=context, indent=indent, name=f"{NAME}{name}", title=title))
    return "\n".join(pages)
