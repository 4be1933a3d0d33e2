"""POST /v1/chat/completions: one conversation, whole or streamed."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.engine.http.errors import HttpError
from penstock.engine.output import Update
from penstock.engine.server.answers import Choice, Job, sampling_params, stream, whole
from penstock.engine.server.call import Call
from penstock.engine.server.formats import wanted_outputs
from penstock.engine.server.logprobs import chat_logprobs, prompt_logprobs
from penstock.engine.server.prompts import render, to_ids
from penstock.engine.server.replies import Chat, ChatChoice, ChatChunk, ChatChunkChoice, ChatMessage, Delta
from penstock.engine.server.schema import ChatRequest, parse
from penstock.engine.server.service import Service

ChatJob = Job[ChatRequest]

_DECODER = msgspec.json.Decoder(ChatRequest)


async def chat(service: Service, call: Call, body: bytes) -> Chat | AsyncGenerator[bytes, None]:
    """Answer the conversation, n times."""
    job = await _accept(service, call, body)
    if job.request.stream:
        return stream(job, Pieces(job).chunk, lambda: _chunk(job, []))
    return await whole(job, lambda gathered: _complete(job, gathered[0]))


async def _accept(service: Service, call: Call, body: bytes) -> ChatJob:
    request = parse(body, _DECODER)
    service.check_model(request.model)
    call.note_client_id(request.request_id)
    if request.top_logprobs is not None and not request.logprobs:
        raise HttpError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    wanted = wanted_outputs(request)
    special: dict[str, Any] = {"structured_outputs": wanted.outputs}
    special["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    if max_tokens is not None or "max_tokens" not in service.config.default_sampling:
        special["max_tokens"] = max_tokens  # None: as many as the context allows
    params = sampling_params(service, request, **special)
    with service.admit(params.n):
        grammar = await service.grammar(wanted)
        if call.prompt_ids is None:
            inputs: list[str] | list[list[int]] = [await render(request, service.template, service.info)]
        else:
            inputs = [call.prompt_ids]
        prompts = await to_ids(
            "messages",
            inputs,
            service.tokenizer,
            service.info,
            add_special_tokens=bool(request.add_special_tokens),  # the template has written them
            truncate_to=request.truncate_prompt_tokens,
        )
        answers = service.generate(
            call,
            prompts,
            params,
            is_length_asked=max_tokens is not None,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            grammar=grammar,
        )
    return Job(service, call, request, params, prompts, [None], answers)


def _complete(job: ChatJob, choices: list[Choice]) -> Chat:
    request, tokenizer = job.request, job.service.tokenizer
    reply = Chat(
        id=f"chatcmpl-{job.call.id}",
        created=job.call.created,
        model=job.model,
        choices=[
            ChatChoice(
                index=choice.index,
                message=ChatMessage(choice.text),
                logprobs=chat_logprobs(tokenizer, choice.logprobs) if request.logprobs else None,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                token_ids=choice.token_ids if request.return_token_ids else UNSET,
            )
            for choice in choices
        ],
    )
    if request.return_token_ids:
        reply.prompt_token_ids = job.prompts[0]
    if request.prompt_logprobs is not None:
        reply.prompt_logprobs = prompt_logprobs(tokenizer, job.generations[0].prompt_logprobs)
    return reply


def _chunk(job: ChatJob, choices: list[ChatChunkChoice]) -> ChatChunk:
    return ChatChunk(id=f"chatcmpl-{job.call.id}", created=job.call.created, model=job.model, choices=choices)


class Pieces:
    """The stream of a job, piece by piece. The first piece of every choice says who speaks."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._begun: set[int] = set()

    def chunk(self, place: int, update: Update) -> ChatChunk | None:
        job = self._job
        request = job.request
        is_first = update.index not in self._begun
        shows_tokens = request.return_token_ids or request.logprobs
        if not (is_first or update.text or update.finish_reason or (shows_tokens and update.token_ids)):
            return None  # held back: half a character, or what may become a stop string
        choice = ChatChunkChoice(update.index, Delta(content=update.text), finish_reason=update.finish_reason)
        reply = _chunk(job, [choice])
        if is_first:
            self._begun.add(update.index)
            choice.delta.role = "assistant"
            if request.return_token_ids:
                reply.prompt_token_ids = job.prompts[0]
        if request.logprobs:
            choice.logprobs = chat_logprobs(job.service.tokenizer, update.logprobs or ())
        if update.finish_reason is not None:
            choice.stop_reason = update.stop_reason
        if request.return_token_ids:
            choice.token_ids = update.token_ids
        return reply
