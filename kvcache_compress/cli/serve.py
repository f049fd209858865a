"""`kvcache-compress serve`."""

import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import errors_as_lines, fail, importing

STOP_SECONDS = 30
"""Time for running requests to finish after SIGTERM or Ctrl-C."""
MOST_HEADERS = 1 << 16
"""Most bytes of headers that have not all come yet."""


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
    replicas: Annotated[
        str | None,
        typer.Option(help="Replicas with Ray Serve: a number, or a range such as 1-4 to follow the load."),
    ] = None,
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

            from kvcache_compress.serving.http import app  # noqa: F401
            from kvcache_compress.serving.http.connection import Connection

            if replicas is not None:
                from kvcache_compress.serving.http import replicas as several
        except ImportError as error:
            extra = "serve" if replicas is None else "ray"
            fail(f'the server needs its extra: pip install "kvcache-compress[{extra}]" ({error})')
    make = partial(
        load_server, model, cache, statistics=statistics, memory=memory, max_requests=max_requests,
        most_tokens=max_model_len, verify=verify, key=key, dtype=dtype, device=device,
        prefix_store=prefix_store, max_store=max_store,
    )  # fmt: skip
    with errors_as_lines():
        if replicas is None:
            server = make()
        else:
            several.start(make, _range_of(replicas), host, port, max_requests, STOP_SECONDS)
    # For uvicorn, which raises it again once it has stopped, and in place of Ray's, which aborts after three seconds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    logging.getLogger(__name__).info("listening on http://%s:%d/v1", host, port)
    try:
        if replicas is None:
            uvicorn.run(
                server.app, host=host, port=port, http=Connection, h11_max_incomplete_event_size=MOST_HEADERS,
                log_level="warning", timeout_graceful_shutdown=STOP_SECONDS,
            )  # fmt: skip
        else:
            signal.pause()
    finally:
        (server if replicas is None else several).stop()


def load_server(
    model: str, cache: str, *, statistics: Path | None, prefix_store: Path | None, max_store: str, dtype: str,
    device: str | None, **options: Any,
) -> Any:  # fmt: skip
    """Load a model and start its `Server`, in this process or a replica's, with logs on standard error."""
    from kvcache_compress.eval.runner.load import load
    from kvcache_compress.serving.engine.statistics import STATISTICS_TOKENS
    from kvcache_compress.serving.http.app import Server
    from kvcache_compress.serving.prefix_store import PrefixStore

    # On CPUs oneDNN, and PyTorch's code around it, keep what they compiled for each of 1,024 shapes: hundreds of MiB.
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, "16")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("kvcache_compress")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    loaded, tokenizer = load(model, dtype, device)
    text = None if statistics is None else tokenizer(statistics.read_text(encoding="utf-8"))["input_ids"]
    store = None if prefix_store is None else PrefixStore(prefix_store, max_store)
    return Server(
        loaded, tokenizer, model, cache, statistics=text and text[:STATISTICS_TOKENS], prefix_store=store, **options
    )


def _range_of(replicas: str) -> tuple[int, int]:
    """Fewest and most of `"2"` or `"1-4"`; raises ValueError for others."""
    fewest, dash, most = replicas.partition("-")
    if not (fewest.isdecimal() and (most.isdecimal() or not dash)) or not 1 <= int(fewest) <= int(most or fewest):
        raise ValueError(f"replicas={replicas!r}: must be a number such as 2, or a range such as 1-4")
    return int(fewest), int(most or fewest)
