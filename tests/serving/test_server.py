"""The server: what OpenAI's client, other clients and Prometheus get from it."""

import contextlib
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn
from support.models.saved_model import saved_model
from transformers import GenerationConfig, PreTrainedTokenizerBase
from typer.testing import CliRunner

from kvcache_compress import compress
from kvcache_compress.cli import app as cli
from kvcache_compress.modeling.loading import load_model
from kvcache_compress.serving.http import app, connection, guard
from kvcache_compress.serving.http.app import Server
from kvcache_compress.serving.http.metrics import Metrics
from kvcache_compress.serving.http.sampling import Sampling
from kvcache_compress.serving.http.verify import Verifier

pytest.importorskip("transformers", minversion="5.24", reason="the server is that of Transformers 5.24")

CONFIG = {"keys": {"method": "kivi", "bits": 4}, "values": {"method": "kivi", "bits": 4}}
CONFIG |= {"sink_tokens": 4, "recent_tokens": 8}
KEY = "a key"
TEMPLATE = "{% for message in messages %}{{ message['role'] + ':' + message['content'] }}{% endfor %}"
STATISTICS = torch.randint(32, 127, (600,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPT = "a prompt of some forty characters or so:"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Server, str]]:
    """A running server, with a key, and its address."""
    model, tokenizer = load_model(saved_model())
    tokenizer.chat_template = TEMPLATE
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=-1)
    server = Server(
        model, tokenizer, "small", CONFIG, statistics=STATISTICS, memory="1MiB", max_requests=4, verify=1, key=KEY
    )
    runner = uvicorn.Server(uvicorn.Config(server.app, port=0, http=connection.Connection, log_level="error"))
    thread = threading.Thread(target=runner.run)
    thread.start()
    while not runner.started:
        time.sleep(0.01)
    yield server, f"http://127.0.0.1:{runner.servers[0].sockets[0].getsockname()[1]}"
    runner.should_exit = True
    thread.join()
    server.stop()


