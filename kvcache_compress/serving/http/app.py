"""Transformers' OpenAI-compatible server over compressed pages. All private names of that server are used here.

`Server` starts the engine and builds the app. `Requests` admits and counts requests, whose prompts are tokens by then.
"""

import asyncio
import copy
import inspect
import logging
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from transformers import ContinuousBatchingConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager, TimedModel
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import CBGenerateManager, CBWorkerDeadError, GenerationState

from ..compress import compress
from ..engine.manager import check
from ..engine.statistics import built_in_text
from ..prefix_store import PrefixStore
from .guard import CURRENT, Guard, Record, answer_errors, refusal
from .metrics import Gauges, Metrics
from .sampling import Sampler, Sampling
from .verify import Verifier

logger = logging.getLogger(__name__)
NEW_TOKENS = 1024
"""Most tokens of an answer if the request does not say, and if they fit."""
WAITING = 4
"""Requests that may wait, per slot; more are answered 429."""
LEAST_WAITING = 16
RETRY_SECONDS = 2
STORE_SECONDS = 10
"""Time for pages to be written when the server stops."""
LEAST_BODY, BYTES_PER_TOKEN = 1 << 20, 16
"""The largest body has this many bytes, and so many more for each token that a request may have."""
TOKENIZING = ThreadPoolExecutor(1, "tokenizer")  # one prompt at a time: tokenizers are not for several threads
MOST_TOKENIZING = 256
"""Prompts that may wait for it, each with its body in memory."""


class Requests(CBGenerateManager):
    """Admits requests to the engine, with their settings.

    Args:
        cb_config: options of continuous batching.
        metrics: counts tokens and times.
        most_tokens: most tokens of a request; `start` lowers it to what the model and the pages hold.
        verifier: compares a share of the answers with a full cache, or None.
    """

    def __init__(
        self, cb_config: ContinuousBatchingConfig, metrics: Metrics, most_tokens: int, verifier: Verifier | None
    ) -> None:
        super().__init__(cb_config)
        self.metrics, self.most_tokens, self.verifier = metrics, most_tokens, verifier

    def start(self, model: PreTrainedModel) -> None:
        """Measure statistics, allocate pages, and start the engine."""
        self._cb = cb = model.init_continuous_batching(copy.deepcopy(model.generation_config), self._cb_config)
        cb.generation_config.do_sample = False  # `Sampler` chooses
        processors = cb.logit_processor
        processors.clear()
        processors.logits_processor = LogitsProcessorList([Sampler()])
        processors.tensors_required, processors.do_processing = 1, True
        processors._retrieve_processors_kwargs()
        cb.warmup()
        self.cache = cb.batch_processor.cache
        self.metrics.registry.register(Gauges(self.cache, self.waiting))
        decoder = model.config.get_text_config(decoder=True)
        self.vocabulary = decoder.vocab_size
        self.most_tokens = min(self.most_tokens, decoder.max_position_embeddings, self.cache.most_tokens())
        logger.info("requests may have up to %d tokens", self.most_tokens)
        cb.start()

    def stop(self) -> None:
        if self._cb is not None and self._cb.is_running():
            self._cb.stop(hard_stop=True)

    def waiting(self) -> int:
        """Requests that have not begun."""
        return int(self._cb.input_queue.qsize() + len(self._cb.batch_processor.scheduler.waiting_requests))

    def init_cb(self, model: PreTrainedModel, gen_config: Any) -> None:
        """Do nothing: the engine runs since `start`."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        self._admit(inputs["input_ids"], gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        self._admit(inputs["input_ids"], gen_config)
        try:
            return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        except BaseException:
            self._cb.cancel_request(request_id)  # the client has left
            raise

    def _admit(self, prompt: list[int], config: Any) -> None:
        """Refuse a request that cannot be answered, or hand its settings to the engine with what follows.

        Raises:
            HTTPException: 400 for a request that never fits, 429 for one that may try again.
        """
        self._check_alive("")
        record, most = CURRENT.get(), self.most_tokens
        body = record.body
        if not prompt:
            raise HTTPException(400, "the prompt is empty")
        new = body.max_completion_tokens or body.max_output_tokens or body.max_tokens
        new = new or max(1, min(NEW_TOKENS, most - len(prompt)))
        if bad := [token for token in body.logit_bias or () if not 0 <= token < self.vocabulary]:
            raise HTTPException(400, f"logit_bias: the vocabulary has {self.vocabulary} tokens (got {bad[0]})")
        if len(prompt) + new > most:
            raise HTTPException(400, f"prompt ({len(prompt)} tokens) and answer ({new}) must fit into {most} tokens")
        if self.waiting() >= max(LEAST_WAITING, WAITING * self.cache.pages.plan.slots):
            raise too_many()
        config.max_new_tokens = new
        record.prompt = len(prompt)
        self.metrics.prompt_tokens.inc(len(prompt))
        verified = self.verifier is not None and random.random() < self.verifier.rate
        sampling = settings(record, config, [] if verified else None)
        self._cb.add_request = partial(self._add, sampling)
        self._cb.register_result_handler = partial(self._register, record, sampling)

    def _add(self, sampling: Sampling, *args: Any, **kwargs: Any) -> str:
        """Add a request with its settings."""
        engine = self._cb
        request_id: str | None = type(engine).add_request(
            engine, *args, record_timestamps=True, sampling=sampling, **kwargs
        )
        if request_id is None or not engine.is_running():
            raise CBWorkerDeadError("the engine stops")
        return request_id

    def _register(self, record: Record, sampling: Sampling, request_id: str, callback: Callable[..., None]) -> None:
        """Register a result handler that also counts."""

        def counting(output: Any) -> None:
            stamps = output.timestamps or []
            new = len(output.generated_tokens)
            for index in range(record.written, len(stamps)):
                if index:
                    self.metrics.next_token.observe(stamps[index] - stamps[index - 1])
                else:
                    self.metrics.first_token.observe(stamps[0] - record.begin)
            self.metrics.written_tokens.inc(new - record.written)
            record.written = new
            if output.is_finished():
                record.shared = sampling.shared_tokens
                self.metrics.shared_tokens.inc(record.shared)
                if sampling.kept and self.verifier is not None and output.error is None:
                    self.verifier.submit(output.prompt_ids, output.generated_tokens, sampling.kept)
            callback(output)

        type(self._cb).register_result_handler(self._cb, request_id, counting)


def too_many() -> HTTPException:
    """Refusal of a request that may try again."""
    return HTTPException(429, "too many requests are waiting", {"Retry-After": str(RETRY_SECONDS)})


def tokenizing(handler: Any) -> Any:
    """Subclass one of Transformers' handlers: a thread makes tokens of its prompts, while the event loop goes on."""

    class Handler(handler):
        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            if TOKENIZING._work_queue.qsize() >= MOST_TOKENIZING:
                raise too_many()
            prepare = super().handle_request
            loop = asyncio.get_running_loop()
            begin = await loop.run_in_executor(TOKENIZING, lambda: asyncio.run(prepare(body, request_id)))
            answer = begin()
            return await answer if inspect.isawaitable(answer) else answer

        def _streaming(self, *args: Any, **kwargs: Any) -> Any:
            return partial(super()._streaming, *args, **kwargs)

        async def _non_streaming(self, *args: Any, **kwargs: Any) -> Any:
            return partial(super()._non_streaming, *args, **kwargs)

    return Handler


