"""ASGI middleware before the server's app: checks keys, sizes and settings, notices clients that leave, and logs."""

import asyncio
import contextlib
import hmac
import inspect
import json
import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, field_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from .metrics import Metrics

logger = logging.getLogger(__name__)
ANSWERED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Paths that generate."""
OPEN = ("/v1/models", "/health", "/metrics")
"""Other paths that answer; all others are closed."""
_RESERVED = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
STREAM_ERROR = b'data: {"error": "'
"""Start of the event by which Transformers reports an error in a stream. Answers cannot contain it: their quotes are
escaped."""
BODY_SECONDS = 30
"""Longest time for a client to send its body."""


class Body(BaseModel):
    """Fields of a request that decide whether it can be answered; the app checks the others."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    stream: StrictBool | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = Field(None, max_length=1000)
    # What the engine cannot do, so that nobody gets another answer than the one asked for.
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    stop: None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    text: dict[Literal["format"], dict[Literal["type"], Literal["text"]]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    suffix: None = None
    previous_response_id: None = None
    generation_config: None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _for_the_template(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """Only variables of the model's template: no template, lengths or padding of the client's own."""
        if reserved := _RESERVED & set(value or ()):
            raise ValueError(f"{min(reserved)} is the server's")
        return value


@dataclass
class Record:
    """State of a request in flight; `prompt`, `shared` and `written` count tokens and are 0 until it is admitted."""

    body: Body
    begin: float = field(default_factory=time.perf_counter)
    prompt: int = 0
    written: int = 0
    shared: int = 0


CURRENT: ContextVar[Record] = ContextVar("request")


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status, headers)


def problems(error: ValidationError | RequestValidationError) -> str:
    """Format a validation error as one line, with a clause per field."""
    found = []
    for one in error.errors():
        unsupported = one["type"] in ("none_required", "literal_error")
        problem = "not supported; leave it out" if unsupported else one["msg"]
        found.append(": ".join([*filter(None, [".".join(map(str, one["loc"]))]), problem]))
    return "; ".join(found)


class Guard:
    """ASGI middleware around the server's app.

    Args:
        app: the app.
        metrics: counts requests by status.
        key: clients must send it as a bearer token, except to `/health`; None lets everyone in.
        most_bytes: largest body.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, key: str | None, most_bytes: int) -> None:
        self.app, self.metrics, self.key, self.most_bytes = app, metrics, key, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        generates = path in ANSWERED and method == "POST"
        begin, status, record = time.perf_counter(), 499, None

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif STREAM_ERROR in (part := message.get("body", b"")):
                written, _, error = part.partition(STREAM_ERROR)
                told = refusal(500, error.removesuffix(b'"}\n\n').decode()).body
                message = {**message, "body": written + b"data: " + bytes(told) + b"\n\n"}
            await send(message)

        try:
            self._check(scope)
            if generates:
                body = await self._read(receive)
                CURRENT.set(record := Record(Body.model_validate_json(body)))
                # For Transformers a response without `stream` is a stream, and for OpenAI it is not.
                body = json.dumps({"stream": False, **json.loads(body)}).encode()
                await self._answer(scope, body, receive, counted)
            else:
                await self.app(scope, receive, counted)
        except HTTPException as error:
            await refusal(error.status_code, error.detail, error.headers)(scope, receive, counted)
        except ValidationError as error:
            await refusal(400, problems(error))(scope, receive, counted)
        finally:
            if generates:
                self.metrics.requests.labels(status).inc()
                logger.info(
                    "%s %d %.2f s, %s", path, status, time.perf_counter() - begin,
                    f"{record.prompt} tokens ({record.shared} shared), {record.written} written"
                    if record and record.prompt else "refused",
                )  # fmt: skip

    def _check(self, scope: Scope) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        if path not in ANSWERED and path not in OPEN:
            raise HTTPException(404, f"{path}: this server answers {', '.join(ANSWERED + OPEN)}")
        sent = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if self.key is not None and path != "/health" and not hmac.compare_digest(sent, self.key.encode()):
            raise HTTPException(401, "the Authorization header must be 'Bearer' and this server's key")

    async def _read(self, receive: Receive) -> bytes:
        """Read a body, without holding more of it than is allowed."""
        body = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HTTPException(499, "the client has left")
                    body += message.get("body", b"")
                    if len(body) > self.most_bytes:
                        raise HTTPException(413, f"bodies of more than {self.most_bytes} bytes are refused")
                    if not message.get("more_body"):
                        return body
        raise HTTPException(408, f"the body took more than {BODY_SECONDS} seconds", {"Connection": "close"})

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the app on a body that was read, and stop it when the client leaves."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await asyncio.get_running_loop().create_future()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            running.cancel()

        # Transformers would take the client's id for the engine's, which two requests must not share.
        headers = [one for one in scope["headers"] if one[0] != b"x-request-id"]
        running = asyncio.ensure_future(self.app({**scope, "headers": headers}, replay, send))
        watching = asyncio.ensure_future(watch())
        try:
            await running
        except asyncio.CancelledError:
            if not watching.done():  # the server stops
                raise
        finally:
            watching.cancel()


def answer_errors(app: Any) -> None:
    """Let the app answer errors as OpenAI's clients read them."""

    def malformed(request: Any, error: Exception) -> JSONResponse:
        record = CURRENT.get(None)
        status = 500 if record is None or record.prompt else 400
        return refusal(status, f"{type(error).__name__}: {error}")

    app.add_exception_handler(
        HTTPException, lambda request, error: refusal(error.status_code, str(error.detail), error.headers)
    )
    app.add_exception_handler(RequestValidationError, lambda request, error: refusal(400, problems(error)))
    for kind in (ValueError, LookupError, TypeError, AttributeError, RuntimeError, TemplateError):
        app.add_exception_handler(kind, malformed)
