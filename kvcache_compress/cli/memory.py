"""`kvcache-compress memory`."""

from typing import Annotated

import typer
from rich.table import Table

from kvcache_compress.validation import MOST_TOKENS, parse_size, quoted, size_text

from .console import COMPARED, console, errors_as_lines


def memory(
    model: Annotated[
        str, typer.Option(help="Model: llama-3.1-8b, qwen2.5-7b, smollm2-135m, a hub id or a folder.")
    ] = "llama-3.1-8b",
    preset: Annotated[list[str] | None, typer.Option(help="Preset or YAML file; repeatable.")] = None,
    context: Annotated[str, typer.Option(help="Tokens of each sequence.")] = "128K",
    everything: Annotated[bool, typer.Option("--all", help="Show all presets, not only the recommended ones.")] = False,
    batch: Annotated[int, typer.Option(help="Number of sequences.", min=1, max=MOST_TOKENS)] = 1,
) -> None:
    """Estimate the memory of each preset's cache, with everything counted."""
    from kvcache_compress.cache.estimate import model_shape, total_bytes
    from kvcache_compress.config import BUDGETS, load_config, preset_names

    with errors_as_lines():
        tokens = parse_size(context, "context")
        if tokens > MOST_TOKENS:
            raise ValueError(f"context={quoted(context)}: must be at most {MOST_TOKENS} tokens")
        layers, _, kv_heads, head_dim = model_shape(model)
        console.print(
            f"{model}: {layers} full-attention layers with {kv_heads} key/value heads of {head_dim}", soft_wrap=True
        )
        console.print(f"{tokens:,} tokens" + (f" in each of {batch} sequences" if batch > 1 else ""))
        table = Table()
        for heading in ("cache", "memory", "times smaller"):
            table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=True)
        full = 2 * 2 * layers * kv_heads * head_dim * tokens * batch
        table.add_row("bfloat16", size_text(full), "1.00")
        for name in preset or [*BUDGETS, *(preset_names() if everything else COMPARED)]:
            config = load_config(name)
            try:
                size = total_bytes(config, layers, kv_heads, head_dim, tokens, batch)
            except ValueError as error:
                table.add_row(name, "-", "-")
                console.print(f"{name}: {error}", style="dim")
                continue
            table.add_row(name, size_text(size), f"{full / size:.2f}")
    console.print(table)