@pytest.fixture
def client(served: tuple[Server, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[1], headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as found:
        yield found


def post(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": "small", "prompt": PROMPT, **body})


def written(client: httpx.Client, **body: Any) -> str:
    response = post(client, **body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def value(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"kvcache_compress_{name} ")))


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_openai_client_gets_the_tokens_of_generate_batch(served: tuple[Server, str]) -> None:
    address = served[1]
    messages: Any = [{"role": "user", "content": PROMPT}]
    text = "user:" + PROMPT
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        chat = client.chat.completions.create(model="small", messages=messages, max_tokens=20)
        parts = client.chat.completions.create(model="small", messages=messages, max_tokens=20, stream=True)
        streamed = "".join(part.choices[0].delta.content or "" for part in parts)
        completion = client.completions.create(model="small", prompt=text, max_tokens=20)
        response = client.responses.create(model="small", input=messages, max_output_tokens=20)
        assert [one.id for one in client.models.list()] == ["small"]
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 20
    assert chat.choices[0].finish_reason == "length"
    other, tokenizer = load_model(saved_model())
    other.generation_config = GenerationConfig(do_sample=False, eos_token_id=-1)
    with compress(other, CONFIG, memory="1MiB", statistics=STATISTICS):
        batch = other.generate_batch([tokenizer(text)["input_ids"]], max_new_tokens=20)
    expected = tokenizer.decode(next(iter(batch.values())).generated_tokens)
    assert expected == chat.choices[0].message.content == streamed == completion.choices[0].text == response.output_text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: Input should be greater"),
        ({"max_tokens": 10**6}, r"prompt \(40 tokens\) and answer \(1000000\) must fit into \d+ tokens"),
        ({"prompt": "long " * 10_000}, r"prompt \(50000 tokens\)"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": ["a", "b"]}, "must be a string"),
        ({"temperature": 3}, "temperature: Input should be less"),
        ({"n": 2}, "n: not supported"),
        ({"stop": "a"}, "stop: not supported"),
        ({"logit_bias": {"128": 1}}, r"logit_bias: the vocabulary has 128 tokens \(got 128\)"),
        ({"generation_config": "{}"}, "generation_config: not supported"),
        ({"model": "other"}, "pinned to 'small'"),
    ],
)
def test_requests_that_are_refused(client: httpx.Client, body: dict[str, Any], message: str) -> None:
    response = post(client, **body)
    assert response.status_code == 400
    assert re.search(message, response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/completions", b"{bad", 400),
        ("/v1/completions", b"[1]", 400),
        ("/v1/completions", b'{"model": "small", "prompt": "a", "odd": 1}', 422),
        ("/v1/chat/completions", b'{"model": "small", "messages": []}', 400),
        ("/v1/chat/completions", b'{"model": "small", "messages": [{"content": "a"}]}', 400),
        ("/v1/chat/completions", b'{"model": "small", "messages": [{"role": "user", "content": 3}]}', 400),
        ("/v1/completions", b" " * (5 << 20), 413),
        ("/load_model", b'{"model": "other"}', 404),
        ("/reset", b"{}", 404),
    ],
)
def test_bodies_and_paths_that_are_refused(client: httpx.Client, path: str, content: bytes, status: int) -> None:
    response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert written(client, max_tokens=2)


def test_keys(client: httpx.Client) -> None:
    for header in ({"Authorization": "Bearer another"}, {"Authorization": "Bearer \u00e9".encode()}, {}):
        client.headers = httpx.Headers()
        assert client.post("/v1/completions", json={"prompt": "a"}, headers=header).status_code == 401
        assert client.get("/metrics", headers=header).status_code == 401
    assert client.get("/health").status_code == 200


def test_slow_bodies_are_refused(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.1)

    def slow() -> Iterator[bytes]:
        yield b"{"
        time.sleep(0.5)
        yield b"}"

    assert client.post("/v1/completions", content=slow()).status_code == 408


def test_connections_without_a_request_are_closed(
    client: httpx.Client, served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.2)
    assert written(client, max_tokens=200)  # takes longer
    for first in (b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", httpx.URL(served[1]).port), timeout=10) as slow:
            slow.sendall(first)
            answer = b""
            while first and not answer.endswith(b"}"):
                part = slow.recv(1000)
                assert part
                answer += part
            assert not first or b" 200 " in answer
            for line in (b"GET /health HTTP/1.1\r\n", *[b"x: y\r\n"] * 20):
                with contextlib.suppress(ConnectionError):
                    slow.sendall(line)
                time.sleep(0.05)
            with contextlib.suppress(ConnectionError):
                assert slow.recv(1000) == b""


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 2}),
    ],
)
def test_long_prompts_hold_up_nobody(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, prompt: dict[str, Any]
) -> None:
    """Others are answered while a prompt is being made into tokens."""
    others, call = threading.Event(), PreTrainedTokenizerBase.__call__

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert others.wait(10)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", slow)
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(client.post(path, json=prompt).status_code))
    thread.start()
    time.sleep(0.2)
    assert client.get("/health", timeout=5).status_code == 200
    assert not statuses
    others.set()
    thread.join()
    assert statuses == [200]


def test_each_request_has_its_own_settings(client: httpx.Client) -> None:
    greedy = written(client, max_tokens=20, temperature=0)
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        seeded = {"temperature": 1.5, "seed": index % 2} if index < 4 else {"temperature": 0}
        answers[index] = written(client, max_tokens=20, **seeded)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[4] == answers[5] == greedy
    assert answers[0] == answers[2] != answers[1] == answers[3]
    assert written(client, max_tokens=5, logit_bias={ord("x"): 1000}) == "xxxxx"
    both = written(client, max_tokens=8, logit_bias={ord("x"): 1000, ord("y"): 1000}, frequency_penalty=2)
    assert sorted(both) == sorted("xyxyxyxy")


def test_sampling_follows_its_probabilities() -> None:
    scores = torch.tensor([3.0, 2.0, 1.0, torch.nan]).nan_to_num(-torch.inf)
    for sampling, allowed in ((Sampling(1.0), {0, 1, 2}), (Sampling(1.0, top_k=2), {0, 1}), (Sampling(1.0, 0.6), {0})):
        sampling.seed = 0
        counts = [0] * 4
        for _ in range(3000):
            row = scores.clone()
            sampling.apply(row, [])
            counts[int(row.argmax())] += 1
        share = scores[list(allowed)].softmax(-1).tolist()
        assert counts == pytest.approx([3000 * share[i] if i in allowed else 0 for i in range(4)], abs=100)
    tiny = scores.clone()
    Sampling(1e-40).apply(tiny, [])
    assert tiny.argmax() == 0
    broken = torch.full((4,), torch.nan)
    Sampling(1.0).apply(broken, [])  # its request fails elsewhere, and only it


