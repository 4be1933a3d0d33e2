"""The phases of a proof: all questions alone and without reuse, all of them under load, then a check for leaks.

It knows a server only by its URL; a fault is a callable (faults.py). It respects the given rate, duration and bytes.
"""

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .abilities import read_metrics
from .answers import AskResult, TextChoice
from .asker import Asker
from .journal import Say
from .judge import FINE, MAX_ERROR, REFUSALS, Verdict, allowed, farthest, judge
from .metrics import Metrics
from .options import ProveOptions
from .questions import RESET, Abilities, Ask, questions, schedule
from .tables import load_table

Injector = Callable[[], Coroutine[Any, Any, str]]  # returns what it found broken, or an empty text
MAX_GROWTH = 128 * 2**20  # bytes of the server's memory, over the second half of the requests
WINDOW = 24  # earlier requests that may have caused a failure
SETTLE_S = 15.0
_METRICS = load_table("metrics")
HELD: list[str] = _METRICS["held"]  # metrics that must be 0 after the last request
REACHED: dict[str, str] = _METRICS["reached"]  # the metric of each event


@dataclass
class Finding:
    """Something that the server did wrong."""

    kind: str
    description: str
    ask: Ask | None = None  # the request that failed
    beside: list[Ask] = field(default_factory=list)  # the requests before and during it, in order, itself included
    case: str = ""  # the name of the case that found it
    sent: list[Any] = field(default_factory=list)  # of a case: its requests until then


