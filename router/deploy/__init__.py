"""`penstock deploy FILE`: the command line. It starts a deployment and stays, or changes, shows or ends one that runs.

Replicas and router are `penstock serve` and `penstock route` as an operator would start them, beneath actors of a Ray
cluster; what runs is decided in supervisor.py, what may stand in the file in file.py.
"""

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.executor.process_life import stop_signals
from penstock.router.deploy.file import Command, DeployError, Deployment, read
from penstock.router.deploy.parts import View

if TYPE_CHECKING:
    from penstock.router.deploy.cluster import Remote

POLL_S = 0.2
CLIENT_KEY = "PENSTOCK_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="a TOML file: model, replicas, router; see docs/deploy.md")
    add("--address", metavar="HOST:PORT", help="of the Ray cluster (default: RAY_ADDRESS, or the one that runs here)")
    add("--ray-allow-open-dashboard", action="store_true", help="also where its dashboard takes jobs from the network")
    what = parser.add_mutually_exclusive_group().add_argument
    what("--detach", action="store_true", help="return when it is ready, and let it run on in the cluster")
    what("--check", action="store_true", help="only read the file")
    what("--status", action="store_true", help="show what runs; the exit code is 0 if that is all there should be")
    what("--down", action="store_true", help="let the router finish what it has, then end everything")


def run(args: argparse.Namespace, serve: Command, route: Command) -> int:
    deployment = read(Path(args.file), serve, route)
    if args.check:
        print(f"{args.file}: {deployment.count} of {' '.join(deployment.template.words[1:])}")
        return 0
    try:
        from penstock.router.deploy.cluster import Remote, connect
    except ImportError as error:
        raise DeployError("deploy needs the package ray: pip install 'penstock[ray]'") from error
    may_start = not (args.detach or args.status or args.down)
    _say(connect(args.address, args.ray_allow_open_dashboard, may_start))
    remote = Remote.find(deployment.name)
    if remote is None and not (args.status or args.down):
        env = {name: value for name, value in os.environ.items() if name == CLIENT_KEY}
        return _stay(Remote.start(deployment, env, args.detach), args.detach)
    if remote is None:
        raise DeployError(f"{deployment.name}: no deployment of this name runs there")
    if args.status:
        return _show(remote.view())
    if args.down:
        remote.stop()
        return _bury(remote, _follow(remote, remote.updates(0)[0]))
    return _roll(remote, deployment)


def _stay(remote: "Remote", is_detached: bool) -> int:
    """Until it is down; detached, until it is up."""
    since, is_stopping = 0, False
    signals: list[None] = []  # to stop, that have come so far
    with stop_signals(lambda: signals.append(None)):
        while True:
            since, view = _hear(remote, since)
            if view.phase == "down":
                return _bury(remote, view)
            if len(signals) > 1:
                remote.end()
                _say("Ended at once")
                return 1
            if signals and not is_stopping:
                is_stopping = True
                _say("Stopping; once more to end it at once")
                remote.stop()
            if is_detached and view.phase == "serving":
                _say(f"{view.name} runs on in the cluster; --status shows it, --down ends it")
                return 0
            time.sleep(POLL_S)


def _roll(remote: "Remote", deployment: Deployment) -> int:
    """Change one that runs: 0 when it has become what the file says."""
    since = remote.updates(0)[0]
    _say(remote.roll(deployment))
    view = _follow(remote, since)
    if view.failure is not None:
        _say(f"Not rolled out: {view.failure}")
        return 1
    return 0


def _follow(remote: "Remote", since: int) -> View:
    """Print what happens until it serves or is down."""
    while True:
        since, view = _hear(remote, since)
        if view.phase in ("serving", "down"):
            return view
        time.sleep(POLL_S)


def _hear(remote: "Remote", since: int) -> tuple[int, View]:
    view = remote.view()  # first: what it says of its end is then among the updates
    since, lines = remote.updates(since)
    for line in lines:
        _say(line)
    return since, view


def _bury(remote: "Remote", view: View) -> int:
    remote.end()
    if view.failure is not None:
        raise DeployError(f"{view.name}: {view.failure}")
    return 0


def _show(view: View) -> int:
    print(f"{view.name}: {view.phase}, version {view.version}, {view.count} wanted")
    if view.failure is not None:
        print(f"the last roll-out failed: {view.failure}")
    for line in view.lines:
        sight = line.sight
        place = f"process {sight.pid} on {sight.node}" if sight.pid is not None else "no process"
        died = f"  died {line.failures} times in a row, of this last: {line.reason}" if line.failures else ""
        print(f"  {line.name:<24} {line.state:<9} {place:<28} {sight.url or '':<24}{died}".rstrip())
    return 0 if view.is_whole else 1


def _say(line: str) -> None:
    print(line, flush=True)