@pytest.mark.parametrize("names", [("WAITING", "LEAST_WAITING"), ("MOST_TOKENIZING",)])
def test_a_full_queue(names: tuple[str, ...], client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in names:
        monkeypatch.setattr(app, name, 0)
    response = post(client)
    assert response.status_code == 429
    assert response.headers["Retry-After"] == str(app.RETRY_SECONDS)


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_free_their_slots(client: httpx.Client, stream: bool) -> None:
    before = value(client, "written_tokens_total")
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 900, "stream": stream}
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.Client(headers=client.headers, timeout=0.3) as other,
        other.stream("POST", f"{client.base_url}/v1/completions", json=body) as response,
    ):
        next(response.iter_raw())
    wait_for(lambda: value(client, "requests_running") == value(client, "requests_waiting") == 0)
    assert value(client, "written_tokens_total") - before < 900


def test_metrics(client: httpx.Client) -> None:
    long = "".join(chr(33 + i % 90) for i in range(300))
    names = ("shared_tokens_total", "verified_tokens_total", "verified_kl_total", "first_token_seconds_count")
    before = [value(client, name) for name in names]
    for _ in range(2):
        written(client, prompt=long, max_tokens=3)
    wait_for(lambda: value(client, "verified_tokens_total") >= before[1] + 6)
    shared, verified, loss, first = (value(client, name) - old for name, old in zip(names, before, strict=True))
    assert shared >= 128
    assert verified == 6
    assert first == 2
    assert 0 < loss < 1
    assert value(client, "used_bytes") > 0
    assert value(client, "free_bytes") > 0


def test_verification_of_a_full_cache_finds_no_loss() -> None:
    model, _ = load_model(saved_model())
    ids = torch.randint(1, 127, (1, 40))
    with torch.no_grad():
        kept = list(model(ids).logits[0].log_softmax(-1)[29:39])
    metrics = Metrics()
    loss = Verifier(model, metrics, 1).compare(ids[0, :30].tolist(), ids[0, 30:].tolist(), kept)
    assert loss < 1e-5
    assert metrics.verified_equal._value.get() == metrics.verified_tokens._value.get() == 10


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_verification_refuses_rope_that_changes(kind: str) -> None:
    model, _ = load_model(saved_model())
    model.model.rotary_emb.rope_type = kind
    with pytest.raises(ValueError, match=f"verify=1: not with RoPE that changes with the text .{kind}.; leave it out"):
        Server(model, None, "small", CONFIG, verify=1)


def test_a_request_that_cannot_be_packed_fails_alone(
    served: tuple[Server, str], client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = served
    assert server.alive
    layer = server._requests._cb.model.model.layers[0].self_attn
    forward = layer.k_proj.forward
    monkeypatch.setattr(layer.k_proj, "forward", lambda x: forward(x) * math.nan)
    response = post(client, max_tokens=4, temperature=1)
    assert response.status_code == 500
    assert "NaN" in response.json()["error"]["message"]
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key=KEY, max_retries=0) as other:
        parts = other.completions.create(model="small", prompt=PROMPT, stream=True)
        with pytest.raises(openai.APIError, match="NaN") as error:
            list(parts)
    assert error.value.body == {"message": error.value.message, "type": "server_error", "code": 500}
    monkeypatch.setattr(layer.k_proj, "forward", forward)
    assert written(client, max_tokens=2)


def test_a_dead_engine_is_reported(client: httpx.Client, served: tuple[Server, str], monkeypatch: Any) -> None:
    status = served[0]._requests._cb.background_thread_status
    monkeypatch.setattr(status, "fatal_error", RuntimeError("dead"))
    assert not served[0].alive
    assert client.get("/health").status_code == 503
    assert post(client).status_code == 503


