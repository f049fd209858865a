"""`kvcache-compress demo`."""

from typing import Annotated

import typer
from rich.table import Table

from kvcache_compress.validation import MOST_TOKENS, size_text

from .console import console, errors_as_lines, importing


def demo(
    preset: Annotated[
        list[str] | None, typer.Option(help="Preset or YAML file; repeatable, by default best-4bit and best-2bit.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a path.")] = "smollm2-135m",
    new_tokens: Annotated[int, typer.Option(help="Number of tokens to generate.", min=1, max=MOST_TOKENS)] = 32,
) -> None:
    """Answer a question about a long text from compressed caches, and measure their time, memory and loss."""
    with importing():
        from kvcache_compress.bench.demo import QUESTION, Demo

    with errors_as_lines():
        console.print(f"[bold]Loading {model}[/bold] (the first time takes half a minute) ...")
        shown = Demo(model, preset or ["best-4bit", "best-2bit"], new_tokens)
        console.print(
            f"\n[bold]A text of {shown.prompt_tokens} tokens with a pass key in its middle, and the question:[/bold]"
        )
        runs = {}
        for name in shown.names:
            console.print(f"[bold]{name}:[/bold] [dim]{QUESTION}[/dim]", end="")
            runs[name] = shown.answer(name)
            console.print()
        console.print("Measuring the loss ...")
        losses = shown.losses()
    table = Table()
    for heading in ("cache", "memory", "first token", "each further", "KL", "same top"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for name, (first, step, held) in runs.items():
        loss = "{:.4f} {:.3f}".format(*losses[name]).split() if name in losses else ("0", "1.000")
        table.add_row(name, size_text(held), f"{first:.1f} s", f"{1000 * step:.0f} ms", *loss)
    console.print(table)
    console.print(
        "Memory counts uncompressed numbers as 16 bits; dense windows, tables and spare capacity matter less in longer "
        "texts. KL is the mean divergence of the next-token distribution from the full cache's, in nats; same top is "
        "the share of tokens with the same most likely token. Both are measured on 128 tokens after the first 1,024."
    )
