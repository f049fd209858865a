"""The server in several replicas, on one machine or more, with Ray Serve.

Each replica is a `Server` with a model of its own. Requests whose prompts begin alike go to the same replica, which has
their pages, as long as it has room.
"""

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, cast

import ray
import torch
from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = "kvcache-compress"
ROUTER: Any = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
SESSION = b"x-session-id"
"""Header by which the router chooses a replica."""
BEGINNING = 512
"""Characters of a prompt that choose its replica."""
MOST_READ = 1 << 20
"""Bytes of a body that are read to find its prompt."""
ONGOING = 32
"""Requests in one replica, unless `max_requests` says otherwise; more go to others, or wait."""
PROXY = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:proxy_middlewares"}
"""Environment that Ray's nodes need for `PrefixSession`. A cluster that runs already must have been started with it."""


def start(
    make: Callable[[], Any], replicas: tuple[int, int], host: str, port: int, max_requests: int | None, seconds: int
) -> None:
    """Start the replicas, from which the caller stops them with `stop`.

    Args:
        make: makes a replica's `Server`, in its process.
        replicas: fewest and most replicas.
        host, port: where they are reached.
        max_requests: most requests in one replica at once.
        seconds: time for running requests to finish when a replica stops.
    """
    os.environ |= PROXY
    fewest, most = replicas
    ongoing = max_requests or ONGOING
    gpu = torch.cuda.is_available()
    resources = {"num_gpus": 1} if gpu else {"num_cpus": max(1, (os.cpu_count() or 1) // most)}
    ray.init(ignore_reinit_error=True)
    serve.start(http_options=HTTPOptions(host=host, port=port))
    deployment = cast(Any, Replica).options(
        max_ongoing_requests=ongoing,
        autoscaling_config=AutoscalingConfig(
            min_replicas=fewest, max_replicas=most, target_ongoing_requests=max(1, ongoing // 2)
        ),
        graceful_shutdown_timeout_s=seconds,
        ray_actor_options=resources,
    )
    serve.run(deployment.bind(make), name=NAME)


def stop() -> None:
    """Let running requests finish, and stop all replicas; a cluster that ran before goes on."""
    serve.delete(NAME)
    if "RAY_ADDRESS" not in os.environ:
        serve.shutdown()
    ray.shutdown()


@serve.deployment(
    max_queued_requests=256,  # more are answered 503
    health_check_period_s=2,
    request_router_config=RequestRouterConfig(request_router_class=ROUTER),
)
@serve.ingress()
class Replica:
    """A `Server` in a process of Ray's."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.server = make()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self.server.app

    def check_health(self) -> None:
        """Raise `RuntimeError` if the engine's thread has died; Ray then starts the replica anew."""
        if not self.server.alive:
            raise RuntimeError("the engine has stopped")


class PrefixSession:
    """Middleware of Ray's proxy: a request without a session gets one, from how its prompt begins."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or any(name == SESSION for name, _ in scope["headers"]):
            await self.app(scope, receive, send)
            return
        held: list[Message] = []
        size, more = 0, True
        while more and size <= MOST_READ:
            held.append(await receive())
            size += len(held[-1].get("body", b""))
            more = held[-1].get("more_body", False)
        session = session_of(b"".join(message.get("body", b"") for message in held))
        scope["headers"] = [*scope["headers"], (SESSION, session)]
        replay = iter(held)

        async def again() -> Message:
            return next(replay, None) or await receive()

        await self.app(scope, again, send)


def session_of(body: bytes) -> bytes:
    """Digest of how a request's prompt begins, or its body where that is longer than `MOST_READ` or wrong."""
    try:
        fields = json.loads(body)
        prompt = json.dumps(fields.get("messages") or fields.get("prompt") or fields.get("input")).encode()
    except (ValueError, AttributeError, RecursionError):
        prompt = body
    return hashlib.blake2b(prompt[:BEGINNING], digest_size=16).hexdigest().encode()


def proxy_middlewares() -> list[Middleware]:
    """Return the middlewares of Ray's HTTP proxy, which imports this function by name."""
    return [Middleware(PrefixSession)]