def test_another_version_of_transformers(served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.CBGenerateManager, "generate_streaming", lambda self, model: None)
    with pytest.raises(RuntimeError, match="takes self, model, not self, model, processor"):
        Server(served[0]._requests._cb.model, None, "small", CONFIG, statistics=STATISTICS)


def test_the_command_finishes_what_runs_when_it_is_stopped(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(f"{KEY}\n")
    tool = Path(sys.executable).with_name("kvcache-compress")
    words = ["--port", "8531", "--cache", "kivi-4bit", "--memory", "4MiB", "--api-key-file", str(key)]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen([tool, "serve", saved_model(), "--dtype", "float32", *words], stderr=log)
    with (
        contextlib.ExitStack() as stack,
        httpx.Client(base_url="http://localhost:8531", headers={"Authorization": f"Bearer {KEY}"}) as client,
    ):
        stack.callback(process.kill)

        def answers() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            with contextlib.suppress(httpx.TransportError):
                return client.get("/health").status_code == 200
            return False

        wait_for(answers)
        with socket.create_connection(("localhost", 8531), timeout=10) as other:
            other.sendall(b"GET /health HTTP/1.1\r\nlong: " + b"a" * 70_000)
            with contextlib.suppress(ConnectionError):
                assert b" 400 " in other.recv(1000)
        with socket.create_connection(("localhost", 8531), timeout=10) as other:
            other.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nlong: " + b"a" * 40_000)
            time.sleep(0.2)
            other.sendall(b"\r\n\r\n")
            assert b" 200 " in other.recv(1000)
        body = {"model": saved_model(), "prompt": PROMPT, "max_tokens": 200, "stream": True, "logit_bias": {120: 1000}}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.terminate()
            assert sum('"x"' in line for line in lines) >= 198
        assert process.wait(30) == 0
    assert "40 tokens (0 shared), 200 written" in (tmp_path / "log").read_text()


def test_others_need_a_key(capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(cli, ["serve", "small", "--host", "0.0.0.0"])
    assert result.exit_code == 1
    assert "pass --api-key-file FILE, or --allow-anyone" in capfd.readouterr().err + result.output


def test_ids_of_clients_are_not_the_engines(client: httpx.Client) -> None:
    """Requests with one id run side by side."""
    client.headers["x-request-id"] = "the same"
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(written(client, max_tokens=60))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert len(set(texts)) == 1


def test_clients_bring_no_templates(client: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for options, status in (({"chat_template": "{{ 7 }}"}, 400), ({"max_length": 1}, 400), ({"own": 1}, 200)):
        response = client.post("/v1/chat/completions", json={**body, "chat_template_kwargs": options})
        assert response.status_code == status


def test_seeds_of_others_change_nothing(client: httpx.Client) -> None:
    """After someone's seed, requests without one still differ."""
    texts = []
    for _ in range(2):
        written(client, max_tokens=1, temperature=1, seed=7)
        texts.append(written(client, max_tokens=20, temperature=1.5))
    assert texts[0] != texts[1]


def test_defaults_of_the_model_apply(served: tuple[Server, str], client: httpx.Client, monkeypatch: Any) -> None:
    config = served[0]._requests._cb.model.generation_config
    assert not served[0]._requests._cb.generation_config.do_sample
    monkeypatch.setattr(config, "do_sample", True)
    monkeypatch.setattr(config, "temperature", 1.5)
    assert written(client, max_tokens=20) != written(client, max_tokens=20)


def test_cancelled_requests_leave_no_handler(served: tuple[Server, str], client: httpx.Client) -> None:
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 900}
    for _ in range(3):
        with contextlib.suppress(httpx.ReadTimeout), httpx.Client(headers=client.headers, timeout=0.1) as other:
            other.post(f"{client.base_url}/v1/completions", json=body)
    wait_for(lambda: value(client, "requests_running") == value(client, "requests_waiting") == 0)
    assert not served[0]._requests._cb.output_router.result_handlers


def test_an_engine_that_stops_answers(client: httpx.Client, served: tuple[Server, str], monkeypatch: Any) -> None:
    status = served[0]._requests._cb.background_thread_status
    monkeypatch.setattr(status, "can_accept_new_requests", lambda: "stopping")
    response = post(client)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the engine stops"
