"""The case that restarts the server: the same questions cold, warm and after the restart.

Each question hides a fact (a needle) in a long prompt and asks for it, so that its answer depends on KV entries from far
before. The prompts begin with words of this run, so that nothing can be cached when they are asked cold.
"""

import asyncio
import math
import subprocess
from collections.abc import Sequence
from statistics import median
from typing import Any

from .answers import AskResult
from .cases import CaseRun
from .options import ProveError
from .questions import WORDS

MOST_NEEDLES, MOST_WORDS, SLOW_WORDS = 12, 400, 100
RESTART_S, POLL_S = 900.0, 0.1  # until the server answers again
SEEN_S, SHORTER = 0.2, 0.8  # a warm answer begins so much earlier than a cold one of at least SEEN_S


async def lmcache_4492(run: CaseRun) -> None:
    most = max(4, min(MOST_NEEDLES, run.proof.options.requests // 32))
    bodies, needles = zip(*[_question(run, number) for number in range(most)], strict=True)
    # In pairs, so that a small cache still has the prompt.
    pairs = [(await run.ask(body), await run.ask(body)) for body in bodies]
    cold, warm = zip(*pairs, strict=True)
    arms = {"cold": cold, "warm": warm}
    if not all(answer.is_done for answer in warm):  # no time, or refused
        return
    try:
        await _restart_server(run)
    except ProveError as error:
        run.ending = f"left out: {error}"
    else:
        arms["restarted"] = tuple(await run.ask_together(bodies))
    for arm, answers in arms.items():
        _report(run, arm, answers, needles)
        for one, other in zip(cold, answers, strict=True):
            run.expect_same(one, other, arm)
    _expect_reuse(run)


def _question(run: CaseRun, number: int) -> tuple[dict[str, Any], str]:
    """Return a request and the number that its answer should contain. Whether it does says how good the model is, not
    whether the server is right."""
    rng, most = run.rng, SLOW_WORDS if run.abilities.most_tokens else MOST_WORDS
    words = rng.choices(WORDS, k=max(16, min(most, ((run.abilities.context or 2048) - 64) // 4)))
    name, hidden = " ".join(rng.sample(WORDS, 2)), str(rng.randrange(1000, 10_000))
    at = rng.randrange(len(words))
    begin, end = " ".join(words[:at]), " ".join(words[at:])
    text = f"{run.proof.name} {number}: {begin} The number of the {name} is {hidden}. {end} The number of the {name} is"
    return run.body([text], 12, stream=True, stream_options={"include_usage": True}), hidden


def _report(run: CaseRun, arm: str, answers: Sequence[AskResult], needles: Sequence[str]) -> None:
    """Note the figures of an arm in the proof."""
    ended = [answer for answer in answers if answer.is_done]
    cached = [answer.num_cached for answer in ended if answer.num_cached is not None]
    figures = run.proof.arms[arm] = {
        "answers": len(ended),
        "needles_found": sum(needle in answer.first.text for needle, answer in zip(needles, answers, strict=True)),
        "cached_tokens": sum(cached) if cached else None,
        "first_token_s": round(median(answer.first_s for answer in answers), 4),
    }
    run.proof.say(f"{arm}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))


def _expect_reuse(run: CaseRun) -> None:
    """Expect that warm prompts are reused, and those from before the restart if an option says so. Without counts of
    cached tokens only the time to the first token can tell."""
    proof, cold_s = run.proof, run.proof.arms["cold"]["first_token_s"]
    for arm in ("warm", "restarted") if proof.options.expect_restored else ("warm",):
        figures = proof.arms.get(arm)
        if figures and "cached_tokens" in run.abilities.supported:
            run.expect(figures["cached_tokens"], "reuse", f"{arm}: no token is reused")
        elif figures and cold_s >= SEEN_S:
            by_time = f"{figures['first_token_s']} s to the first token, cold {cold_s} s; cached tokens are not counted"
            run.expect(figures["first_token_s"] < SHORTER * cold_s, "reuse", f"{arm}: by time alone, {by_time}")


async def _restart_server(run: CaseRun) -> None:
    """Run the commands and wait until the server answers again. This takes nothing of the run's duration."""
    loop, options, asker = asyncio.get_running_loop(), run.proof.options, run.proof.asker
    begun_s = loop.time()
    run.proof.say(f"restarting the server: {options.restart or f'{options.stop}; {options.start}'}")
    asker.client.close()
    asker.until_s = math.inf
    try:
        async with asyncio.timeout(RESTART_S):
            for command in filter(None, (options.restart, options.stop, options.start)):
                await _command(run, command)
            while not await _answers(run):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        run.find("hang", f"the server does not answer {RESTART_S:g} s after the restart")
    finally:
        asker.pause(loop.time() - begun_s)


async def _command(run: CaseRun, command: str) -> None:
    """Run a shell command to its end; raise ProveError if it fails. The one that starts the server may be the server
    itself, and is left running."""
    options, null = run.proof.options, subprocess.DEVNULL
    process = subprocess.Popen(["sh", "-c", command], stdin=null, stdout=null, stderr=null, start_new_session=True)
    while process.poll() is None and not (command == options.start and await _answers(run)):
        await asyncio.sleep(POLL_S)
    if process.returncode:
        raise ProveError(f"`{command}` ended with code {process.returncode}")
    while command == options.stop and (await run.proof.asker.fetch("GET", "/v1/models"))[0] == 200:
        await asyncio.sleep(POLL_S)


async def _answers(run: CaseRun) -> bool:
    """Return whether the server answers a completion; it may listen before its model is loaded."""
    is_listening = (await run.proof.asker.fetch("GET", "/v1/models"))[0] == 200
    return is_listening and (await run.proof.asker.ask(run.body(["On the river"], 1))).is_done
