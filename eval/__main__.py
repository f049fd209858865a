"""Run an evaluation: `python -m kvcache_compress.eval COMMAND`, as `torchrun` and `accelerate launch` need it."""

from kvcache_compress.eval.cli.app import app

app(prog_name="python -m kvcache_compress.eval")