class Proof:
    """The state of one proof: the questions, their reference answers, counts and findings."""

    def __init__(self, asker: Asker, abilities: Abilities, options: ProveOptions, say: Say = print) -> None:
        self.asker, self.abilities, self.options, self.say = asker, abilities, options, say
        self._rng = random.Random(options.seed)
        # With --case, few questions are enough to measure the numerical error.
        num = 4 if options.cases else max(8, min(64, options.requests // 4))
        self.questions = questions(self._rng, abilities, num)
        self.references: dict[int, TextChoice] = {}
        self.num_compared = 0  # complete answers under load that were compared with a reference
        self.counts: Counter[tuple[str, str, str]] = Counter()  # ("how" or "what", name, outcome) → answers
        self.findings: list[Finding] = []
        self.reached: dict[str, float] = {}  # events during the load, from the metrics
        self.measured, self.error = 0.0, MAX_ERROR  # in nats; MAX_ERROR until the error has been measured
        # The name is unique to this run, because the server may remember the salts of an earlier run.
        self.name, self._num_fresh = secrets.token_hex(4), 0
        self.cases: dict[str, str] = {}  # how each case ended
        self.arms: dict[str, dict[str, Any]] = {}  # the figures of each arm, where the server was restarted
        self.is_incomplete = False  # the run was ended early
        self.expects_errors = False  # errors are expected now, wrong answers and hangs are not

    # -- the parts -----------------------------------------------------------------------------------------

    async def ask_alone(self) -> None:
        """Ask every question once, one after the other, as far as the time allows, and measure the numerical error."""
        self.asker.until(0.3)
        for index in range(len(self.questions)):
            choice = await self._ask_fresh(index, "alone")
            if choice is not None:
                self.references[index] = choice
                choice.penalty = self.questions[index].body.get("presence_penalty", 0.0)
        self.say(f"alone: {len(self.references)} of {len(self.questions)} questions answered")
        await self._measure_error()
        self.say(f"beside each other: log-probabilities are exact to {self.measured:.2g} nats")

    async def _measure_error(self) -> None:
        """Ask some questions beside each other, still without reuse, to measure the numerical error."""
        self.asker.until(0.35)
        room = asyncio.Semaphore(self.options.concurrency)
        some = list(self.references)[:32]

        async def again(index: int) -> TextChoice | None:
            async with room:
                return await self._ask_fresh(index, "beside")

        answers = zip(some, await asyncio.gather(*map(again, some)), strict=True)
        apart = [farthest(self.references[index], choice) for index, choice in answers if choice is not None]
        self.measured, self.error = max(apart, default=0.0), allowed(apart, self.options.exact)
        if self.measured > (0.0 if self.options.exact else MAX_ERROR):
            self._report("numbers", f"beside others, without reuse, a log-probability is {self.measured:.2g} nats off")

    async def run_load(self, inject: Injector | None = None, may_fail: bool = False) -> None:
        """Send the schedule. `inject` injects a fault in the middle and returns what it found broken, or an empty text.

        `may_fail`: requests after the fault may end with an error.
        """
        options, loop = self.options, asyncio.get_running_loop()
        plan = schedule(self._rng, self.questions, self.abilities.supported, options.requests, options.rate)
        room, started_s = asyncio.Semaphore(options.concurrency), loop.time()
        begun = halfway = await read_metrics(self.asker)
        self.asker.until(0.6)
        history: list[Ask] = []
        injected: asyncio.Task[str] | None = None

        async def one(ask: Ask) -> None:
            try:
                ask, first = ask._replace(at_s=loop.time() - started_s), max(0, len(history) - WINDOW)
                history.append(ask)
                answer = await self.send(ask)
                self._record(ask, answer, history[first : first + 2 * WINDOW])
            finally:
                room.release()

        async with asyncio.TaskGroup() as tasks:
            for number, ask in enumerate(plan):
                if number == len(plan) // 2:
                    halfway = await read_metrics(self.asker)
                    if inject is not None:
                        self.expects_errors = may_fail
                        injected = tasks.create_task(inject())
                await asyncio.sleep(max(0.0, min(started_s + ask.at_s, self.asker.until_s) - loop.time()))
                await room.acquire()
                if self._is_left_out(ask.manner):
                    room.release()
                else:
                    tasks.create_task(one(ask))
        if injected is not None and (broken := injected.result()):
            self._report("fault", broken)
        if not self.expects_errors:
            self._compare(begun, halfway, await self._settled())

    async def ask_again(self, manner: str = "after") -> None:
        """Ask each question once more, with reuse, to find blocks that were cached wrongly or damaged under load."""
        self.asker.until(0.7)
        for index in self.references:
            if not self._is_left_out(manner):
                self._record(Ask(0.0, index, manner, {}), await self.asker.ask(self.body(index)))

    async def _settled(self) -> Metrics:
        """Wait until no request runs or waits and no block is held; add a finding if that takes too long."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SETTLE_S
        while True:
            now = await read_metrics(self.asker)
            left = {name: now.total(name) for name in HELD}
            left["blocks held"] = now.total("penstock:kv_device_blocks", 'state="held"')
            if not any(left.values()):
                return now
            if loop.time() > until_s:
                held = ", ".join(f"{name} {value:g}" for name, value in left.items() if value)
                self._report("blocks", f"{SETTLE_S:g} s after the last request: {held}")
                return now
            await asyncio.sleep(0.1)

    def _compare(self, begun: Metrics, halfway: Metrics, now: Metrics) -> None:
        """Compare the metrics before and after the load: events that occurred, and resources that grew."""
        for event, name in REACHED.items():
            if (value := now.total(name)) is not None:
                self.reached[event] = value - (begun.total(name) or 0.0)
        limits = {"memory": ("process_resident_memory_bytes", MAX_GROWTH)}
        limits["descriptors"] = ("process_open_fds", self.options.concurrency)
        for kind, (name, most) in limits.items():
            before, after = halfway.total(name), now.total(name)
            if before is not None and after is not None and after - before > most:
                self._report(kind, f"{name} grew by {after - before:,.0f} over the second half of the requests")

    # -- one request ---------------------------------------------------------------------------------------

    def body(self, index: int, fields: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        return self.abilities.completion({**self.questions[index].body, **fields})

    async def fresh(self) -> dict[str, Any]:
        """Return fields that disable reuse for a request; empty the prefix cache if there are none."""
        self._num_fresh += 1
        if RESET in self.abilities.supported and "cache_salt" not in self.abilities.supported:
            await self.asker.reset()
        return self.abilities.fresh(f"prove-{self.name}-{self._num_fresh}")

    async def send(self, ask: Ask) -> AskResult:
        if ask.question < 0:
            return AskResult(await self.asker.reset())
        return await self.asker.ask(self.body(ask.question, ask.fields), ask.leaves_s, ask.reads)

    def verdict(self, ask: Ask, answer: AskResult, is_fresh: bool = False) -> Verdict:
        if ask.question < 0:  # a reset; 409: cached blocks are in use
            return Verdict("reset") if answer.status in (200, 409) else Verdict("error", f"status {answer.status}")
        # The first answer to a question is its own reference.
        reference = self.references.get(ask.question) or answer.choices.get(0, TextChoice())
        if answer.status in REFUSALS and ask.question not in self.references:
            return Verdict("refused", answer.error)
        is_fresh = is_fresh and "cached_tokens" in self.abilities.supported and bool(self.abilities.fresh(""))
        return judge(reference, answer, ask.fields.get("n", 1), self.error, is_fresh)

    async def _ask_fresh(self, index: int, manner: str) -> TextChoice | None:
        """Ask without reuse; return the first choice, or None if the answer is incomplete."""
        if self._is_left_out(manner):
            return None
        answer = await self.asker.ask(self.body(index, await self.fresh()))
        self._record(Ask(0.0, index, manner, {}), answer, is_fresh=True)
        return answer.choices.get(0) if answer.is_done else None

    def _is_left_out(self, manner: str) -> bool:
        is_left_out = self.asker.is_over or self.asker.num_bytes > self.options.max_bytes
        if is_left_out:
            self.counts["how", manner, "left out"] += 1
        return is_left_out

    def _record(self, ask: Ask, answer: AskResult, beside: Sequence[Ask] = (), *, is_fresh: bool = False) -> None:
        """Count the outcome, and add a finding if it is one."""
        verdict = self.verdict(ask, answer, is_fresh)
        kind = self.questions[ask.question].kind if ask.question >= 0 else RESET
        outcome = "ended" if self.expects_errors and verdict.outcome in ("error", "no end") else verdict.outcome
        self.counts["how", ask.manner, outcome] += 1
        self.counts["what", kind, outcome] += 1
        self.num_compared += bool(answer.is_done and beside and ask.question in self.references)
        if outcome not in FINE:
            self.findings.append(Finding(outcome, f"{kind}, {ask.manner}: {verdict.difference}", ask, [*beside]))

    def _report(self, kind: str, description: str) -> None:
        self.findings.append(Finding(kind, description))
