"""Runs the cases: small experiments of a few requests, most of them named after a public bug.

A case asks for references without reuse, then asks again in the way that showed the bug, and compares.
"""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .answers import AskResult, TextChoice
from .asker import PATH
from .judge import FINE, REFUSALS, compare, judge
from .proof import Finding, Proof
from .questions import RESET, WORDS, as_prompt

MAX_CASE_S = 55.0
MANNER = dict.fromkeys(("stream", "stream_options", "cache_salt", "cache_prompt"))  # does not change a question


class CaseRequest(NamedTuple):
    """A request of a case, for the script that repeats it."""

    path: str
    body: dict[str, Any]
    leaves_s: float | None = None


class Case(NamedTuple):
    """A named case. `run` asks and compares; `text` says what it sends and what a finding means. `needs`:
    abilities without which the server refuses it, or options (`--restart`) without which it is left out."""

    run: Callable[["CaseRun"], Coroutine[Any, Any, None]]
    text: str
    needs: Sequence[str] = ()
    is_long: bool = False  # it may take more than MAX_CASE_S


@dataclass
class CaseRun:
    """A case while it runs."""

    name: str
    proof: Proof
    sent: list[list[CaseRequest]] = field(default_factory=list)  # the requests of one list were sent at the same time
    num_findings: int = 0
    is_cache_empty: bool = False  # when it begins
    ending: str = ""  # why the case could not go on: what the server refuses, or what was left out

    def __post_init__(self) -> None:
        self.abilities, self.block = self.proof.abilities, self.proof.abilities.block
        self._reused: list[tuple[dict[str, Any], AskResult, str]] = []
        self._answered: set[str] = set()
        self.rng = random.Random(f"{self.proof.options.seed} {self.name}")

    # -- requests ------------------------------------------------------------------------------------------

    def draw(self, length: int, unlike: Any = None) -> list[Any]:
        """Draw a prompt that no other request shares a block with, and that does not begin with the token `unlike`."""
        while (drawn := self.rng.choices(self.abilities.material, k=length))[0] == unlike:
            pass
        return drawn

    def body(self, prompt: Sequence[Any], max_tokens: int = 12, **fields: Any) -> dict[str, Any]:
        """Return a completion request."""
        return self.abilities.completion({"prompt": as_prompt(prompt), "max_tokens": max_tokens, **fields})

    def chat(self, max_tokens: int = 24, **fields: Any) -> dict[str, Any]:
        """Return a chat request with a random text."""
        text = " ".join(self.rng.choices(WORDS, k=12))
        return {**self.abilities.chat(text, max_tokens), **fields}

    async def ask(self, body: dict[str, Any], path: str = PATH, leaves_s: float | None = None) -> AskResult:
        return (await self.ask_together([body], path, [leaves_s]))[0]

    async def ask_together(
        self, bodies: Sequence[dict[str, Any]], path: str = PATH, leave: Sequence[float | None] = (None,)
    ) -> list[AskResult]:
        """Send the requests at the same moment, as far as the allowed concurrency permits."""
        room = asyncio.Semaphore(self.proof.options.concurrency)
        requests = [CaseRequest(path, body, leave[index % len(leave)]) for index, body in enumerate(bodies)]
        self.sent.append(requests)

        async def one(sent: CaseRequest) -> AskResult:
            async with room:
                return await self.proof.asker.ask(sent.body, sent.leaves_s, path=sent.path)

        answers = await asyncio.gather(*map(one, requests))
        for sent, answer in zip(requests, answers, strict=True):
            question = f"{sent.path} {dict(sorted({**sent.body, **MANNER}.items()))}"
            if answer.is_done:
                self._answered.add(question)
            elif answer.status in REFUSALS and question not in self._answered:
                self.ending = f"refused: {sent.path}: {answer.error[:120]}"
            elif sent.leaves_s is None and not answer.has_left and answer.status != 429:
                outcome = judge(TextChoice(), answer, sent.body.get("n", 1), 1.0, is_fresh=False)
                kind = outcome.outcome if outcome.outcome in ("hang", "error") else "no end"
                self.find(kind, f"{sent.path}: {answer.error or outcome.difference}")
        return answers

    async def ask_fresh(self, body: dict[str, Any], path: str = PATH) -> AskResult:
        """Ask without reuse."""
        return await self.ask({**body, **await self.proof.fresh()}, path)

    # -- comparisons ---------------------------------------------------------------------------------------

    def find(self, kind: str, description: str) -> None:
        """Add a finding, with the requests so far."""
        self.num_findings += 1
        self.proof.findings.append(Finding(kind, f"{self.name}: {description}", case=self.name, sent=[*self.sent]))

    def expect(self, is_right: object, kind: str, description: str) -> None:
        if not is_right:
            self.find(kind, description)

    def expect_same(self, reference: AskResult, answer: AskResult, when: str) -> bool:
        """Compare every choice with the first of the reference; return whether all have the same tokens, without ties."""
        if not (reference.is_done and answer.is_done):  # reported already, or left out
            return False
        verdicts = [compare(reference.first, each, self.proof.error, True) for each in answer.choices.values()]
        for verdict in verdicts:
            if verdict.outcome not in FINE:
                self.find(verdict.outcome, f"{when}: {verdict.difference}")
                break
        return all(verdict.outcome in ("same", "numbers") for verdict in verdicts)

    async def ask_reused(self, prompt: Sequence[Any], shared: int, when: str, **fields: Any) -> AskResult:
        """Ask with reuse: `shared` tokens of the prompt can be cached. The reference is asked at the end of the case, so
        that it neither empties the cache nor evicts what the case is about."""
        body = self.body(prompt, **fields)
        answer = await self.ask(body)
        if self.is_cache_empty and {"cached_tokens", "cache_salt", "ids"} <= self.abilities.supported:
            cached = answer.num_cached or 0
            self.expect(cached <= shared, "foreign", f"{when}: {cached} tokens cached, {shared} can have been")
        self._reused.append((body, answer, when))
        return answer

    async def compare_reused(self) -> None:
        """Ask for the references of all answers with reuse, and compare."""
        references: dict[str, AskResult] = {}
        for body, answer, when in self._reused:
            key = str(body)
            references[key] = references.get(key) or await self.ask_fresh(body)
            self.expect_same(references[key], answer, when)


async def run_case(name: str, case: Case, proof: Proof) -> None:
    """Run one case; note in the proof how it ended."""
    proof.asker.limit(math.inf if case.is_long else MAX_CASE_S)
    missing = [need for need in case.needs if need not in proof.abilities.supported]
    if missing:
        why = "left out: it needs" if missing[0].startswith("--") else "refused: the server lacks"
        proof.cases[name] = f"{why} {', '.join(missing)}"
    elif proof.asker.is_over or proof.asker.num_bytes > proof.options.max_bytes:
        proof.cases[name] = "left out: no time or bytes left"
    else:
        run = CaseRun(name, proof)
        # An earlier run with the same seed may have sent the same prompts.
        run.is_cache_empty = RESET in proof.abilities.supported and await proof.asker.reset() == 200
        await case.run(run)
        await run.compare_reused()
        proof.cases[name] = f"{run.num_findings or 'no'} findings"
        if not run.num_findings and (run.ending or proof.asker.is_over):
            proof.cases[name] = run.ending or "left out: not done in time"
