"""The parts of a proof: every question alone and without reuse, then all of them under load, then what the server still holds.

It knows a server only by its URL; a fault is a callable (faults.py). It keeps to the given rate, duration and bytes.
"""

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from .abilities import Abilities, look
from .asker import Answered, Asker, Spoken
from .judge import FINE, MAX_ERROR, Verdict, allowed, farthest, judge
from .metrics import Look
from .options import ProveOptions
from .questions import RESET, Ask, questions, schedule

MAX_GROWTH = 128 * 2**20  # bytes of the server's memory, over the second half of the requests
WINDOW = 24  # earlier requests that may have caused a failure
SETTLE_S = 15.0
HELD = (  # metrics that are 0 after the last request
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("llamacpp:requests_processing", "llamacpp:requests_deferred"),
)
REACHED = {
    "preemptions": "vllm:num_preemptions_total",
    "cached tokens": "vllm:prefix_cache_hits_total",
    "kept tokens": "llamacpp:prompt_tokens_cached_total",
    "restored blocks": "penstock:kv_tier_loaded_blocks_total",
    "accepted drafts": "penstock:spec_accepted_tokens_total",
}


class Finding(msgspec.Struct):
    """Something that the server did wrong."""

    kind: str
    what: str
    ask: Ask | None = None  # the request that failed
    beside: list[Ask] = []  # the requests before and during it, in order, itself included