def settings(record: Record, config: Any, kept: list[torch.Tensor] | None) -> Sampling:
    """Settings of a request: what its body says, and the model's defaults."""
    body = record.body
    temperature = body.temperature
    if temperature is None:
        temperature = (config.temperature or 1.0) if config.do_sample else 0.0
    return Sampling(
        temperature, body.top_p or config.top_p or 1.0, config.top_k or 0, body.frequency_penalty or 0.0,
        body.presence_penalty or 0.0, body.logit_bias or {}, body.seed, kept,
    )  # fmt: skip


class Server:
    """A model's engine and the app in front of it, which `uvicorn` or another ASGI server runs.

    Args:
        model, tokenizer: the model, and what makes tokens of text.
        name: the model's name in requests.
        compression: a preset's name, a path, a dictionary or a config.
        statistics: token ids of about a thousand tokens of text, by default a built-in one.
        memory: see `compress`.
        max_requests: most requests at once, or None for as many as the memory holds.
        most_tokens: most tokens of a request, or None for as many as the model and the memory hold.
        verify: share of the answers that are compared with a full cache.
        key: see `Guard`.
        prefix_store: pages are kept there too, for the next start.

    Raises:
        ValueError: `compress`, the plan of its memory or `Verifier` refuses the arguments.
        RuntimeError: this version of Transformers has another server.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, compression: Any, *,
        statistics: Sequence[int] | None = None, memory: int | str = "50%", max_requests: int | None = None,
        most_tokens: int | None = None, verify: float = 0, key: str | None = None,
        prefix_store: PrefixStore | None = None,
    ) -> None:  # fmt: skip
        kinds = [tokenizing(kind) for kind in (ChatCompletionHandler, CompletionHandler, ResponseHandler)]
        check([Requests, *kinds], {"start", "waiting", "_admit", "_add", "_register"}, "5.24")
        logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)  # it warns of every request
        metrics, self._store = Metrics(), prefix_store
        verifier = Verifier(model, metrics, verify) if verify else None
        text = built_in_text(tokenizer) if statistics is None else statistics
        self._compression = compress(model, compression, memory=memory, statistics=text, prefix_store=prefix_store)
        batching = ContinuousBatchingConfig(max_requests_per_batch=max_requests, per_request_processors=True)
        self._requests = Requests(batching, metrics, most_tokens or sys.maxsize, verifier)
        try:
            self._requests.start(model)
            state = GenerationState(continuous_batching=True)
            models = ModelManager(device=str(model.device), continuous_batching=True, model_timeout=-1)
            models.force_model, model_id = name, models.process_model_name(name)
            models.loaded_models[model_id] = TimedModel(model, -1, tokenizer)
            state._cb_manager, state._cb_model_id = self._requests, model_id
            chat, completion, response = (kind(models, state) for kind in kinds)
            app = build_server(
                model_manager=models, chat_handler=chat, completion_handler=completion, response_handler=response,
                transcription_handler=None, systemone_handler=None, generation_state=state,
            )  # fmt: skip
            answer_errors(app)
            app.add_exception_handler(CBWorkerDeadError, lambda request, error: refusal(503, str(error)))

            @app.get("/metrics")
            def exposed() -> Response:
                return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

            self.app = Guard(app, metrics, key, LEAST_BODY + BYTES_PER_TOKEN * self._requests.most_tokens)
        except BaseException:
            self.stop()
            raise
        if verifier is not None:
            verifier.start()

    @property
    def alive(self) -> bool:
        """False once the engine's thread has died; the server has to be started anew then."""
        return self._requests.is_alive()

    def stop(self) -> None:
        """Stop the engine; requests that still run fail, and pages that wait are written."""
        self._requests.stop()
        if self._store is not None:
            self._store.wait(STORE_SECONDS)
        self._compression.stop()
