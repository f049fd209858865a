"""Run the commands of `examples/README.md` and its notebook, and write what they print into both.

python benchmarks/pages/run_examples.py
python benchmarks/pages/run_examples.py chat quickstart
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

import nbformat
import typer
from nbclient import NotebookClient

from kvcache_compress.eval.provenance.results import write_atomically

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "examples" / "README.md"
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
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


def run_notebook() -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run, without times of day, versions and warnings."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {"language_info": {"name": "python"}}
    return notebook


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
    if not names or NOTEBOOK.stem in names:
        write_atomically(NOTEBOOK, nbformat.writes(run_notebook()) + "\n")


if __name__ == "__main__":
    typer.run(main)
