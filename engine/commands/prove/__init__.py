"""`penstock prove URL`: whether a server gives the answers under load that it gives alone, and what it leaves behind.

Without a URL it starts servers of its own with caches that are far too small, and can hurt them as well.
"""

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.engine.commands.bench.calls import headers_of
from penstock.engine.commands.bench.startup import END_SIGNALS
from penstock.engine.commands.prove.abilities import find_out
from penstock.engine.commands.prove.asker import Asker
from penstock.engine.commands.prove.faults import FAULTS, Scene
from penstock.engine.commands.prove.judge import OUTCOMES
from penstock.engine.commands.prove.own_server import WORLDS, OwnServer
from penstock.engine.commands.prove.proof import Proof, ProveOptions
from penstock.engine.commands.prove.repeat import write_scripts
from penstock.engine.config import ConfigError, chosen
from penstock.engine.options import add_options
from penstock.executor.process_life import stop_signals

ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", help="of a server with OpenAI's /v1/completions, or of a router")
    add_options(parser, ProveOptions)


def run(args: argparse.Namespace) -> int:
    """0: no finding; 1: findings; every run prints a table and a line of JSON."""
    options = chosen(args, ProveOptions)
    own = _named("world", options.worlds, WORLDS) + _named("fault", options.faults, FAULTS)
    if not args.url:
        try:
            return max([int(bool(asyncio.run(prove_own(name, options))["findings"])) for name in own or ["uniproc"]])
        except asyncio.CancelledError:
            return 130
    if own or options.model or options.serve_options:
        raise ConfigError(f"url: {args.url} given; --world, --fault, --model and --serve-options start a server here")
    return int(bool(asyncio.run(prove(args.url, args.url, options))["findings"]))


def _named(field: str, given: Iterable[str], known: dict[str, Any]) -> list[str]:
    for name in given:
        if name not in known and name != ALL:
            raise ConfigError(f"{field}: {name!r} given; {', '.join(known)} or {ALL} is expected")
    return list(known) if ALL in given else list(given)


async def prove_own(name: str, options: ProveOptions) -> dict[str, Any]:
    """A world, or a fault in the one that it belongs to."""
    world = FAULTS[name].world if name in FAULTS else name
    with tempfile.TemporaryDirectory(prefix="penstock-prove-") as folder:
        server = OwnServer(world, options.model, shlex.split(options.serve_options), Path(folder))
        task = asyncio.current_task()
        assert task is not None
        with contextlib.closing(server), stop_signals(task.cancel, END_SIGNALS):  # nothing of ours outlives us
            await server.start(headers_of(options.header))
            return await prove(server.url, name, options, server if name in FAULTS else None)


async def prove(url: str, name: str, options: ProveOptions, server: OwnServer | None = None) -> dict[str, Any]:
    """The result, which has been printed. `server`: our own, to be struck by the fault of this name."""
    started_s = time.monotonic()
    try:
        asker = Asker(url, headers_of(options.header), options.timeout, options.duration)
    except ValueError as error:
        raise ConfigError(f"url: {error}") from None
    proof, scripts = Proof(asker, await find_out(asker, options.seed), options), []
    await proof.ask_alone()
    await proof.measure_error()
    if server is not None:
        await _strike(proof, server, name)
    else:
        await proof.storm()
        await proof.ask_again()
        if options.scripts:
            scripts = await write_scripts(proof, url, Path(options.scripts))
    asker.client.close()
    result = _result(proof, name, time.monotonic() - started_s)
    print(_table(proof, result), *scripts, json.dumps(result), sep="\n", flush=True)
    return result


async def _strike(proof: Proof, server: OwnServer, name: str) -> None:
    """The storm with the fault in its middle, then all questions once more: of the same server, or of its next life."""
    fault, scene = FAULTS[name], Scene(server, proof.asker, random.Random(proof.options.seed))
    await proof.storm(lambda: fault.strike(scene), fault.fails_requests)
    if fault.ends:
        server.close()
        await server.start(proof.asker.headers)
    proof.is_struck = False
    await proof.ask_again("after it")


def _result(proof: Proof, name: str, seconds: float) -> dict[str, Any]:
    answers: Counter[str] = Counter()
    for (by, _, outcome), count in proof.counts.items():
        answers[outcome] += count if by == "how" else 0
    return {
        "name": name,
        "model": proof.abilities.model,
        "seed": proof.options.seed,
        "seconds": round(seconds, 1),
        "bytes": proof.asker.num_bytes,
        "questions": len(proof.references),
        "measured_error_nats": proof.measured,
        "allowed_error_nats": proof.error,
        "answers": answers,
        "reached": proof.reached,
        "findings": Counter(finding.kind for finding in proof.findings),
        "skipped": proof.abilities.skipped,
    }


def _table(proof: Proof, result: dict[str, Any]) -> str:
    shown = [outcome for outcome in OUTCOMES if outcome in result["answers"]]
    lines = [f"{result['name']}: {result['model']}, seed {result['seed']}, {result['questions']} questions"]
    lines.append("".join([f"{'':18}", *(f"{outcome:>10}" for outcome in shown)]))
    for by in ("how", "what"):
        for name in dict.fromkeys(name for each, name, _ in proof.counts if each == by):
            counts = [proof.counts[by, name, outcome] for outcome in shown]
            lines.append("".join([f"{name:18}", *(f"{count or '·':>10}" for count in counts)]))
        lines.append("")
    lines += [f"skipped: {skipped}" for skipped in proof.abilities.skipped]
    if proof.reached:
        lines.append("reached: " + ", ".join(f"{value:,.0f} {what}" for what, value in proof.reached.items()))
    error = "no log-probabilities: any difference is wrong"
    if "logprobs" in proof.abilities.known:
        error = f"log-probabilities are exact to {proof.measured:.2g} nats; {proof.error:.2g} are allowed"
    lines += [error, *(f"{finding.kind}: {finding.what}" for finding in proof.findings[:20])]
    lines.append(f"{len(proof.findings) or 'no'} findings in {result['seconds']} s")
    return "\n".join(lines)