class Proof:
    """The state of one proof: the questions, their reference answers, counts and findings."""

    def __init__(self, asker: Asker, abilities: Abilities, options: ProveOptions) -> None:
        self.asker, self.abilities, self.options = asker, abilities, options
        self._rng = random.Random(options.seed)
        num = max(8, min(64, options.requests // 4))
        self.questions = questions(self._rng, abilities, num)
        self.references: dict[int, Spoken] = {}
        self.num_compared = 0  # whole answers that were compared with the answer to the same question alone
        self.counts: Counter[tuple[str, str, str]] = Counter()  # ("how" or "what", name, outcome) → answers
        self.findings: list[Finding] = []
        self.reached: dict[str, float] = {}  # events during the storm, from the metrics
        self.measured, self.error = 0.0, MAX_ERROR  # nats, until the error has been measured
        self._name, self._num_fresh = (
            secrets.token_hex(4),
            0,
        )  # unique to this run: a server may remember salts of the last one
        self.is_struck = False  # errors are expected now, wrong answers and hangs are not

    # -- the parts -----------------------------------------------------------------------------------------

    async def ask_alone(self) -> None:
        """Ask every question once, one after the other, as far as the time allows."""
        self.asker.until(0.4)
        for index in range(len(self.questions)):
            spoken = await self._ask_fresh(index, "alone")
            if spoken is not None:
                self.references[index] = spoken

    async def measure_error(self) -> None:
        """Ask some questions beside each other, still without reuse, to measure the numerical error."""
        self.asker.until(0.5)
        room = asyncio.Semaphore(self.options.concurrency)
        some = list(self.references)[:32]

        async def again(index: int) -> Spoken | None:
            async with room:
                return await self._ask_fresh(index, "beside")

        answers = zip(some, await asyncio.gather(*map(again, some)), strict=True)
        apart = [farthest(self.references[index], spoken) for index, spoken in answers if spoken is not None]
        self.measured, self.error = max(apart, default=0.0), allowed(apart, self.options.exact)
        if self.measured > (0.0 if self.options.exact else MAX_ERROR):
            self._found("numbers", f"beside others, without reuse, a log-probability is {self.measured:.2g} nats off")

    async def storm(self, strike: Callable[[], Coroutine[Any, Any, str]] | None = None, may_fail: bool = False) -> None:
        """Send the schedule. `strike` injects a fault in its middle and returns what it found broken, or an empty text.

        `may_fail`: requests after the fault may end with an error.
        """
        options, loop = self.options, asyncio.get_running_loop()
        plan = schedule(self._rng, self.questions, self.abilities.known, options.requests, options.rate)
        room, started_s, begun = asyncio.Semaphore(options.concurrency), loop.time(), await look(self.asker)
        self.asker.until(0.8)
        halfway: Look | None = None
        history: list[Ask] = []
        struck: asyncio.Task[str] | None = None

        async def one(ask: Ask) -> None:
            try:
                ask, first = ask._replace(at_s=loop.time() - started_s), max(0, len(history) - WINDOW)
                history.append(ask)
                answered = await self.send(ask)
                self._note(ask, answered, history[first : first + 2 * WINDOW])
            finally:
                room.release()

        async with asyncio.TaskGroup() as tasks:
            for number, ask in enumerate(plan):
                if number == len(plan) // 2:
                    halfway = await look(self.asker)
                    if strike is not None:
                        self.is_struck = may_fail
                        struck = tasks.create_task(strike())
                await asyncio.sleep(max(0.0, min(started_s + ask.at_s, self.asker.until_s) - loop.time()))
                await room.acquire()
                if self._left_out(ask.manner):
                    room.release()
                else:
                    tasks.create_task(one(ask))
        if struck is not None and (broken := struck.result()):
            self._found("fault", broken)
        if not self.is_struck:
            self._compare(begun, halfway, await self._settled())

    async def ask_again(self, manner: str = "after") -> None:
        """Ask each question once more, with reuse: blocks that the storm cached or damaged would show now."""
        self.asker.until(0.9)
        for index in self.references:
            if not self._left_out(manner):
                self._note(Ask(0.0, index, manner, {}), await self.asker.ask(self.body(index)))

    async def _settled(self) -> Look | None:
        """Wait until nothing is running, waiting or held; note a finding where that does not happen."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SETTLE_S
        while (now := await look(self.asker)) is not None:
            left = {name: now.total(name) for name in HELD}
            left["blocks held"] = now.by_label("penstock:kv_device_blocks", "state").get("held")
            if not any(left.values()):
                break
            if loop.time() > until_s:
                what = ", ".join(f"{name} {value:g}" for name, value in left.items() if value)
                self._found("blocks", f"{SETTLE_S:g} s after the last request: {what}")
                break
            await asyncio.sleep(0.1)
        return now

    def _compare(self, begun: Look | None, halfway: Look | None, now: Look | None) -> None:
        """Compare the metrics before and after the storm: events that were reached, and resources that grew."""
        if begun is None or halfway is None or now is None:
            return
        for what, name in REACHED.items():
            if (value := now.total(name)) is not None:
                self.reached[what] = value - (begun.total(name) or 0.0)
        limits = {"memory": ("process_resident_memory_bytes", MAX_GROWTH)}
        limits["descriptors"] = ("process_open_fds", self.options.concurrency)
        for kind, (name, most) in limits.items():
            before, after = halfway.total(name), now.total(name)
            if before is not None and after is not None and after - before > most:
                self._found(kind, f"{name} grew by {after - before:,.0f} over the second half of the requests")

    # -- one request ---------------------------------------------------------------------------------------

    def body(self, index: int, fields: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        body = {**self.abilities.fields(), **self.questions[index].body, **fields}
        return {name: value for name, value in body.items() if value is not None}

    async def fresh(self) -> dict[str, Any]:
        """Return fields with which a request reuses nothing; empty the cache where no field does that."""
        self._num_fresh += 1
        if RESET in self.abilities.known and "cache_salt" not in self.abilities.known:
            await self.asker.reset()
        return self.abilities.fresh(f"prove-{self._name}-{self._num_fresh}")

    async def send(self, ask: Ask) -> Answered:
        if ask.question < 0:
            return Answered(await self.asker.reset())
        return await self.asker.ask(self.body(ask.question, ask.fields), ask.leaves_s, ask.reads)

    def verdict(self, ask: Ask, answered: Answered, is_fresh: bool = False) -> Verdict:
        if ask.question < 0:  # a reset; 409: cached blocks are in use
            return Verdict("reset") if answered.status in (200, 409) else Verdict("error", f"status {answered.status}")
        # The first answer to a question is its own reference.
        reference = self.references.get(ask.question) or answered.choices.get(0, Spoken())
        is_fresh = is_fresh and "cached_tokens" in self.abilities.known and bool(self.abilities.fresh(""))
        return judge(reference, answered, ask.fields.get("n", 1), self.error, is_fresh)

    async def _ask_fresh(self, index: int, manner: str) -> Spoken | None:
        """Ask without reuse; return the first choice, or None where the answer is not complete."""
        if self._left_out(manner):
            return None
        answered = await self.asker.ask(self.body(index, await self.fresh()))
        self._note(Ask(0.0, index, manner, {}), answered, is_fresh=True)
        return answered.choices.get(0) if answered.is_done else None

    def _left_out(self, manner: str) -> bool:
        is_left_out = self.asker.is_over or self.asker.num_bytes > self.options.max_bytes
        if is_left_out:
            self.counts["how", manner, "left out"] += 1
        return is_left_out

    def _note(self, ask: Ask, answered: Answered, beside: Sequence[Ask] = (), *, is_fresh: bool = False) -> None:
        """Count the outcome, and note a finding where it is one."""
        verdict = self.verdict(ask, answered, is_fresh)
        kind = self.questions[ask.question].kind if ask.question >= 0 else RESET
        outcome = "ended" if self.is_struck and verdict.outcome in ("error", "no end") else verdict.outcome
        self.counts["how", ask.manner, outcome] += 1
        self.counts["what", kind, outcome] += 1
        self.num_compared += answered.is_done and not is_fresh and ask.question in self.references
        if outcome not in FINE:
            self.findings.append(Finding(outcome, f"{kind}, {ask.manner}: {verdict.what}", ask, [*beside]))

    def _found(self, kind: str, what: str) -> None:
        self.findings.append(Finding(kind, what))
