"""Puts a load on a server: sends each request at its time and follows all answers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tqdm import tqdm

from penstock.engine.commands.bench.measured import MeasuredAnswer
from penstock.engine.commands.bench.summary import Outcome
from penstock.engine.commands.prove.http_client import Client
from penstock.engine.http.limits import allow_open_files

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


async def drive(
    client: Client, calls: Sequence[EncodedCall], max_concurrency: int | None = None, show: bool = False
) -> Run:
    """Send every call at its arrival time, or later where `max_concurrency` holds it back in the client."""
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
    """Send one call when there is room for it, and measure its answer."""
    queued = time.perf_counter()
    async with room:
        reply = MeasuredAnswer(time.perf_counter())
        queue_s = reply.start_s - queued
        try:
            status = await client.exchange(call.request, reply.take)
            outcome = reply.outcome(status, call.prompt_len, queue_s)
        except OSError as error:
            outcome = Outcome(
                call.prompt_len, 0, reply.start_s, 0.0, 0.0, queue_s=queue_s, error=str(error) or repr(error)
            )
        ended()
        return outcome
