"""What the completion endpoints share: an accepted request, its whole answer, its stream.

How a piece of an answer looks is the endpoint's; when it comes, what it is counted as, and that the engine's
work ends with its reader, is here.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.engine.front.answer import Update
from penstock.engine.front.client import Generation
from penstock.engine.http.errors import HttpError
from penstock.engine.messages import FinishReason
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server.call import Answering, Call
from penstock.engine.server.prompts import in_thread_if
from penstock.engine.server.requests import Sampled
from penstock.engine.server.responses import CachedTokens, Chat, ChatChunk, Completion, Usage
from penstock.engine.server.service import Service
from penstock.executor.protocol import TokenLogprobs

DONE = b"data: [DONE]\n\n"
LONG_ANSWER = 2048  # positions with log-probabilities; formatting more of them would hold up the event loop
TOKENS_PER_LOGPROB = 16  # whose text is read for calls and reasoning in the time of one such position

# Fields that a request and SamplingParams name and mean alike.
_SHARED = [name for name in SamplingParams.__struct_fields__ if name in Sampled.__struct_fields__]
_ENCODER = msgspec.json.Encoder()

Asked = TypeVar("Asked", bound=Sampled)
Whole = TypeVar("Whole", Completion, Chat)
Chunk = TypeVar("Chunk", Completion, ChatChunk)


@dataclass(frozen=True)
class Job(Generic[Asked]):
    """A request that the engine has taken. Prompts, their texts and their answers go by the same place."""

    service: Service
    call: Call
    request: Asked
    params: SamplingParams
    prompts: list[list[int]]
    texts: Sequence[str | None]  # where the client gave text
    answers: list[Answering]

    @property
    def model(self) -> str:
        return self.request.model or self.service.model_name

    @property
    def generations(self) -> list[Generation]:
        return [answer.generation for answer in self.answers]


def sampling_params(service: Service, request: Sampled, **special: Any) -> SamplingParams:
    """The model's defaults, then what the request says, then what its endpoint makes of the rest. Checked."""
    if request.stream and request.prompt_logprobs is not None:
        raise HttpError(400, "prompt_logprobs: cannot be streamed", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise HttpError(400, "stream_options: only a stream has any; set stream to true", param="stream_options")
    given = {name: value for name in _SHARED if (value := getattr(request, name)) is not None}
    params = SamplingParams(**{**service.config.default_sampling, **given, **special})
    service.check_sampling(params)
    return params


class Choice:
    """One choice of a whole answer, gathered from its updates."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def take(self, update: Update) -> None:
        self._pieces.append(update.text)
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or ()
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason


async def whole(job: Job[Asked], build: Callable[[list[list[Choice]]], Whole]) -> Whole:
    """Wait for every choice of every prompt, then let `build` make the reply of them."""
    gathered = [await _gather(answer, job.params.n) for answer in job.answers]
    choices = [choice for of_prompt in gathered for choice in of_prompt]
    job.call.num_tokens = sum(len(choice.token_ids) for choice in choices)
    num_positions = sum(len(choice.logprobs) for choice in choices)
    num_positions += sum(len(generation.prompt_logprobs or ()) for generation in job.generations)
    num_positions += sum(len(choice.token_ids) for choice in choices) // TOKENS_PER_LOGPROB
    reply = await in_thread_if(num_positions > LONG_ANSWER, lambda: build(gathered))
    reply.usage = usage(job.generations, job.call.num_tokens)
    return reply


async def stream(
    job: Job[Asked], pieces: Callable[[int, Update], Sequence[Chunk]], empty: Callable[[], Chunk]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events: the `pieces` of every update, the usage if asked for, the end mark."""
    options = job.request.stream_options
    with_usage = options is not None and options.include_usage
    continuously = options is not None and options.continuous_usage_stats
    counts = [0] * len(job.answers)
    async with aclosing(_interleave(job.answers)) as news:
        async for place, updates in news:
            events = []
            for update in updates:
                counts[place] += len(update.token_ids)
                for chunk in pieces(place, update):
                    if continuously:
                        chunk.usage = usage([job.answers[place].generation], counts[place])
                    elif with_usage:
                        chunk.usage = None
                    events.append(_event(chunk))
            job.call.num_tokens = sum(counts)
            if events:
                yield b"".join(events)
    if with_usage:
        last = empty()
        last.usage = usage(job.generations, job.call.num_tokens)
        yield _event(last)
    yield DONE


def usage(generations: Sequence[Generation], num_tokens: int | UnsetType = UNSET) -> Usage:
    """Tokens read and written; `num_tokens` is left out where nothing is written."""
    num_prompt = sum(generation.num_prompt_tokens for generation in generations)
    cached = [count for generation in generations if (count := generation.num_cached_tokens) is not None]
    return Usage(
        prompt_tokens=num_prompt,
        total_tokens=num_prompt + (num_tokens or 0),
        completion_tokens=num_tokens,
        prompt_tokens_details=CachedTokens(sum(cached)) if cached else None,
    )


async def _gather(answering: Answering, num_choices: int) -> list[Choice]:
    choices = [Choice(index) for index in range(num_choices)]
    async for updates in answering:
        for update in updates:
            choices[update.index].take(update)
    return choices


async def _interleave(answers: Sequence[Answering]) -> AsyncGenerator[tuple[int, list[Update]], None]:
    """The updates of several prompts as they come, each with the prompt's place."""
    if len(answers) == 1:
        async for updates in answers[0]:
            yield 0, updates
        return
    waiting = {asyncio.ensure_future(anext(answer, None)): place for place, answer in enumerate(answers)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                news = task.result()
                if news is not None:
                    waiting[asyncio.ensure_future(anext(answers[place], None))] = place
                    yield place, news
    finally:
        for task in waiting:
            task.cancel()


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + _ENCODER.encode(chunk) + b"\n\n"
