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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.commands.bench.calls import headers_of
from penstock.engine.commands.prove.abilities import find_out
from penstock.engine.commands.prove.asker import Asker
from penstock.engine.commands.prove.faults import FAULTS, Scene
from penstock.engine.commands.prove.judge import FINE, KINDS_OF_FINDINGS
from penstock.engine.commands.prove.own_server import WORLDS, OwnServer
from penstock.engine.commands.prove.proof import Finding, Limits, Proof
from penstock.engine.commands.prove.repeat import write_scripts
from penstock.engine.config import ConfigError, chosen
from penstock.engine.options import Count, Seconds, add_options, flag, size_bytes

OUTCOMES = (*FINE[:4], "ended", "wrong", "numbers", "foreign", "error", "hang", "no end", "left out")
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    seed: int = flag("of questions, schedule and faults: the same seed sends the same (default: 0)", "N", default=0)
    requests: Count = flag("under load, beside those that are asked alone (default: 300)", "N", default=300)
    rate: Seconds = flag("requests per second on average, in bursts (default: 20)", "R", default=20.0)
    concurrency: Count = flag("requests at a time, at most (default: 16)", "N", default=16)
    duration: Seconds = flag("of the load, at most; what is left is left out (default: 120)", "S", default=120.0)
    max_bytes: Count = flag("sent and received, at most (default: 64MiB)", "SIZE", read=size_bytes, default=64 * 2**20)
    timeout: Seconds = flag("without a byte is a hang (default: 60)", "S", default=60.0)
    exact: bool = flag("the same bits: no tie and no difference in a log-probability is allowed", default=False)
    scripts: str | None = flag("a folder for scripts of curl that repeat the failures (default: none)", "DIR")
    header: tuple[str, ...] = flag("sent with every request; OPENAI_API_KEY is sent by itself", "KEY=VALUE", default=())
    world: tuple[str, ...] = flag(
        "start this ourselves: uniproc (the default without a URL), small-steps, drafts, ranks, tiers, router, split, all",
        "NAME", opens="servers of its own", names=("--world",), default=(),
    )  # fmt: skip
    fault: tuple[str, ...] = flag(
        f"and do this to it under load: {', '.join(FAULTS)}, all", "NAME", names=("--fault",), default=()
    )
    model: str | None = flag("hub name, folder or .gguf file (default: the default model)")
    serve_options: str = flag("further options of penstock serve, in one argument", "WORDS", default="")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", help="of a server with OpenAI's /v1/completions, or a router")
    add_options(parser, ProveOptions)


def run(args: argparse.Namespace) -> int:
    """0: no finding; 1: findings; every run prints a table and a line of JSON."""
    options = chosen(args, ProveOptions)
    if args.url and (options.world or options.fault or options.model or options.serve_options):
        raise ConfigError(f"url: {args.url} given; --world, --fault, --model and --serve-options start a server here")
    worlds = _named("world", options.world, WORLDS)
    faults = _named("fault", options.fault, FAULTS)
    if args.url:
        return bool(asyncio.run(prove(args.url, args.url, options))["findings"])
    if not worlds and not faults:
        worlds = ["uniproc"]
    has_failed = False
    for name in (*worlds, *faults):
        with _own(FAULTS[name].world if name in FAULTS else name, options) as server:
            has_failed |= bool(asyncio.run(_prove_own(server, name, options))["findings"])
    return has_failed


def _named(field: str, given: tuple[str, ...], known: dict[str, Any]) -> list[str]:
    for name in given:
        if name not in known and name != ALL:
            raise ConfigError(f"{field}: {name!r} given; {', '.join(known)} or {ALL} is expected")
    return list(known) if ALL in given else list(given)


@contextlib.contextmanager
def _own(world: str, options: ProveOptions) -> Iterator[OwnServer]:
    with tempfile.TemporaryDirectory(prefix="penstock-prove-") as folder:
        server = OwnServer(world, options.model, shlex.split(options.serve_options), Path(folder))
        try:
            yield server
        finally:
            server.close()


