"""The proof itself: every question alone and without reuse, then all of them under everything at once, and what is left
behind when all have gone.

It knows a server by its URL alone; who started it, and what is done to its processes meanwhile, is a callable's business
(engine/commands/prove/faults.py). It keeps to the rate, the time and the bytes that it was given.
"""

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.engine.commands.prove.abilities import Abilities, look
from penstock.engine.commands.prove.asker import Answered, Asker, Spoken
from penstock.engine.commands.prove.judge import FINE, MAX_ERROR, Verdict, allowed, farthest, judge
from penstock.engine.commands.prove.questions import Ask, questions, schedule
from penstock.engine.commands.top.figures import Look

RESIDENT, DESCRIPTORS = "process_resident_memory_bytes", "process_open_fds"
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
BLOCKS = ("penstock:kv_device_blocks", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
MAX_GROWTH = 128 * 2**20  # of the server's memory, over the second half of the requests
WINDOW = 24  # requests before a failing one that may have to do with it
SETTLE_S = 15.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    rate: float
    concurrency: int
    duration_s: float
    max_bytes: int


class Finding(msgspec.Struct):
    kind: str
    what: str
    ask: Ask | None = None  # the one that failed
    beside: list[Ask] = []  # those before and during it, by their times, itself among them


class Proof:
    def __init__(self, asker: Asker, abilities: Abilities, seed: int, limits: Limits, *, is_exact: bool) -> None:
        self.asker, self.abilities, self.limits, self.seed = asker, abilities, limits, seed
        self._rng = random.Random(seed)
        self.questions = questions(
            self._rng,
            abilities.material,
            abilities.known,
            max(8, min(64, limits.requests // 4)),
            abilities.block,
            abilities.longest,
            abilities.adapters,
        )
        self.references: dict[int, Spoken] = {}
        self.counts: Counter[tuple[str, str, str]] = Counter()  # ("how" or "what", name, outcome) → answers
        self.findings: list[Finding] = []
        self.measured, self.error = 0.0, MAX_ERROR  # nats; until it has been measured
        self._is_exact = is_exact
        self._name, self._num_fresh = secrets.token_hex(4), 0  # a server may remember the salts of the last run
        self.is_struck = False  # errors are to be expected; wrong answers and hangs are not

    # -- the parts -----------------------------------------------------------------------------------------

    async def ask_alone(self) -> None:
        """Every question once, each when the one before has ended."""
        for index in range(len(self.questions)):
            spoken = await self.reference(index, "alone")
            if spoken is not None:
                self.references[index] = spoken
        if not self.references:
            self._found("error", "no question was answered alone")

    async def measure_error(self) -> None:
        """The same beside each other, still without reuse: what differs is how exact the numbers are."""
        room = asyncio.Semaphore(self.limits.concurrency)
        some = list(self.references)[:32]

        async def again(index: int) -> Spoken | None:
            async with room:
                return await self.reference(index, "beside")

        apart = []
        for index, spoken in zip(some, await asyncio.gather(*map(again, some)), strict=True):
            if spoken is not None:
                apart.append(farthest(self.references[index], spoken))
        self.measured = max(apart, default=0.0)
        self.error = allowed(apart, self._is_exact)
        if self.measured > (0.0 if self._is_exact else MAX_ERROR):
            self._found("numbers", f"beside others, without reuse, a log-probability is {self.measured:.2g} nats off")

    async def reference(self, index: int, manner: str) -> Spoken | None:
        answered = await self.asker.ask(self.body(index, await self.fresh()))
        if not answered.is_done:
            answered.error = answered.error or "no end came"
        return self._note(Ask(0.0, index, manner, {}), answered, is_fresh=True)

    async def storm(
        self, strike: Callable[[], Coroutine[Any, Any, None]] | None = None, *, may_fail: bool = False
    ) -> None:
        """The schedule; `strike` comes in the middle of it."""
        plan = schedule(self._rng, self.questions, self.abilities.known, self.limits.requests, self.limits.rate)
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(self.limits.concurrency)
        started_s, half, halfway = loop.time(), len(plan) // 2, None
        history: list[Ask] = []
        tasks: set[asyncio.Task[None]] = set()

        async def one(ask: Ask) -> None:
            try:
                ask, first = ask._replace(at_s=loop.time() - started_s), max(0, len(history) - WINDOW)
                history.append(ask)
                answered = await self.send(ask)
                self._note(ask, answered, history[first : first + 2 * WINDOW])
            finally:
                room.release()

        for number, ask in enumerate(plan):
            late = loop.time() - started_s > self.limits.duration_s
            if late or self.asker.num_bytes > self.limits.max_bytes:
                self.counts["how", ask.manner, "left out"] += 1
                continue
            if number == half:
                halfway = await look(self.asker)
                if strike is not None:
                    self.is_struck = may_fail
                    tasks.add(asyncio.create_task(strike()))
            await asyncio.sleep(max(0.0, started_s + ask.at_s - loop.time()))
            await room.acquire()
            tasks.add(task := asyncio.create_task(one(ask)))
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        if strike is None:
            await self.settle(halfway)

    async def settle(self, halfway: Look | None) -> None:
        """All have gone: nothing is held, and the memory has stopped growing."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SETTLE_S
        while (now := await look(self.asker)) is not None:
            left = [f"{name} {now.total(name):g}" for name in RUNNING if now.total(name)]
            held = now.by_label(BLOCKS[0], "state").get("held", 0.0)
            held = held or sum(now.total(name) or 0.0 for name in BLOCKS[1:])
            left += [f"blocks held {held:g}"] if held else []
            if not left:
                break
            if loop.time() > until_s:
                self._found("blocks", f"{SETTLE_S:g} s after the last request: {', '.join(left)}")
                break
            await asyncio.sleep(0.1)
        if now is None or halfway is None:
            return
        for name, kind, most in (
            (RESIDENT, "memory", MAX_GROWTH),
            (DESCRIPTORS, "descriptors", self.limits.concurrency),
        ):
            before, after = halfway.total(name), now.total(name)
            if before is not None and after is not None and after - before > most:
                self._found(kind, f"{name} grew by {after - before:,.0f} over the second half of the requests")

    async def ask_again(self, manner: str = "after") -> None:
        """What was cached or damaged in the storm would show now: each question once more, with reuse."""
        for index in self.references:
            self._note(Ask(0.0, index, manner, {}), await self.asker.ask(self.body(index)))

    # -- one request ---------------------------------------------------------------------------------------

    def body(self, index: int, fields: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        body = {**self.abilities.fields(), **self.questions[index].body, **fields}
        return {name: value for name, value in body.items() if value is not None}

    async def fresh(self) -> dict[str, Any]:
        """Nothing that was computed before is used by a request with these fields."""
        self._num_fresh += 1
        fields = self.abilities.fresh(f"prove-{self._name}-{self._num_fresh}")
        if not fields and "reset" in self.abilities.known:
            await self.asker.fetch("POST", "/reset_prefix_cache", {})
        return fields

    async def send(self, ask: Ask) -> Answered:
        if ask.question < 0:
            status, _ = await self.asker.fetch("POST", "/reset_prefix_cache", {})
            return Answered(status)
        return await self.asker.ask(self.body(ask.question, ask.fields), ask.leaves_s, ask.reads)

    def verdict(self, ask: Ask, answered: Answered, is_fresh: bool = False) -> Verdict:
        if ask.question < 0:
            return Verdict("reset") if answered.status in (200, 409) else Verdict("error", f"status {answered.status}")
        reference = self.references.get(ask.question)
        if reference is None:  # it is asked for the first time, or never was answered
            reference = answered.choices.get(0, Spoken())
        return judge(reference, answered, ask.fields.get("n", 1), self.error, is_fresh)

    def _note(
        self, ask: Ask, answered: Answered, beside: Sequence[Ask] = (), *, is_fresh: bool = False
    ) -> Spoken | None:
        """Count what came of it; the answer where it has one and may be used as a reference."""
        verdict = self.verdict(ask, answered, is_fresh and "cached_tokens" in self.abilities.known)
        kind = self.questions[ask.question].kind if ask.question >= 0 else "reset"
        outcome = verdict.outcome
        if self.is_struck and outcome in ("error", "no end"):
            outcome = "ended"
        self.counts["how", ask.manner, outcome] += 1
        self.counts["what", kind, outcome] += 1
        if outcome not in (*FINE, "ended"):
            self.findings.append(Finding(outcome, f"{kind}, {ask.manner}: {verdict.what}", ask, [*beside]))
        return answered.choices.get(0) if answered.is_done else None

    def _found(self, kind: str, what: str) -> None:
        self.findings.append(Finding(kind, what))
