"""POST /v1/completions: one or many prompts, whole or streamed."""

from collections.abc import AsyncGenerator

import msgspec

from penstock.engine.front.answer import Update
from penstock.engine.http.errors import HttpError
from penstock.engine.server.answers import Choice, Job, sampling_params, stream, whole
from penstock.engine.server.call import Call
from penstock.engine.server.logprobs import completion_logprobs, prompt_logprobs
from penstock.engine.server.prompts import decode_inputs, to_ids
from penstock.engine.server.requests import CompletionRequest, parse
from penstock.engine.server.response_format import wanted_outputs
from penstock.engine.server.responses import Completion, CompletionChoice, CompletionLogprobs
from penstock.engine.server.service import MAX_SEQUENCES, Service
from penstock.executor.protocol import TokenLogprobs

CompletionJob = Job[CompletionRequest]

_DECODER = msgspec.json.Decoder(CompletionRequest)


async def completions(service: Service, call: Call, body: bytes) -> Completion | AsyncGenerator[bytes, None]:
    """Complete the prompt or prompts, n times each."""
    job = await _accept(service, call, body)
    if job.request.stream:
        return stream(job, Pieces(job).chunks, lambda: _reply(job, []))
    return await whole(job, lambda gathered: _complete(job, gathered))


async def _accept(service: Service, call: Call, body: bytes) -> CompletionJob:
    request = parse(body, _DECODER)
    service.check_model(request.model)
    call.note_client_id(request.request_id)
    # The echoed prompt shows its log-probabilities as well.
    asked = [request.prompt_logprobs, request.logprobs if request.echo else None]
    wanted = wanted_outputs(request, service.config.coerce_one_of)
    params = sampling_params(
        service,
        request,
        structured_outputs=wanted.outputs,
        logprobs=request.logprobs,
        prompt_logprobs=max((value for value in asked if value is not None), default=None),
    )
    if call.prompt_ids is None:
        inputs = decode_inputs("prompt", request.prompt, MAX_SEQUENCES, service.info)
    else:
        inputs = [call.prompt_ids]
    num_sequences = len(inputs) * params.n
    if num_sequences > MAX_SEQUENCES:
        raise HttpError(
            400, f"n: {len(inputs)} prompts × {params.n} choices; at most {MAX_SEQUENCES} are allowed", param="n"
        )
    with service.admit(num_sequences):
        grammar = await service.grammar(wanted)
        prompts = await to_ids(
            "prompt",
            inputs,
            service.tokenizer,
            service.info,
            add_special_tokens=request.add_special_tokens is not False,
            truncate_to=request.truncate_prompt_tokens,
        )
        answers = service.generate(
            call,
            prompts,
            params,
            is_length_asked=request.max_tokens is not None,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            kv_transfer=request.kv_transfer_params,
            is_continuation=True,
            grammar=grammar,
        )
    return Job(service, call, request, params, prompts, [_given_text(request, each) for each in inputs], answers)


def _given_text(request: CompletionRequest, given: str | list[int]) -> str | None:
    """The text to echo, if it is what the model reads."""
    return given if isinstance(given, str) and request.truncate_prompt_tokens is None else None


def _echo(job: CompletionJob, place: int) -> str:
    text = job.texts[place]
    return job.service.tokenizer.decode(job.prompts[place], skip_special_tokens=False) if text is None else text


def _reply(job: CompletionJob, choices: list[CompletionChoice]) -> Completion:
    return Completion(id=f"cmpl-{job.call.id}", created=job.call.created, model=job.model, choices=choices)


def _complete(job: CompletionJob, gathered: list[list[Choice]]) -> Completion:
    return _reply(job, [_choice(job, place, choice) for place, choices in enumerate(gathered) for choice in choices])


def _choice(job: CompletionJob, place: int, choice: Choice) -> CompletionChoice:
    request, generation = job.request, job.answers[place].generation
    reply = CompletionChoice(
        index=place * job.params.n + choice.index,
        text=choice.text,
        logprobs=_logprobs(job, place, choice.logprobs, 0, is_first=True),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )
    _open(job, place, reply)
    if request.return_token_ids:
        reply.token_ids = choice.token_ids
    if request.prompt_logprobs is not None:
        reply.prompt_logprobs = prompt_logprobs(job.service.tokenizer, generation.prompt_logprobs)
    return reply


def _open(job: CompletionJob, place: int, reply: CompletionChoice) -> None:
    """What a choice begins with: the prompt, if it was asked for."""
    if job.request.echo:
        reply.text = _echo(job, place) + reply.text
    if job.request.return_token_ids:
        reply.prompt_token_ids = job.prompts[place]


def _logprobs(
    job: CompletionJob, place: int, tokens: list[TokenLogprobs], offset: int, *, is_first: bool
) -> CompletionLogprobs | None:
    if job.request.logprobs is None:
        return None
    if not (is_first and job.request.echo):
        return completion_logprobs(job.service.tokenizer, tokens, offset)
    tokens = [*(job.answers[place].generation.prompt_logprobs or ()), *tokens]
    return completion_logprobs(job.service.tokenizer, tokens, offset, job.prompts[place][0])


class Pieces:
    """The stream of a job, piece by piece: knows for each choice whether it has begun and how far its text is."""

    def __init__(self, job: CompletionJob) -> None:
        self._job = job
        self._offsets: dict[int, int] = {}  # choice → where its next token's text begins

    def chunks(self, place: int, update: Update) -> list[Completion]:
        job = self._job
        index = place * job.params.n + update.index
        is_first = index not in self._offsets
        offset = self._offsets.setdefault(index, 0)
        shows_tokens = job.request.return_token_ids or job.request.logprobs is not None
        if not (is_first or update.text or update.finish_reason or (shows_tokens and update.token_ids)):
            return []  # held back: half a character, or what may become a stop string
        logprobs = _logprobs(job, place, update.logprobs or [], offset, is_first=is_first)
        choice = CompletionChoice(index, update.text, logprobs, update.finish_reason, update.stop_reason)
        if is_first:
            _open(job, place, choice)
        if job.request.return_token_ids:
            choice.token_ids = update.token_ids
        if logprobs is not None:
            self._offsets[index] += sum(map(len, logprobs.tokens))
        return [_reply(job, [choice])]
