"""The application: its commands in the order of the help."""

import warnings

import typer

from . import calibrate, demo, evaluate, installation, memory, presets, serve, tune

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="KV-cache compression for Hugging Face Transformers."
)
for _command in (
    demo.demo, presets.presets, memory.memory, calibrate.calibrate, tune.tune,
    serve.serve,
    installation.build, installation.doctor,
):  # fmt: skip
    app.command()(_command)
app.command("eval", help=evaluate.HELP, context_settings=evaluate.PASSED_ON)(evaluate.evaluate)


@app.callback()
def _short_warnings() -> None:
    """Print warnings as one line, without a line of source."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