async def _prove_own(server: OwnServer, name: str, options: ProveOptions) -> dict[str, Any]:
    await server.start()
    return await prove(server.url, name, options, server if name in FAULTS else None)


async def prove(url: str, name: str, options: ProveOptions, server: OwnServer | None = None) -> dict[str, Any]:
    """The result, which has been printed. `server`: our own, to be struck by the fault of this name."""
    started_s = time.monotonic()
    try:
        asker = Asker(url, headers_of(argparse.Namespace(header=options.header)), options.timeout)
    except ValueError as error:
        raise ConfigError(f"url: {error}") from None
    limits = Limits(
        requests=options.requests,
        rate=options.rate,
        concurrency=options.concurrency,
        duration_s=options.duration,
        max_bytes=options.max_bytes,
    )
    proof = Proof(asker, await find_out(asker, options.seed), options.seed, limits, is_exact=options.exact)
    await proof.ask_alone()
    await proof.measure_error()
    if server is None:
        await proof.storm()
        await proof.ask_again()
    else:
        await _strike(proof, server, name)
    scripts = []
    if options.scripts and server is None:
        scripts = await write_scripts(proof, url, Path(options.scripts))
    asker.client.close()
    result = _result(proof, name, time.monotonic() - started_s)
    print(_table(proof, result))
    for path in scripts:
        print(f"  {path}")
    print(json.dumps(result), flush=True)
    return result


async def _strike(proof: Proof, server: OwnServer, name: str) -> None:
    """The storm with the fault in its middle, then all questions once more: of the same server, or of its next life."""
    fault, rng, seen = FAULTS[name], random.Random(proof.seed), []

    async def strike() -> None:
        seen.append(await fault.strike(Scene(server, proof.asker, rng)))

    await proof.storm(strike, may_fail=fault.fails_requests)
    if fault.ends:
        server.close()
        await server.start()
    proof.is_struck = False
    proof.findings += [Finding("fault", what) for what in seen if what]
    await proof.ask_again("after the fault")


def _result(proof: Proof, name: str, seconds: float) -> dict[str, Any]:
    total: dict[str, int] = {}
    for (by, _, outcome), count in proof.counts.items():
        if by == "how":
            total[outcome] = total.get(outcome, 0) + count
    kinds = [finding.kind for finding in proof.findings]
    return {
        "name": name,
        "model": proof.abilities.model,
        "seed": proof.seed,
        "seconds": round(seconds, 1),
        "bytes": proof.asker.num_bytes,
        "questions": len(proof.references),
        "measured_error_nats": proof.measured,
        "allowed_error_nats": proof.error,
        "answers": total,
        "findings": {kind: kinds.count(kind) for kind in (*KINDS_OF_FINDINGS, "fault") if kind in kinds},
        "skipped": proof.abilities.skipped,
    }


def _table(proof: Proof, result: dict[str, Any]) -> str:
    shown = [outcome for outcome in OUTCOMES if outcome in result["answers"]]
    lines = [f"{result['name']}: {result['model']}, seed {proof.seed}, {result['questions']} questions"]
    lines.append("".join([f"{'':18}", *(f"{outcome:>10}" for outcome in shown)]))
    for by in ("how", "what"):
        names = dict.fromkeys(name for each, name, _ in proof.counts if each == by)
        for name in names:
            counts = [proof.counts[by, name, outcome] for outcome in shown]
            lines.append("".join([f"{name:18}", *(f"{count or '·':>10}" for count in counts)]))
        lines.append("")
    lines += [f"skipped: {skipped}" for skipped in proof.abilities.skipped]
    error = "no log-probabilities: any difference is wrong"
    if "logprobs" in proof.abilities.known:
        error = f"log-probabilities are exact to {proof.measured:.2g} nats; {proof.error:.2g} are allowed"
    lines += [error, *(f"{finding.kind}: {finding.what}" for finding in proof.findings[:20])]
    lines.append(f"{len(proof.findings) or 'no'} findings in {result['seconds']} s")
    return "\n".join(lines)
