"""Builds the requests of `penstock bench serve`, sends each at its arrival time and measures its answer."""

import argparse
import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from tqdm import tqdm

from penstock.engine.commands.bench.datasets import PromptSource, Sample, estimated_tokens, load_samples, token_counter
from penstock.engine.commands.bench.measured import MeasuredAnswer
from penstock.engine.commands.bench.report import Outcome
from penstock.engine.commands.prove.http_client import KEY_VARIABLES, Client, Target
from penstock.engine.config import ConfigError
from penstock.engine.http.limits import allow_open_files

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
SPARE_FILES = 64


class EncodedCall(NamedTuple):
    """A request, encoded before the clock starts."""

    request: bytes
    prompt_len: int
    arrival_s: float = 0.0


class Run(NamedTuple):
    """The results of all calls."""

    outcomes: list[Outcome]  # in the order of the calls
    duration_s: float
    max_send_delay_s: float  # how far the generator itself fell behind the arrival times


def build_calls(
    args: argparse.Namespace, target: Target, model: str, headers: dict[str, str]
) -> tuple[list[EncodedCall], list[EncodedCall]]:
    """Return the warm-up calls and the measured ones; warm-ups have other prompts, so that they fill no cache for the rest."""
    path = ENDPOINTS[args.backend]
    is_chat = args.backend == "openai-chat"
    counter = estimated_tokens if args.tokenizer is None else token_counter(args.tokenizer)
    source = PromptSource(args.random_vocab_size, is_chat, counter)
    samples = load_samples(args, args.num_prompts + args.num_warmups, source)
    bodies = [_body(args, model, is_chat, sample) for sample in samples]
    requests = [target.request("POST", path, body, headers) for body in bodies]
    times = [*_times(args, samples[: args.num_prompts]), *[0.0] * args.num_warmups]
    calls = [
        EncodedCall(*each) for each in zip(requests, (sample.prompt_len for sample in samples), times, strict=True)
    ]
    return calls[args.num_prompts :], calls[: args.num_prompts]


def _times(args: argparse.Namespace, samples: list[Sample]) -> list[float]:
    """Return the time to send each sample, in seconds after the start."""
    if samples[0].arrival_s is None:
        return arrival_times(len(samples), args.request_rate, random.Random(args.seed))
    if not math.isinf(args.request_rate):
        raise ConfigError("request_rate: given; a trace has its own arrival times (see --trace-speed)")
    return [sample.arrival_s or 0.0 for sample in samples]


def arrival_times(count: int, rate: float, rng: random.Random) -> list[float]:
    """Draw the times to send `count` requests, in seconds after the start, from a Poisson process.

    An infinite rate sends all at once. The times are scaled so that the last one is count / rate, so that two seeds put
    the same load on a server.
    """
    if math.isinf(rate):
        return [0.0] * count
    times: list[float] = []
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(1.0)
        times.append(now)
    return [time * count / (rate * now) for time in times]


def _body(args: argparse.Namespace, model: str, is_chat: bool, sample: Sample) -> bytes:
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if is_chat:
        body["messages"] = [{"role": "user", "content": sample.prompt}]
        body["max_completion_tokens"] = sample.output_len
    else:
        body["prompt"] = sample.prompt
        body["max_tokens"] = sample.output_len
    if args.ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body | (args.extra_body or {}))


async def first_model(client: Client, headers: dict[str, str], timeout_s: float) -> str:
    """Return the name of the first model that the server lists, waiting up to `timeout_s` for the server. Raise
    ConfigError if there is no server then, or no model; at once if the server refuses the key."""
    where = f"{client.target.host}:{client.target.port}"
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            status, body = await client.fetch("GET", "/v1/models", headers=headers)
            what = f"{where}/v1/models answers {status}: {body[:200].decode(errors='replace')}"
        except OSError as error:
            status, body, what = 0, b"", f"no server answers at {where} ({error})"
        if status in (200, 401) or time.monotonic() >= deadline:
            break
        await asyncio.sleep(0.1)
    if status == 401:
        raise ConfigError(f"base_url: {where} requires an API key; {' or '.join(KEY_VARIABLES)} has no accepted one")
    if status != 200:
        waited = f" in {timeout_s:g} s (--ready-check-timeout-sec)" if timeout_s else ""
        raise ConfigError(f"base_url: {what}{waited}")
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        raise ConfigError(f"model: {where}/v1/models lists none; give --model") from None


async def drive(
    client: Client, calls: Sequence[EncodedCall], max_concurrency: int | None = None, show: bool = False
) -> Run:
    """Send every call at its arrival time, or later if `max_concurrency` delays it in the client."""
    allow_open_files(min(len(calls), max_concurrency or len(calls)) + SPARE_FILES)
    room = asyncio.Semaphore(max_concurrency or len(calls))
    started = time.perf_counter()
    tasks = []
    max_delay_s = 0.0
    with tqdm(total=len(calls), unit="request", disable=not show) as bar:
        try:
            for call in calls:
                due = started + call.arrival_s
                wait_s = due - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                max_delay_s = max(max_delay_s, time.perf_counter() - due)
                tasks.append(asyncio.create_task(_send(client, call, room, bar.update)))
            outcomes = [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
    return Run(outcomes, time.perf_counter() - started, max_delay_s)


async def _send(client: Client, call: EncodedCall, room: asyncio.Semaphore, ended: Callable[[], object]) -> Outcome:
    """Send one call when `max_concurrency` allows it, and measure its answer."""
    async with room:
        reply = MeasuredAnswer(time.perf_counter())
        try:
            status = await client.exchange(call.request, reply.take)
            outcome = reply.outcome(status, call.prompt_len)
        except OSError as error:
            outcome = Outcome(call.prompt_len, 0, reply.start_s, 0.0, 0.0, error=str(error) or repr(error))
        ended()
        return outcome
