"""`kvcache-compress presets`."""

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from .console import COMPARED, console


def presets(
    everything: Annotated[bool, typer.Option("--all", help="Show all presets, not only the recommended ones.")] = False,
) -> None:
    """List the recommended presets with their bits per number and their loss."""
    from kvcache_compress.cache.estimate import packed_bits, summary
    from kvcache_compress.config import BUDGETS, load_config, measured_losses, preset_names

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
        loss = [f"{losses[same]['kl']:.4f}", f"{losses[same]['kl_999']:.3f}"] if same else ["-", "-"]
        table.add_row(name, *bits, *loss, about)
    console.print(table)
    console.print("D: bits per packed number at this head dimension, with everything counted.")
    console.print("KL: nats per token, on SmolLM2-135M with prompts of 1,024 tokens of six kinds of text.")
    console.print("To measure one on your own model:")
    console.print("kvcache-compress eval perplexity --cache PRESET --model MODEL --text FILE")
    if not everything:
        console.print("All presets: kvcache-compress presets --all")
