"""POST /v1/chat/completions: one conversation, whole or streamed."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.engine.front.answer import Update
from penstock.engine.http.errors import HttpError
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.server.answers import Choice, Job, sampling_params, stream, whole
from penstock.engine.server.call import Call
from penstock.engine.server.logprobs import chat_logprobs, prompt_logprobs
from penstock.engine.server.prompts import render, to_ids
from penstock.engine.server.reading import Plan, Reading
from penstock.engine.server.requests import ChatRequest, parse
from penstock.engine.server.response_format import Wanted, wanted_outputs
from penstock.engine.server.responses import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatFinish,
    ChatMessage,
    Delta,
)
from penstock.engine.server.service import Service
from penstock.engine.text.tools.formats import Calls


@dataclass(frozen=True)
class ChatJob(Job[ChatRequest]):
    plan: Plan  # how the answers are read


_DECODER = msgspec.json.Decoder(ChatRequest)


async def chat(service: Service, call: Call, body: bytes) -> Chat | AsyncGenerator[bytes, None]:
    """Answer the conversation, n times."""
    job = await _accept(service, call, body)
    if job.request.stream:
        return stream(job, Pieces(job).chunks, lambda: _chunk(job, []))
    return await whole(job, lambda gathered: _complete(job, gathered[0]))


async def _accept(service: Service, call: Call, body: bytes) -> ChatJob:
    request = parse(body, _DECODER)
    service.check_model(request.model)
    call.note_client_id(request.request_id)
    if request.top_logprobs is not None and not request.logprobs:
        raise HttpError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    wanted = wanted_outputs(request, service.config.coerce_one_of)
    calls = service.tools.calls(request)
    special: dict[str, Any] = {"structured_outputs": wanted.outputs}
    special["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    if max_tokens is not None or "max_tokens" not in service.config.default_sampling:
        special["max_tokens"] = max_tokens  # None: as many as the context allows
    params = sampling_params(service, request, **special)
    with service.admit(params.n):
        if call.prompt_ids is None:
            inputs: list[str] | list[list[int]] = [
                await render(request, service.template, service.info, tools_as_text=service.tools.as_text)
            ]
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
        plan, wanted, grammar = await _planned(service, request, calls, prompts[0], wanted)
        params = msgspec.structs.replace(params, structured_outputs=wanted.outputs)
        answers = service.generate(
            call,
            prompts,
            params,
            is_length_asked=max_tokens is not None,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            kv_transfer=request.kv_transfer_params,
            grammar=grammar,
            shown_ids=frozenset() if plan.is_plain else service.tools.shown_ids,
        )
    return ChatJob(service, call, request, params, prompts, [None], answers, plan)


async def _planned(
    service: Service, request: ChatRequest, calls: Calls | None, prompt: list[int], asked: Wanted
) -> tuple[Plan, Wanted, str | None]:
    plan, wanted = service.tools.plan(request, calls, prompt, asked)
    try:
        return plan, wanted, await service.grammar(wanted)
    except InvalidRequest:
        looser = await service.tools.looser(calls, service.grammar) if calls is not None else None
        if looser is None:
            raise
    plan, wanted = service.tools.plan(request, looser, prompt, asked)
    return plan, wanted, await service.grammar(wanted)


def _complete(job: ChatJob, choices: list[Choice]) -> Chat:
    request, tokenizer = job.request, job.service.tokenizer
    reply = Chat(
        id=f"chatcmpl-{job.call.id}",
        created=job.call.created,
        model=job.model,
        choices=[
            ChatChoice(
                index=choice.index,
                message=message,
                logprobs=chat_logprobs(tokenizer, choice.logprobs) if request.logprobs else None,
                finish_reason=reason,
                stop_reason=choice.stop_reason,
                token_ids=choice.token_ids if request.return_token_ids else UNSET,
            )
            for choice, (message, reason) in ((choice, _read(job.plan, choice)) for choice in choices)
        ],
    )
    if request.return_token_ids:
        reply.prompt_token_ids = job.prompts[0]
    if request.prompt_logprobs is not None:
        reply.prompt_logprobs = prompt_logprobs(tokenizer, job.generations[0].prompt_logprobs)
    return reply


def _read(plan: Plan, choice: Choice) -> tuple[ChatMessage, ChatFinish | None]:
    if plan.is_plain:
        return ChatMessage(choice.text), choice.finish_reason
    reading = plan.begin()
    return reading.message(choice.text), reading.finish_reason(choice.finish_reason)


def _chunk(job: ChatJob, choices: list[ChatChunkChoice]) -> ChatChunk:
    return ChatChunk(id=f"chatcmpl-{job.call.id}", created=job.call.created, model=job.model, choices=choices)


class Pieces:
    """The stream of a job, piece by piece. The first piece of every choice says who speaks."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._begun: dict[int, Reading | None] = {}  # choice → its reader, where there is something to look for

    def chunks(self, place: int, update: Update) -> list[ChatChunk]:
        job, request = self._job, self._job.request
        is_first = update.index not in self._begun
        if is_first:
            self._begun[update.index] = None if job.plan.is_plain else job.plan.begin()
        reading = self._begun[update.index]
        deltas, reason = [Delta(content=update.text)] if update.text else [], update.finish_reason
        if reading is not None:
            deltas = reading.deltas(update.text, is_last=reason is not None)
        shows_tokens = request.return_token_ids or request.logprobs
        if not deltas and (is_first or reason or (shows_tokens and update.token_ids)):
            deltas = [Delta(content="") if reading is None else Delta()]
        if not deltas:
            return []  # held back: half a character, or what may become a stop string, a call or a mark
        chunks = [_chunk(job, [ChatChunkChoice(update.index, delta)]) for delta in deltas]
        if is_first:
            deltas[0].role = "assistant"
            if request.return_token_ids:
                chunks[0].prompt_token_ids = job.prompts[0]
        last = chunks[-1].choices[0]
        last.finish_reason = reason if reading is None else reading.finish_reason(reason)
        self._finish(last, update)
        return chunks

    def _finish(self, last: ChatChunkChoice, update: Update) -> None:
        """What an update says beside its text stands in its last chunk."""
        request = self._job.request
        if request.logprobs:
            last.logprobs = chat_logprobs(self._job.service.tokenizer, update.logprobs or ())
        if update.finish_reason is not None:
            last.stop_reason = update.stop_reason
        if request.return_token_ids:
            last.token_ids = update.token_ids
