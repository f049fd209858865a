"""Two replicas on two of Ray's nodes: the same prefix to the same one, and what survives a kill and a stop."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.saved_model import saved_model

ray = pytest.importorskip("ray", reason="ray is not installed (extra `ray`)")
pytest.importorskip("transformers", minversion="5.24", reason="the server is that of Transformers 5.24")

from ray.cluster_utils import Cluster  # noqa: E402

from kvcache_compress.cli.serve import _range_of, load_server  # noqa: E402
from kvcache_compress.serving.http import replicas  # noqa: E402

ADDRESS = "http://127.0.0.1:8533"
PREFIX = "".join(chr(33 + i % 90) for i in range(600))
ONGOING = 4


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replicas of the small model on two nodes, one each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for name, value in replicas.PROXY.items():
        monkeypatch.setenv(name, value)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    make = partial(
        load_server, saved_model(), "kivi-4bit", memory="2MiB", dtype="float32", device=None, statistics=None,
        prefix_store=None, max_store="1GiB",
    )  # fmt: skip
    try:
        replicas.start(make, (2, 2), "127.0.0.1", 8533, ONGOING, 30)
        yield
        replicas.stop()
    finally:
        ray.shutdown()
        nodes.shutdown()


def body(prompt: str, new: int) -> dict[str, Any]:
    return {"model": saved_model(), "prompt": prompt, "max_tokens": new, "logit_bias": {120: 1000}}


def metrics(session: str) -> dict[str, float]:
    """Metrics of the replica of a session."""
    lines = httpx.get(f"{ADDRESS}/metrics", headers={"x-session-id": session}).text.splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("kvcache_compress_")}


def answered(session: str) -> float:
    return metrics(session).get('kvcache_compress_requests_total{status="200"}', 0)


def workers() -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if entry.read_bytes().startswith(b"ray::ServeReplica"):
                found.add(int(entry.parent.name))
        except OSError:
            pass
    return found


async def ask(client: httpx.AsyncClient, prompt: str, new: int) -> int | str:
    try:
        return (await client.post(f"{ADDRESS}/v1/completions", json=body(prompt, new))).status_code
    except httpx.TransportError as error:
        return type(error).__name__


async def use() -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        # The same prefix goes to the same replica, which has its pages.
        for index in range(4):
            assert await ask(client, f"{PREFIX}{index}", 4) == 200
        home = replicas.session_of(json.dumps(body(PREFIX, 4)).encode()).decode()
        assert answered(home) == 4
        assert metrics(home)["kvcache_compress_shared_tokens_total"] >= 3 * 400
        away = next(name for name in map(str, range(1000)) if answered(name) == 0)

        # More than it takes at once go to the other.
        assert await asyncio.gather(*(ask(client, f"{PREFIX}{i}", 300) for i in range(4 * ONGOING))) == [200] * 16
        assert answered(away) > 0
        assert answered(home) + answered(away) == 20

        # A killed replica loses only its own requests, and is replaced.
        before = workers()
        assert len(before) == 2
        tasks = [asyncio.create_task(ask(client, f"{index} {PREFIX}", 600)) for index in range(20)]
        await asyncio.sleep(0.5)
        os.kill(before.pop(), signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        assert 1 <= answers.count(200) < 20
        assert [await ask(client, f"later {index}", 4) for index in range(20)] == [200] * 20
        end = time.monotonic() + 60
        while len(workers()) < 2:
            assert time.monotonic() < end
            await asyncio.sleep(0.5)

        # A stop waits for what runs.
        tasks = [asyncio.create_task(ask(client, f"{index} {PREFIX}", 900)) for index in range(ONGOING)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(replicas.serve.delete, replicas.NAME)
        assert await asyncio.gather(*tasks) == [200] * ONGOING


def test_replicas(cluster: None) -> None:
    asyncio.run(use())


def test_numbers_of_replicas() -> None:
    assert _range_of("2") == (2, 2)
    assert _range_of("1-4") == (1, 4)
    for wrong in ("", "0", "4-1", "1-", "-2", "a", "1-2-3"):
        with pytest.raises(ValueError, match="replicas="):
            _range_of(wrong)


def test_prompts_choose_their_replica() -> None:
    """Only how a prompt begins counts, or a body of which a part is read."""
    first, second = ({"messages": [{"role": "user", "content": "a" * 600 + end}]} for end in "xy")
    assert replicas.session_of(json.dumps(first).encode()) == replicas.session_of(json.dumps(second).encode())
    assert replicas.session_of(b'{"prompt": "a"}') != replicas.session_of(b'{"prompt": "b"}')
    for wrong in (b"", b"[1]", b"{bad"):
        assert replicas.session_of(wrong)
    long = [json.dumps({"prompt": start + "a" * (2 << 20) + end}).encode() for start, end in ("xx", "xy", "yy")]
    sessions = [asyncio.run(session_of_sent(body)) for body in long]
    assert sessions[0] == sessions[1] != sessions[2]


async def session_of_sent(body: bytes) -> bytes:
    """The session that the middleware gives a body which comes in parts, all of which go on."""
    parts = [body[at : at + 65536] for at in range(0, len(body), 65536)]
    messages = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]
    sent = iter(list(messages))
    scope: Any = {"type": "http", "method": "POST", "headers": []}

    async def receive() -> Any:
        return next(sent)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert [await receive() for _ in messages] == messages

    await replicas.PrefixSession(app)(scope, receive, app)
    return bytes(dict(scope["headers"])[b"x-session-id"])
