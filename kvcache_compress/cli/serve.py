"""`kvcache-compress serve`."""

import logging
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from .console import errors_as_lines, fail, importing

STOP_SECONDS = 30
"""Time for running requests to finish after SIGTERM or Ctrl-C."""


def serve(
    model: Annotated[str, typer.Argument(help="Model: smollm2-135m, a hub id, a folder or a .gguf file.")],
    cache: Annotated[str, typer.Option(help="Preset or YAML file.")] = "best-3bit",
    statistics: Annotated[
        Path | None, typer.Option(help="Text like yours, to measure the cache's statistics on.", dir_okay=False)
    ] = None,
    memory: Annotated[str, typer.Option(help="Size of the cache: 8GiB, or 50% of what is free.")] = "50%",
    max_requests: Annotated[int | None, typer.Option(help="Most requests at once.", min=1)] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of a request, with its answer.", min=2)] = None,
    prefix_store: Annotated[
        Path | None, typer.Option(help="Folder that keeps compressed prompts for the next start.", file_okay=False)
    ] = None,
    max_store: Annotated[str, typer.Option(help="Most bytes in that folder.")] = "10GiB",
    verify: Annotated[
        float, typer.Option(help="Share of the answers that are compared with a full cache.", min=0, max=1)
    ] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key that clients must send.")] = None,
    allow_anyone: Annotated[
        bool, typer.Option("--allow-anyone", help="Listen beyond this machine without a key.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Dtype of the model: float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="Device; by default the GPU if there is one.")] = None,
) -> None:
    """Serve a model with a compressed cache: OpenAI's interface, many requests at once."""
    key = None
    with errors_as_lines():
        if api_key_file is not None and not (key := api_key_file.read_text(encoding="utf-8").strip()):
            raise ValueError(f"api_key_file={str(api_key_file)!r}: the file is empty")
    if key is None and host not in ("localhost", "127.0.0.1", "::1") and not allow_anyone:
        fail(f"host={host!r}: others can reach this address; pass --api-key-file FILE, or --allow-anyone")
    with importing():
        try:
            import uvicorn

            from kvcache_compress.eval.runner.load import load
            from kvcache_compress.serving.app import Server
            from kvcache_compress.serving.prefix_store import PrefixStore
            from kvcache_compress.serving.statistics import STATISTICS_TOKENS
        except ImportError as error:
            fail(f'the server needs its extra: pip install "kvcache-compress[serve]" ({error})')
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("kvcache_compress")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    with errors_as_lines():
        loaded, tokenizer = load(model, dtype, device)
        text = None if statistics is None else tokenizer(statistics.read_text(encoding="utf-8"))["input_ids"]
        server = Server(
            loaded, tokenizer, model, cache, statistics=text and text[:STATISTICS_TOKENS], memory=memory,
            max_requests=max_requests, most_tokens=max_model_len, verify=verify, key=key,
            prefix_store=None if prefix_store is None else PrefixStore(prefix_store, max_store),
        )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn raises it again once it has stopped
    try:
        uvicorn.run(server.app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=STOP_SECONDS)
    finally:
        server.stop()
