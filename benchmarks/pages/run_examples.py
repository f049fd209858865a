"""Run the commands of `examples/README.md`, and write what they print into it.

python benchmarks/pages/run_examples.py
python benchmarks/pages/run_examples.py compare own_method
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvcache_compress.eval.provenance.results import write_atomically

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "examples" / "README.md"
_BLOCK = re.compile(r"```bash\npython (examples/.*?)\n```\n\n```text\n(.*?)```\n", flags=re.DOTALL)


def documented() -> dict[str, str]:
    """The outputs on the page by command, without its `python`."""
    return dict(_BLOCK.findall(PAGE.read_text(encoding="utf-8")))


def run(command: str) -> str:
    """Run a command of the page in this process, so that packages are imported once, and return what it prints."""
    path, *arguments = shlex.split(command)
    printed, before = io.StringIO(), sys.argv
    sys.argv = [path, *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(ROOT / path), run_name="__main__")
    finally:
        sys.argv = before
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def main(names: Annotated[list[str] | None, typer.Argument(help="Examples to run, by default all.")] = None) -> None:
    os.chdir(ROOT)
    printed = {}
    for command in documented():
        if names and Path(shlex.split(command)[0]).stem not in names:
            continue
        printed[command] = run(command)
        typer.echo(f"$ python {command}\n{printed[command]}")
    page = PAGE.read_text(encoding="utf-8")
    for command, text in printed.items():
        head = f"```bash\npython {command}\n```\n\n```text\n"
        page = page.replace(f"{head}{documented()[command]}```", f"{head}{text}```")
    write_atomically(PAGE, page)


if __name__ == "__main__":
    typer.run(main)
