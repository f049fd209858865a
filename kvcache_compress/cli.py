"""Command line `kvcache-compress`; each command calls one function of the package."""

from __future__ import annotations

import platform
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from kvcache_compress.validation import MOST_TOKENS, parse_size, quoted, shortened, size_text

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="KV-cache compression for Hugging Face Transformers."
)
console = Console()
SCORES = {"kl": 4, "kl_999": 3}
"""Measured losses of presets that are shown, and their decimals."""
COMPARED = ("turboquant-4bit", "turboquant-3bit", "turboquant-2bit", "commvq-2bit")
"""Presets that are listed beside those by budget."""


@app.callback()
def _short_warnings() -> None:
    """Print warnings as one line, without a line of source."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"


def _starting() -> Status:
    """A line on the terminal while PyTorch and Transformers are imported, which takes seconds."""
    return Console(stderr=True).status("Importing PyTorch and Transformers ...")


def _fail(error: Exception) -> None:
    typer.secho(f"error: {shortened(str(error))}", fg="red", err=True)
    raise typer.Exit(1) from None


@app.command()
def demo(
    preset: Annotated[
        list[str] | None, typer.Option(help="Preset or YAML file; repeatable, by default best-4bit and best-2bit.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a path.")] = "smollm2-135m",
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1, max=MOST_TOKENS)] = 32,
) -> None:
    """Answer a question about a long text from compressed caches, and measure their time, memory and loss."""
    with _starting():
        from .demo import run_demo

    try:
        run_demo(console, model, preset or ["best-4bit", "best-2bit"], new_tokens)
    except (ValueError, ImportError) as error:
        _fail(error)


@app.command()
def presets(
    everything: Annotated[
        bool, typer.Option("--all", help="All presets, also the papers' and single methods'.")
    ] = False,
) -> None:
    """List the recommended presets with their stored bits per number and what they lose."""
    from kvcache_compress.cache.estimate import packed_bits, summary

    from .config import BUDGETS, load_config, measured_losses, preset_names

    losses, aliases = measured_losses(), {preset: budget for budget, preset in BUDGETS.items()}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("preset", "D=64", "D=128", "KL", "99.9 %", "description"):
        text = heading in ("preset", "description")
        table.add_column(heading, justify="left" if text else "right", no_wrap=heading != "description")
    for name in [*BUDGETS, *preset_names()] if everything else [*BUDGETS, *COMPARED]:
        config = load_config(name)
        about = summary(BUDGETS.get(name, name))
        bits = [f"{packed_bits(config, dim):.2f}" for dim in (64, 128)]
        same = next((known for known in (name, aliases.get(name)) if known in losses), None)
        loss = [f"{losses[same][score]:.{digits}f}" if same else "-" for score, digits in SCORES.items()]
        table.add_row(name, *bits, *loss, about)
    console.print(table)
    console.print("D: bits per packed number at this head dimension, everything counted.")
    console.print("KL: nats per token, SmolLM2-135M, 1,024 tokens of six kinds of text.")
    console.print("On your own model:")
    console.print("kvcache-compress tune --verify PRESET --model MODEL --text FILE")
    if not everything:
        console.print("All presets: kvcache-compress presets --all")


@app.command()
def memory(
    model: Annotated[
        str | None, typer.Option(help="llama-3.1-8b, qwen2.5-7b, smollm2-135m, or a hub id or a folder.")
    ] = None,
    preset: Annotated[list[str] | None, typer.Option(help="Preset or YAML file; repeatable.")] = None,
    context: Annotated[str, typer.Option("--context", "--tokens", help="Tokens of each sequence.")] = "128K",
    everything: Annotated[
        bool, typer.Option("--all", help="All presets, also the papers' and single methods'.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Sequences.", min=1, max=MOST_TOKENS)] = 1,
    layers: Annotated[int, typer.Option(help="Without --model: layers.", min=1, max=1024)] = 32,
    kv_heads: Annotated[int, typer.Option(help="Without --model: key/value heads.", min=1, max=1024)] = 8,
    head_dim: Annotated[int, typer.Option(help="Without --model: head dimension.", min=1, max=1024)] = 128,
) -> None:
    """Estimate the memory of each preset's cache, everything counted; by default for Llama-3.1-8B's shape."""
    from kvcache_compress.cache.estimate import model_shape, total_bytes

    from .config import BUDGETS, load_config, preset_names

    try:
        tokens = parse_size(context, "context")
        if tokens > MOST_TOKENS:
            raise ValueError(f"context={quoted(context)}: allowed up to {MOST_TOKENS} tokens")
        if model is not None:
            layers, _, kv_heads, head_dim = model_shape(model)
        shape = (layers, kv_heads, head_dim)
        named = model or ("llama-3.1-8b" if (layers, kv_heads, head_dim) == (32, 8, 128) else "this shape")
        console.print(
            f"{named}: {layers} full-attention layers with {kv_heads} key/value heads of {head_dim}", soft_wrap=True
        )
        console.print(f"{tokens:,} tokens" + (f" in each of {batch} sequences" if batch > 1 else ""))
        table = Table()
        for heading in ("cache", "memory", "times smaller"):
            table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=True)
        full = 2 * 2 * shape[0] * shape[1] * shape[2] * tokens * batch
        table.add_row("bfloat16", size_text(full), "1.00")
        for name in preset or [*BUDGETS, *(preset_names() if everything else COMPARED)]:
            config = load_config(name)
            try:
                size = total_bytes(config, *shape, tokens, batch)
            except ValueError as error:
                table.add_row(name, "-", "-")
                console.print(f"{name}: {error}", style="dim")
                continue
            table.add_row(name, size_text(size), f"{full / size:.2f}")
    except (ValueError, OSError) as error:
        _fail(error)
    console.print(table)
    console.print("A growing cache also holds room for its next tokens, up to an eighth more.")


@app.command()
def calibrate(
    text: Annotated[list[str], typer.Option(help="Text files, or a dataset's id on the hub; repeatable.")],
    output: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
    method: Annotated[str, typer.Option(help="Method to calibrate: commvq or spectral.")] = "commvq",
    model: Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a path.")] = "smollm2-135m",
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of text; by default 55296 (--quick 18432), spectral 20480.")
    ] = None,
    bits: Annotated[int | None, typer.Option(help="commvq: code bits per number, 1 or 2 (default).")] = None,
    values: Annotated[
        str | None, typer.Option(help="commvq: value codes, residual (default) or the paper's encoder.")
    ] = None,
    key_rounds: Annotated[int | None, typer.Option(help="commvq: residual rounds of keys, by head on average.")] = None,
    value_rounds: Annotated[int | None, typer.Option(help="commvq: residual rounds of values, likewise.")] = None,
    share_rounds: Annotated[
        bool | None,
        typer.Option(
            "--share-rounds/--even-rounds",
            help="commvq: more rounds for heads whose errors cost more (default), or not.",
        ),
    ] = None,
    centres: Annotated[
        int | None, typer.Option(help="commvq: centres of a codebook, a power of two from 2 to 64 (default).")
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option(help="commvq: groups of a head's channels, coded apart; 1 by default up to 128 channels."),
    ] = None,
    weigh_pairs: Annotated[
        bool | None, typer.Option(help="commvq: weigh keys' errors by the queries (default); the paper does not.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="commvq: less text and fewer steps.")] = False,
    group: Annotated[int | None, typer.Option(help="spectral: tokens per group: 32, 64 (default) or 128.")] = None,
    device: Annotated[str | None, typer.Option(help="Device; a GPU if there is one.")] = None,
) -> None:
    """Learn a method's file from a model and text: CommVQ's codebooks (resumable), or spectral's statistics."""
    common = {"tokens": tokens}
    commvq = {"bits": bits, "values": values, "key_rounds": key_rounds, "value_rounds": value_rounds}
    commvq |= {"share_rounds": share_rounds, "centres": centres, "groups": groups, "weigh_pairs": weigh_pairs}
    own: dict[str, dict[str, Any]] = {"commvq": commvq, "spectral": {"group": group}}
    try:
        if method not in own:
            raise ValueError(f"method={method!r}: allowed {', '.join(own)}, the methods that need calibration")
        others = [
            name for other, options in own.items() if other != method for name in options if options[name] is not None
        ]
        if others or (quick and method != "commvq"):
            raise ValueError(f"--{(*others, 'quick')[0].replace('_', '-')}: not an option of method {method!r}")
        chosen = {name: value for name, value in (common | own[method]).items() if value is not None}
        if method == "commvq":
            with _starting():
                from kvcache_compress.methods.commvq.calibration import CommVQSettings
                from kvcache_compress.methods.commvq.calibration.command import run_calibration

            settings = CommVQSettings.quick(**chosen) if quick else CommVQSettings(**chosen)
            run_calibration(console, model, text, output, settings, device)
        else:
            with _starting():
                from kvcache_compress.methods.spectral import calibration

            calibration.run_calibration(console, model, text, output, calibration.SpectralSettings(**chosen), device)
    except (ValueError, ImportError, OSError) as error:
        _fail(error)


