"""The state that all endpoints share: engine, tokenizer, template, limits, and the answers in flight.

A request is admitted before it is tokenized, so that a full server refuses it at once; requests that are being
tokenized count as if they were queued already.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import msgspec

from penstock.engine.front.answer import Answer, Update
from penstock.engine.front.engine import Engine, EngineDead, QueueFull
from penstock.engine.http.errors import HttpError, clip
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server.adapters import Adapters
from penstock.engine.server.agents.response_store import ResponseStore
from penstock.engine.server.call import Call, NoSpans
from penstock.engine.server.metrics import ServerMetrics
from penstock.engine.server.requests import ModelRequestT, PromptRequest, parse
from penstock.engine.server.server_config import ServerConfig
from penstock.engine.server.tool_choice import Tools
from penstock.engine.text.template import ChatTemplate, text_digest
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import ModelInfo, WeightsError

MAX_SEQUENCES = 1024  # prompts × n of one request
REFUSALS = (HttpError, InvalidRequest, QueueFull, EngineDead, WeightsError)  # the errors that as_http_error converts


class Service:
    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, template: ChatTemplate | None, config: ServerConfig
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.config = config
        self.adapters = Adapters(engine, config.served_model_names)
        self.tools = Tools(config, template, tokenizer)
        self.spans = NoSpans()
        if config.telemetry.otlp_traces_endpoint is not None:
            from penstock.engine.server.spans import RequestSpans  # its SDK is an extra, and takes long to import

            self.spans = RequestSpans(config.telemetry)
        self.metrics = ServerMetrics(config.served_model_names[0], engine, self.adapters.served)
        self.responses = ResponseStore()
        # Renderings that take long; a template that loops keeps at most these threads busy until its time is over.
        self.renderers = ThreadPoolExecutor(2, thread_name_prefix="template")
        self.is_draining = False
        self.started = int(time.time())
        self.num_open_requests = 0  # from reading to the end of the answer; probes and pages do not count
        self._seeds = None if config.seed is None else random.Random(config.seed)
        self._num_preparing = 0  # sequences admitted but not yet with the engine

    def close(self) -> None:
        """Send the last spans, and let the threads end that render templates; nobody waits for a rendering any more."""
        self.spans.close()
        self.renderers.shutdown(wait=False, cancel_futures=True)

    @property
    def info(self) -> ModelInfo:
        """The description of the served model; it changes with the weights."""
        return self.engine.info

    @property
    def model_name(self) -> str:
        return self.config.served_model_names[0]

    @cached_property
    def text_digest(self) -> str:
        """The digest of the tokenizer and the template. Serializing a large vocabulary takes a tenth of a second."""
        return text_digest(self.tokenizer, self.template)

    def check_model(self, name: str | None) -> str:
        """Return the model name for the answer; raise a 404 if the name is not served."""
        if name is None:
            return self.model_name
        self.adapter_of(name)
        return name

    def adapter_of(self, name: str) -> str | None:
        """Return the key of the adapter with this model name, or None for the base model; else raise a 404."""
        if name in self.config.served_model_names:
            return None
        if (found := self.adapters.served.get(name)) is not None:
            return found.key
        served = ", ".join((*self.config.served_model_names, *self.adapters.served))
        raise HttpError(404, f"model: {clip(name)!r} is not served here; available are: {served}", param="model")

    def accept(self, call: Call, body: bytes, kind: type[ModelRequestT]) -> ModelRequestT:
        """Decode the request in `body`; raise an error if it is invalid or its model is not served."""
        request = parse(body, kind, call.ignored)
        call.model = self.check_model(request.model)
        return request

    async def compiled(self, call: Call, field: str | None) -> None:
        """Wait for the first tokens of a call whose grammar comes from this field. The core may refuse the grammar, and a
        400 is only possible before anything is sent."""
        for answer in call.answers if field is not None else ():
            await answer.begun()
            if answer.is_refused:
                assert field is not None and answer.error is not None
                raise InvalidRequest(field, answer.error)

    @contextlib.contextmanager
    def admit(self, num_sequences: int, field: str = "prompt") -> Iterator[None]:
        """Reserve queue places for the sequences, whose number comes from `field`, until they are submitted; raise an error
        if they cannot be queued."""
        if self.is_draining:
            raise HttpError(503, "the server is shutting down", headers={"connection": "close", "retry-after": "1"})
        health = self.engine.health()
        if not health.alive:
            raise HttpError(503, health.reason)
        self.engine.admit(num_sequences, self._num_preparing, field)
        self._num_preparing += num_sequences
        try:
            yield
        finally:
            self._num_preparing -= num_sequences

    def generate(
        self, call: Call, request: PromptRequest, prompts: list[bytes], params: SamplingParams, **options: Any
    ) -> None:
        """Submit every prompt to the engine, with `params` that have been checked, and add the answers to the call, which is
        released at its end. A call that only renders gets the prompts back instead."""
        if call.rendered is not None:
            call.rendered += [(prompt, params) for prompt in prompts]
            return
        options |= {"priority": request.priority or 0, "cache_salt": request.cache_salt, "client": call.client}
        options |= {"adapter": self.adapter_of(call.model), "sampling": params.sampling(self.tokenizer.eos_ids)}
        for prompt in prompts:
            fitting = params
            if params.seed is None and self._seeds is not None:
                fitting = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
            call.answers.append(self.engine.generate(prompt, fitting, **options))

    def seen(self, answer: Answer, updates: list[Update]) -> list[Update]:
        """Count updates in the metrics before they are sent; raise HttpError if a choice has failed."""
        self.metrics.see(answer, updates)
        if answer.error is not None:
            raise HttpError(400 if answer.is_refused else 500 if self.engine.health().alive else 503, answer.error)
        return updates

    def release(self, call: Call) -> None:
        """Record the spans of a call, abort its answers and count them. Finished answers are not aborted."""
        self.spans.phases(call)
        for answer in call.answers:
            answer.abort()
            self.metrics.end(answer)


def as_http_error(error: Exception, call: Call) -> HttpError:
    """Convert one of REFUSALS, raised by the engine or a check before it, to an HTTP error with the client's name of the
    field."""
    if isinstance(error, InvalidRequest):
        field = call.client_path(error.field)
        return HttpError(400, f"{field}: {error.message}", param=field)
    if isinstance(error, QueueFull):
        return HttpError(429, str(error), headers={"retry-after": str(error.retry_after_s)})
    if isinstance(error, EngineDead):
        return HttpError(503, str(error))
    if isinstance(error, WeightsError):
        return HttpError(409, str(error))
    assert isinstance(error, HttpError)
    return error
