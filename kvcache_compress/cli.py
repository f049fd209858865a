"""Command line `kvcache-compress`; each command calls one function of the package."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvcache_compress.validation.messages import shortened
from kvcache_compress.validation.options import MOST_TOKENS

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="KV-cache compression for Hugging Face Transformers."
)
console = Console()


def _fail(error: Exception) -> None:
    typer.secho(f"error: {shortened(str(error))}", fg="red", err=True)
    raise typer.Exit(1) from None


@app.command()
def demo(
    preset: Annotated[str, typer.Option(help="Preset or YAML file.")] = "turboquant-4bit",
    model: Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a path.")] = "smollm2-135m",
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1, max=MOST_TOKENS)] = 64,
) -> None:
    """Generate from a compressed cache with a real model, and measure its memory and its loss."""
    from .demo import run_demo

    try:
        run_demo(console, model, preset, new_tokens)
    except (ValueError, ImportError) as error:
        _fail(error)


@app.command()
def presets() -> None:
    """List the presets with their stored bits per number, those with the least loss first."""
    from kvcache_compress.cache.estimate import packed_bits, summary

    from .config import BUDGETS, load_config, preset_names

    table = Table(title="presets: stored bits per packed number of 32 layers with 8 heads, everything counted")
    for heading in ("preset", "D=64", "D=128", "sinks", "recent", "description"):
        table.add_column(heading, no_wrap=heading != "description")
    for name in [*BUDGETS, *preset_names()]:
        config = load_config(name)
        about = f"= {BUDGETS[name]}" if name in BUDGETS else summary(name)
        bits = [f"{packed_bits(config, dim):.2f}" for dim in (64, 128)]
        table.add_row(name, *bits, str(config.sink_tokens), str(config.recent_tokens), about)
    console.print(table)


@app.command()
def memory(
    model: Annotated[
        str | None, typer.Option(help="llama-3.1-8b, qwen2.5-7b, smollm2-135m, or a hub id or a folder.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens in the cache.", min=1, max=MOST_TOKENS)] = 131_072,
    batch: Annotated[int, typer.Option(min=1, max=MOST_TOKENS)] = 1,
    layers: Annotated[int, typer.Option(help="Without --model: layers.", min=1, max=1024)] = 32,
    kv_heads: Annotated[int, typer.Option(help="Without --model: key/value heads.", min=1, max=1024)] = 8,
    head_dim: Annotated[int, typer.Option(help="Without --model: head dimension.", min=1, max=1024)] = 128,
) -> None:
    """Estimate the memory of each preset's cache, everything counted; by default for Llama-3.1-8B's shape."""
    from kvcache_compress.cache.estimate import model_shape, total_bytes

    from .config import load_config, preset_names

    try:
        if model is not None:
            layers, _, kv_heads, head_dim = model_shape(model)
        shape = (layers, kv_heads, head_dim)
        title = f"{tokens} tokens x {batch}, bfloat16: {shape[0]} full-attention layers, {shape[1]} heads of {shape[2]}"
        table = Table(title=title)
        for heading in ("cache", "GiB", "times smaller"):
            table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=True)
        full = 2 * 2 * shape[0] * shape[1] * shape[2] * tokens * batch
        table.add_row("bfloat16", f"{full / 2**30:.2f}", "1.00")
        for name in preset_names():
            try:
                size = total_bytes(load_config(name), *shape, tokens, batch)
            except ValueError as error:
                table.add_row(name, "-", "-")
                console.print(f"{name}: {error}", style="dim")
                continue
            table.add_row(name, f"{size / 2**30:.2f}", f"{full / size:.2f}")
    except (ValueError, OSError) as error:
        _fail(error)
    console.print(table)


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
            from kvcache_compress.methods.commvq.calibration import CommVQSettings
            from kvcache_compress.methods.commvq.calibration.command import run_calibration

            settings = CommVQSettings.quick(**chosen) if quick else CommVQSettings(**chosen)
            run_calibration(console, model, text, output, settings, device)
        else:
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
    scored: Annotated[int, typer.Option(help="Tokens to score after them.", min=1)] = 96,
    verify: Annotated[str | None, typer.Option(help="Preset or YAML file to certify, instead of tuning.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of the model: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="Device; the accelerator if there is one.")] = None,
) -> None:
    """Find the best cache of a model within a budget, layer by layer, and write it as a config; resumable."""
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
    from kvcache_compress.bench.command import run_bench

    named: dict[str, Any] = {"repeats": repeats, "dtype": dtype, "device": device, "output": output, "plot": plot}
    try:
        rows = run_bench(console, model, preset or [], batch or [1], tokens or [], **named)
    except (ValueError, ImportError, OSError) as error:
        _fail(error)
    if any(row.error is not None for row in rows):
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

    from kvcache_compress.codecs.backend import interpreting, resolve_backend
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
    table.add_row("CPU kernels", "built" if built() else "not built yet (kvcache-compress build)")
    table.add_row("backend", resolve_backend("auto", torch.device("cuda" if cuda else "cpu")))
    console.print(table)


@app.command(
    "eval",
    help="Measure the quality loss of compressed caches; each command has its own --help.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def evaluation(context: typer.Context) -> None:
    from kvcache_compress.eval.cli.app import app as evaluations

    evaluations(args=context.args, prog_name="kvcache-compress eval")
