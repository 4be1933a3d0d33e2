"""Shared code of completions and chats: sampling parameters, output formats, whole and streamed answers, and usage.

The endpoint's subclass of `ChoicesWriter` formats the choices.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from penstock.engine.front.answer import Answer, Update, joined
from penstock.engine.http.errors import HttpError
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.messages import Reuse
from penstock.engine.sampling_params import SamplingParams, StructuredOutputs
from penstock.engine.server.answer_writer import LONG_ANSWER, Json, Writer
from penstock.engine.server.call import Call
from penstock.engine.server.prompts import in_thread_if
from penstock.engine.server.requests import SAMPLING_FIELDS, GenerateRequest, ResponseFormat, StreamOptions
from penstock.engine.server.service import Service

DONE = b"data: [DONE]\n\n"
TOKENS_PER_LOGPROB = 16  # tokens whose text is parsed in the time of formatting one position with log-probabilities

_ENCODER = msgspec.json.Encoder()


class ChoicesWriter(Writer):
    """Writes the answers of a completion or a chat: the chunks of a stream, or an object with all choices."""

    PREFIX: ClassVar[str]  # of the answer's id
    KIND: ClassVar[str]  # of a whole answer …
    CHUNK_KIND: ClassVar[str]  # … and of the events of a stream

    def __init__(self, service: Service, call: Call, request: GenerateRequest) -> None:
        super().__init__(call, {}, is_stream=bool(request.stream))
        self._tokenizer = service.tokenizer
        self._options, self._explains = request.stream_options or StreamOptions(), request.explain_cache
        self._updates: list[list[list[Update]]] = [[[] for _ in answer.choices] for answer in call.answers]

    def take(self, index: int, updates: Sequence[Update]) -> None:
        answer = self._call.answers[index]
        for update in updates:
            if not self.is_stream:
                self._updates[index][update.index].append(update)
                continue
            for chunk in self._chunks(index, update):
                if self._options.include_usage:  # as in vLLM, continuous_usage_stats needs it too
                    is_shown = self._options.continuous_usage_stats
                    chunk["usage"] = usage([answer], answer.num_tokens, self._explains) if is_shown else None
                self._events.append(_event(chunk))

    async def end(self) -> None:
        call = self._call
        if not self.is_stream:
            choices = [[*map(joined, updates)] for updates in self._updates]
            num_positions = call.num_tokens // TOKENS_PER_LOGPROB
            for answer, joint in zip(call.answers, choices, strict=True):
                num_positions += len(answer.prompt_logprobs or ()) + sum(len(each.logprobs or ()) for each in joint)
            self.reply = await in_thread_if(num_positions > LONG_ANSWER, lambda: self._whole(choices))
            self.reply["usage"] = usage(call.answers, call.num_tokens, self._explains)
            return
        if self._options.include_usage:
            used = usage(call.answers, call.num_tokens, self._explains)
            self._events.append(_event(self._named([]) | {"usage": used}))
        self._events.append(DONE)

    async def fail(self, error: HttpError) -> None:
        self._events.append(b"data: " + error.body() + b"\n\n" + DONE)

    @abstractmethod
    def _whole(self, choices: list[list[Update]]) -> Json:
        """Return the whole answer. `choices`: for each prompt a list of its choices, each as one update."""

    @abstractmethod
    def _chunks(self, index: int, update: Update) -> Sequence[Json]:
        """Return the events of a stream for an update of one choice of a prompt."""

    def _named(self, choices: list[Json]) -> Json:
        """Return a whole answer or an event with these choices."""
        call, kind = self._call, self.CHUNK_KIND if self.is_stream else self.KIND
        names = {"id": f"{self.PREFIX}{call.id}", "object": kind, "created": call.created, "model": call.model}
        return names | {"choices": choices}


def sampling_params(service: Service, call: Call, request: GenerateRequest, **special: Any) -> SamplingParams:
    """Merge the model's defaults, the request's parameters and the endpoint's `special` ones; return them validated, with
    the requested output format."""
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "cannot be streamed")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", "given; it requires stream: true")
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(request, name)) is not None}
    given["structured_outputs"] = _wanted_outputs(call, request, service.config.coerce_one_of)
    params = SamplingParams(**{**service.config.default_sampling, **given, **special})
    params.check(service.info.vocab_size, service.config.max_logprobs)
    return params


def _wanted_outputs(call: Call, request: GenerateRequest, coerce_one_of: bool) -> StructuredOutputs | None:
    """Return the requested output format. `coerce_one_of`: the server's setting for all requests."""
    wanted = request.structured_outputs
    form = request.response_format
    if form is not None and form.json_schema is not None and form.type != "json_schema":  # it would have no effect
        raise InvalidRequest("response_format.json_schema", f"the type {form.type!r} has no schema")
    if form is not None and form.schema is not None and form.type != "json_object":
        raise InvalidRequest("response_format.schema", f"only the type 'json_object' has it, not {form.type!r}")
    if form is not None and form.type != "text":
        if wanted is not None:
            raise InvalidRequest("structured_outputs", "give only one of it and response_format")
        wanted = _of_format(call, form)
    if wanted is not None and wanted.json is not None and coerce_one_of:
        wanted = msgspec.structs.replace(wanted, coerce_one_of=True)
    return wanted


def _of_format(call: Call, form: ResponseFormat) -> StructuredOutputs:
    if form.schema is not None:
        call.paths["structured_outputs.json"] = call.client_path("response_format.schema")
        return StructuredOutputs(json=form.schema)
    if form.type == "json_object":
        call.paths["structured_outputs.json_object"] = call.client_path("response_format")
        return StructuredOutputs(json_object=True)
    if form.json_schema is None or form.json_schema.schema is None:
        field = "response_format.json_schema" + ("" if form.json_schema is None else ".schema")
        raise InvalidRequest(field, "the field is required")
    call.paths["structured_outputs.json"] = call.client_path("response_format.json_schema.schema")
    return StructuredOutputs(json=form.json_schema.schema)


def token_fields(request: GenerateRequest, update: Update) -> Json:
    """Return the token ids of a choice, if the client wants them, and their weights versions after an update."""
    if not request.return_token_ids:
        return {}
    fields: Json = {"token_ids": update.token_ids}
    if update.versions:
        fields["weights_versions"] = update.versions
    return fields


def usage(answers: Sequence[Answer], num_tokens: int | None = None, explains: bool | None = False) -> Json:
    """Return the numbers of prompt and generated tokens; `num_tokens` is None if the endpoint generates nothing.
    `explains`: also why no more of the prompts was cached."""
    num_prompt = sum(answer.num_prompt_tokens for answer in answers)
    found: Json = {"prompt_tokens": num_prompt, "total_tokens": num_prompt + (num_tokens or 0)}
    if num_tokens is not None:
        found["completion_tokens"] = num_tokens
    cached = [count for answer in answers if (count := answer.num_cached_tokens) is not None]
    details: Json = {"cached_tokens": sum(cached)}
    if explains:
        details["penstock"] = _reports(answers)
    return found | {"prompt_tokens_details": details if cached else None}


def _reports(answers: Sequence[Answer]) -> list[Reuse]:
    """Return what clients may know of the cached tokens of each prompt. A salt hides from other users whether a prompt is
    cached, so a prompt that is known under another salt looks exactly like a new one."""
    known = [answer.reuse for answer in answers if answer.reuse is not None]
    return [Reuse(each.cached, "new_tokens", differs_at=0) if each.reason == "other_salt" else each for each in known]


def _event(chunk: Json) -> bytes:
    return b"data: " + _ENCODER.encode(chunk) + b"\n\n"