@app.command()
def tune(
    model: Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a folder.")] = "smollm2-135m",
    bits: Annotated[float | None, typer.Option(help="Bits per packed number, everything counted.")] = None,
    memory: Annotated[str | None, typer.Option(help="Bytes of the whole cache, such as 2GB; needs --context.")] = None,
    context: Annotated[str | None, typer.Option(help="Tokens of each sequence, such as 128K.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.", min=1, max=MOST_TOKENS)] = 1,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text file, or folder of .txt files, to measure on; repeatable.")
    ] = None,
    check_text: Annotated[
        list[Path] | None, typer.Option(help="Text to certify the result on, by default the same; repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="YAML file to write.", dir_okay=False)] = None,
    base: Annotated[str, typer.Option(help="Preset or YAML file: methods and windows.")] = "best-2bit",
    also: Annotated[
        list[str] | None, typer.Option(help="Preset or YAML file whose methods a side may have too; repeatable.")
    ] = None,
    level: Annotated[list[float] | None, typer.Option(help="Bits that a side may have; repeatable.")] = None,
    sinks: Annotated[
        list[int] | None, typer.Option(help="First tokens that stay dense; with --memory repeatable.", min=0)
    ] = None,
    recent: Annotated[
        list[int] | None, typer.Option(help="Last tokens that stay dense; with --memory repeatable.", min=0)
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of each text to measure on.", min=1)] = 2,
    prefix: Annotated[int, typer.Option(help="Tokens to prefill.", min=1)] = 1024,
    scored: Annotated[int, typer.Option(help="Tokens to score after them; --verify scores 256.", min=1)] = 96,
    verify: Annotated[str | None, typer.Option(help="Preset or YAML file to certify, instead of tuning.")] = None,
    codebooks: Annotated[Path | None, typer.Option(help="CommVQ's file for this model.")] = None,
    statistics: Annotated[Path | None, typer.Option(help="Spectral's file for this model, if not measured.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of the model: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="Device; the accelerator if there is one.")] = None,
) -> None:
    """Find the best cache of a model within a budget, layer by layer, and write it as a config; resumable."""
    with _starting():
        from kvcache_compress.eval.tuning.command import run_tuning

    budget: dict[str, Any] = {"bits": bits, "memory": memory, "context": context, "batch": batch}
    sizes: dict[str, Any] = {"windows": windows, "prefix": prefix, "scored": scored}
    sizes |= {"levels": level} if level else {}
    others: dict[str, Any] = {
        "check_texts": check_text or [],
        "base": base,
        "also": also or [],
        "sinks": sinks or [],
        "recent": recent or [],
        "verify": verify,
        "codebooks": codebooks,
        "statistics": statistics,
        "dtype": dtype,
        "device": device,
    }
    try:
        run_tuning(console, model, text or [], output, **budget, **sizes, **others)
    except (ValueError, ImportError, OSError) as error:
        _fail(error)


@app.command()
def bench(
    model: Annotated[
        str, typer.Option(help="Model for the shape: llama-3.1-8b, qwen2.5-7b, smollm2-135m, a hub id or a folder.")
    ] = "llama-3.1-8b",
    preset: Annotated[list[str] | None, typer.Option(help="Preset or YAML file; repeatable.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; repeatable.", min=1, max=MOST_TOKENS)] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Packed tokens of each sequence; repeatable.", min=1, max=MOST_TOKENS)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Calls, of which the median is taken.", min=1, max=10_000)] = 20,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or, on a CPU, float32; by default the device's usual one.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; a GPU if there is one.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.", dir_okay=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file for a plot.", dir_okay=False)] = None,
) -> None:
    """Time attention over compressed caches on this machine, beside PyTorch's attention over a full cache."""
    with _starting():
        from kvcache_compress.bench.command import run_bench

    named: dict[str, Any] = {"repeats": repeats, "dtype": dtype, "device": device, "output": output, "plot": plot}
    try:
        rows = run_bench(console, model, preset or [], batch or [1], tokens or [], **named)
    except (ValueError, ImportError, OSError) as error:
        _fail(error)
    if any(row.error or row.invalid for row in rows):
        raise typer.Exit(1)


@app.command()
def build() -> None:
    """Compile the CPU kernels now, once for this machine, instead of at their first use."""
    from kvcache_compress.cpu_kernels.build import problem

    if reason := problem():
        _fail(RuntimeError(f"the CPU kernels are unavailable: {reason}"))
    console.print("the CPU kernels are built")


@app.command()
def doctor() -> None:
    """Show versions, devices and the backend that would run."""
    import torch

    from kvcache_compress.backends.choice import resolve_backend
    from kvcache_compress.codecs.device import interpreting
    from kvcache_compress.cpu_kernels.build import built

    table = Table(title="kvcache-compress doctor", show_header=False)
    table.add_row("python", platform.python_version())
    packages = ("kvcache-compress", "torch", "transformers", "triton", "accelerate", "hqq", "optimum-quanto", "gguf")
    for package in packages:
        try:
            table.add_row(package, version(package))
        except PackageNotFoundError:
            table.add_row(package, "not installed")
    cuda = torch.cuda.is_available()
    table.add_row("GPU", torch.cuda.get_device_name() if cuda else "none")
    table.add_row("Triton interpreter", "on" if interpreting() else "off")
    compiled = built()
    table.add_row("CPU kernels", "built" if compiled else "not built: kvcache-compress build")
    # On a CPU this question would compile them.
    asked = cuda or interpreting() or compiled
    device = torch.device("cuda" if cuda else "cpu")
    found = resolve_backend("auto", device).name if asked else "torch, until the CPU kernels are built"
    table.add_row("backend", found)
    console.print(table)


@app.command(
    "eval",
    help="Measure the quality loss of compressed caches; each command has its own --help.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def evaluation(context: typer.Context) -> None:
    with _starting():
        from kvcache_compress.eval.cli.app import app as evaluations

    evaluations(args=context.args, prog_name="kvcache-compress eval")
