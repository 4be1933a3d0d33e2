"""The gateways that `penstock route` is compared with: how each is started before the same replicas.

A gateway is named PROGRAM:POLICY (`vllm-router:cache_aware`, `sglang-router:round_robin`, `nginx`). Their programs lie
in the `bin` of an environment with the wheels vllm-router (0.1.17 was used) and sglang-router (0.3.2); nginx is given
by its path. Each runs with its own defaults but for its log, and is ready when it has answered one request.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pairs import HERE, Server, answers, environment, free_port, serving

ROUTE = (sys.executable, "-P", "-m", "penstock.cli", "route", "--port", "{port}", "--max-requests", "4096")
NGINX = (HERE / "nginx.txt").read_text()  # its configuration


class Worker(NamedTuple):
    """A replica, and the address at which it publishes its events."""

    url: str
    events: int | None = None
    replay: int | None = None

    @property
    def backend(self) -> str:
        return self.url + ("" if self.events is None else f",events={self.events},replay={self.replay}")


class Events(NamedTuple):
    """The data that a gateway needs to follow the replicas' block events."""

    model: str
    tokenizer: str
    block_size: int


def command_of(
    name: str, port: int, workers: Sequence[Worker], programs: Mapping[str, str], folder: str, events: Events | None
) -> list[str]:
    program, _, policy = name.partition(":")
    urls = [worker.url for worker in workers]
    if program == "nginx":
        servers = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
        Path(folder, "conf").write_text(NGINX.format(folder=folder, port=port, servers=servers))
        return [programs[program], "-p", folder, "-e", f"{folder}/log", "-c", f"{folder}/conf"]
    if program == "penstock":
        tokenizer = [] if events is None else ["--tokenizer", events.tokenizer]
        return [*ROUTE, *tokenizer] + [
            word for each in workers for word in ("--backend", each.backend if events else each.url)
        ]
    launch = ["launch"] if program == "sglang-router" else []
    common = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    level = "error" if program == "vllm-router" else "warn"
    found = [str(Path(programs["bin"], program)), *launch, *common, "--policy", policy, "--log-level", level]
    if policy == "kv_aware" and events is not None:
        for each in workers:
            for flag, at in (("--kv-event-source", each.events), ("--kv-event-replay-source", each.replay)):
                found += [flag, f"{each.url}=tcp://127.0.0.1:{at}"]
        found += ["--kv-event-block-size", str(events.block_size), "--kv-event-model", events.model]
    return [*found, "--worker-urls", *urls]


@contextlib.contextmanager
def gateway(
    name: str, workers: Sequence[Worker], programs: Mapping[str, str], events: Events | None = None, model: str = "m"
) -> Iterator[Server]:
    """Run a gateway before the replicas."""
    port, question = free_port(), {"model": model, "prompt": "ready?", "max_tokens": 1}
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(name, port, workers, programs, folder, events)
        with serving(
            name, command, lambda url: answers(f"{url}/v1/completions", question), env=environment(), port=port
        ) as server:
            yield server
