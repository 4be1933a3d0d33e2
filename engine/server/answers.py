"""Shared code of completions and chats: sampling parameters, output formats, whole and streamed answers, and usage.

The `Reply` of each endpoint formats the choices.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import msgspec

from penstock.engine.front.answer import Answer, Update, joined
from penstock.engine.messages import Reuse
from penstock.engine.sampling_params import InvalidRequest, SamplingParams, StructuredOutputs
from penstock.engine.server.call import Call
from penstock.engine.server.prompts import in_thread_if
from penstock.engine.server.requests import SAMPLING_FIELDS, GenerateRequest, ResponseFormat
from penstock.engine.server.service import Service

DONE = b"data: [DONE]\n\n"
LONG_ANSWER = 2048  # positions with log-probabilities; formatting more of them would block the event loop
TOKENS_PER_LOGPROB = 16  # tokens whose text is parsed in the time of formatting one such position

Json = dict[str, Any]  # an object of a response: OpenAI's fields, with vLLM's additions that clients use

_ENCODER = msgspec.json.Encoder()


class Reply(Protocol):
    """Formats the answers of one call for its endpoint."""

    def whole(self, choices: list[list[Update]], /) -> Json:
        """Return the whole answer. `choices`: for each prompt a list of its choices, each as one update."""

    def chunks(self, place: int, update: Update, /) -> Sequence[Json]:
        """Return the events of a stream for an update of one choice of the prompt at `place`."""

    def empty(self) -> Json:
        """Return an event without choices, for the usage."""


def sampling_params(service: Service, request: GenerateRequest, **special: Any) -> SamplingParams:
    """Merge the model's defaults, the request's parameters and the endpoint's `special` ones; return them validated."""
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "cannot be streamed")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", "given; it requires stream: true")
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(request, name)) is not None}
    params = SamplingParams(**{**service.config.default_sampling, **given, **special})
    params.check(service.info.vocab_size, service.config.max_logprobs)
    return params


def wanted_outputs(call: Call, request: GenerateRequest, coerce_one_of: bool) -> StructuredOutputs | None:
    """Return the requested output format. `coerce_one_of`: the server's setting for all requests."""
    wanted = request.structured_outputs
    form = request.response_format
    if form is not None and form.json_schema is not None and form.type != "json_schema":  # it would have no effect
        raise InvalidRequest("response_format.json_schema", f"the type {form.type!r} has no schema")
    if form is not None and form.type != "text":
        if wanted is not None:
            raise InvalidRequest("structured_outputs", "give only one of it and response_format")
        wanted = _of_format(call, form)
    if wanted is not None and wanted.json is not None and coerce_one_of:
        wanted = msgspec.structs.replace(wanted, coerce_one_of=True)
    return wanted


def _of_format(call: Call, given: ResponseFormat) -> StructuredOutputs:
    if given.type == "json_object":
        call.paths["structured_outputs.json_object"] = call.client_path("response_format")
        return StructuredOutputs(json_object=True)
    if given.json_schema is None or given.json_schema.schema is None:
        field = "response_format.json_schema" + ("" if given.json_schema is None else ".schema")
        raise InvalidRequest(field, "the field is required")
    call.paths["structured_outputs.json"] = call.client_path("response_format.json_schema.schema")
    return StructuredOutputs(json=given.json_schema.schema)


async def respond(
    service: Service, call: Call, request: GenerateRequest, reply: Reply
) -> Json | AsyncGenerator[bytes, None]:
    """Return the whole reply, or its server-sent events if the request asks for a stream."""
    if request.stream:
        return _stream(service, call, request, reply)
    choices = [await gather(service, answer) for answer in call.answers]
    num_positions = call.num_tokens // TOKENS_PER_LOGPROB
    for answer, updates in zip(call.answers, choices, strict=True):
        num_positions += len(answer.prompt_logprobs or ()) + sum(len(update.logprobs or ()) for update in updates)
    whole = await in_thread_if(num_positions > LONG_ANSWER, lambda: reply.whole(choices))
    whole["usage"] = usage(call.answers, call.num_tokens, request.explain_cache)
    return whole


async def _stream(service: Service, call: Call, request: GenerateRequest, reply: Reply) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of every update, the usage if the client requested it, and the end mark."""
    options, explains = request.stream_options, request.explain_cache
    with_usage = options is not None and options.include_usage
    continuously = options is not None and options.continuous_usage_stats

    def written(place: int, updates: Sequence[Update]) -> bytes:
        events, answer = [], call.answers[place]
        for update in updates:
            for chunk in reply.chunks(place, update):
                if continuously:
                    chunk["usage"] = usage([answer], answer.num_tokens, explains)
                elif with_usage:
                    chunk["usage"] = None
                events.append(_event(chunk))
        return b"".join(events)

    begun: set[tuple[int, int]] = set()  # choices whose first update has come; it may echo the prompt
    async with aclosing(_interleave(service, call.answers)) as arriving:
        async for place, updates in arriving:
            first = {(place, update.index) for update in updates} - begun
            begun |= first
            num_positions = len(first) * len(call.answers[place].prompt_logprobs or ())
            num_positions += sum(len(update.logprobs or ()) for update in updates)
            work = partial(written, place, updates)
            if events := await in_thread_if(num_positions > LONG_ANSWER, work):
                yield events
    if with_usage:
        last = reply.empty()
        last["usage"] = usage(call.answers, call.num_tokens, explains)
        yield _event(last)
    yield DONE


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


async def gather(service: Service, answer: Answer) -> list[Update]:
    """Wait for every choice and return each as one update."""
    parts: list[list[Update]] = [[] for _ in answer.choices]
    async for updates in answer:
        for update in service.seen(answer, updates):
            parts[update.index].append(update)
    return [joined(each) for each in parts]


async def _interleave(service: Service, answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, list[Update]], None]:
    """Yield the updates of several prompts as they arrive, each with the index of its prompt."""
    if len(answers) == 1:
        async for updates in answers[0]:
            yield 0, service.seen(answers[0], updates)
        return
    waiting = {asyncio.ensure_future(anext(answer, None)): place for place, answer in enumerate(answers)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                found = task.result()
                if found is not None:
                    waiting[asyncio.ensure_future(anext(answers[place], None))] = place
                    yield place, service.seen(answers[place], found)
    finally:
        for task in waiting:
            task.cancel()


def _event(chunk: Json) -> bytes:
    return b"data: " + _ENCODER.encode(chunk) + b"\n\n"
