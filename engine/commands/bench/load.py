"""Puts a load on a server: sends each request at its time, follows all answers, shows how it goes."""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from penstock.engine.commands.bench.http_client import Client
from penstock.engine.commands.bench.stream import MeasuredAnswer
from penstock.engine.commands.bench.summary import Outcome
from penstock.engine.http.limits import allow_open_files

REFRESH_S = 0.5
SPARE_FILES = 64
ERASED = "\r\x1b[K"  # the live line


class EncodedCall(NamedTuple):
    """A request, encoded before the clock starts."""

    request: bytes
    prompt_len: int
    arrival_s: float = 0.0


class Run(NamedTuple):
    outcomes: list[Outcome]  # in the order of the calls
    duration_s: float
    max_send_delay_s: float  # how far the generator itself fell behind the arrival times


async def drive(
    client: Client, calls: Sequence[EncodedCall], max_concurrency: int | None = None, show: bool = False
) -> Run:
    """Send every call at its arrival time, or later where `max_concurrency` holds it back in the client."""
    allow_open_files(min(len(calls), max_concurrency or len(calls)) + SPARE_FILES)
    room = asyncio.Semaphore(max_concurrency or len(calls))
    watch = Watch(len(calls))
    started = time.perf_counter()
    tasks = []
    max_delay_s = 0.0
    reporter = asyncio.create_task(watch.report()) if show else None
    try:
        for call in calls:
            due = started + call.arrival_s
            wait_s = due - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            max_delay_s = max(max_delay_s, time.perf_counter() - due)
            tasks.append(asyncio.create_task(_send(client, call, room, watch)))
        outcomes = [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        if reporter is not None:
            reporter.cancel()
            sys.stderr.write(ERASED)
            sys.stderr.flush()
    return Run(outcomes, time.perf_counter() - started, max_delay_s)


async def _send(client: Client, call: EncodedCall, room: asyncio.Semaphore, watch: "Watch") -> Outcome:
    queued = time.perf_counter()
    async with room:
        reply = MeasuredAnswer(time.perf_counter())
        watch.running[reply] = None
        queue_s = reply.start_s - queued
        try:
            status = await client.exchange(call.request, reply.take)
            outcome = reply.outcome(status, call.prompt_len, queue_s)
        except OSError as error:
            outcome = Outcome(
                call.prompt_len, 0, reply.start_s, 0.0, 0.0, queue_s=queue_s, error=str(error) or repr(error)
            )
        del watch.running[reply]
        watch.end(outcome)
        return outcome


class Watch:
    """The live line: what has ended, what runs, and how fast tokens come."""

    def __init__(self, num_calls: int) -> None:
        self.running: dict[MeasuredAnswer, None] = {}
        self._num_calls = num_calls
        self._num_ended = self._num_failed = self._num_tokens = 0
        self._ttft_s = 0.0

    def end(self, outcome: Outcome) -> None:
        self._num_ended += 1
        self._num_failed += bool(outcome.error)
        self._num_tokens += outcome.output_len
        self._ttft_s += outcome.ttft_s

    async def report(self) -> None:
        before, then = 0, time.perf_counter()
        while True:
            await asyncio.sleep(REFRESH_S)
            tokens = self._num_tokens + sum(reply.num_pieces for reply in self.running)
            now = time.perf_counter()
            self._print(max(0.0, (tokens - before) / (now - then)))
            before, then = tokens, now

    def _print(self, tokens_per_s: float) -> None:
        ok = self._num_ended - self._num_failed
        ttft = f", mean TTFT {1000 * self._ttft_s / ok:.0f} ms" if ok else ""
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        sys.stderr.write(
            f"{ERASED}{self._num_ended}/{self._num_calls} requests, {len(self.running)} running{failed}, "
            f"{tokens_per_s:.0f} tok/s{ttft}"
        )
        sys.stderr.flush()
