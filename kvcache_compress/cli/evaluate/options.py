"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcache_compress.eval.caches.peers import PEERS
from kvcache_compress.validation import LARGEST_SEED

DEFAULT_CACHES = ["turboquant-4bit", "turboquant-2bit"]

ModelOption = Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a folder.")]
CacheOption = Annotated[
    list[str],
    typer.Option(help=f"Preset, YAML file or peer ({', '.join(PEERS)}); PRESET@sinks=0,recent=0. Repeatable."),
]
CodebooksOption = Annotated[
    Path | None,
    typer.Option(help="Codebooks of `kvcache-compress calibrate`, for CommVQ.", exists=True, dir_okay=False),
]
StatisticsOption = Annotated[
    Path | None,
    typer.Option(help="Statistics of `kvcache-compress calibrate`, for spectral.", exists=True, dir_okay=False),
]
TableOption = Annotated[
    Path | None, typer.Option(help="File of results (.jsonl), a line per cache; a later run continues there.")
]
SeedOption = Annotated[int, typer.Option(help="Random seed.", min=0, max=LARGEST_SEED)]
DtypeOption = Annotated[str, typer.Option(help="Dtype of the model: float32, bfloat16 or float16.")]
DeviceOption = Annotated[str | None, typer.Option(help="Device; by default the accelerator if there is one.")]
FusedOption = Annotated[bool, typer.Option("--fused", help="Attend over the codes instead of decoding them.")]
