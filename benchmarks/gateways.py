"""The gateways that `penstock route` is compared with: how each is started before the same replicas.

A gateway is named PROGRAM:POLICY (`vllm-router:cache_aware`, `sglang-router:round_robin`, `nginx`). Their programs lie
in the `bin` of an environment with the wheels vllm-router (0.1.17 was used) and sglang-router (0.3.2); nginx is given
by its path. Each runs with its own defaults but for its log, and is ready when it has answered one request.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pairs import ROOT, child

from penstock.engine.commands.prove.own.server import free_port

NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/log crit; events {{ worker_connections 4096; }}
http {{ access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; keepalive_requests 1000000;
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream replicas {{ {servers} keepalive 64; keepalive_requests 1000000; }}
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://replicas; proxy_http_version 1.1;
    proxy_set_header Connection ""; proxy_buffering off; }} }} }}
"""


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
        route = [sys.executable, "-m", "penstock.cli", "route", "--port", str(port), "--max-requests", "4096"]
        route += ["--policy", policy] if policy else []
        route += [] if events is None else ["--tokenizer", events.tokenizer]
        return route + [word for each in workers for word in ("--backend", each.backend if events else each.url)]
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
) -> Iterator[tuple[int, int]]:
    """Start a gateway; yield its port and its process id."""
    port, path = free_port(), os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    body = json.dumps({"model": model, "prompt": "ready?", "max_tokens": 1}).encode()
    question = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(name, port, workers, programs, folder, events)
        env = {**os.environ, "PYTHONPATH": path}
        with child(name, command, lambda: _answers(question), env=env) as process:
            yield port, process.pid


def until(condition: Callable[[], bool], what: Callable[[], str], timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise SystemExit(f"this did not come to be in {timeout_s:.0f} s: {what()}")
        time.sleep(0.05)


def _answers(question: urllib.request.Request) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(question, timeout=30) as answer:
        return bool(answer.status == 200)
    return False
