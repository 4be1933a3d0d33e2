"""`penstock bench startup`: measures the time from starting a server's process to the first token of its first answer.

It starts `penstock serve`, or another command, and polls it over HTTP until a completion is answered: a server that
listens or reports good health may not answer yet.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from penstock.engine.commands.bench.report import output_file, write_json
from penstock.engine.config import ConfigError
from penstock.engine.options import Count, Length, flag
from penstock.executor.process_life import stop_signals
from penstock.prove.http_client import key_header
from penstock.prove.journal import END_SIGNALS
from penstock.prove.own.server import PENSTOCK, free_port, stop

POLL_S, TIMEOUT_S = 0.02, 900.0
WITHOUT_PROXY = build_opener(ProxyHandler({}))


class StartupError(RuntimeError):
    """The server ended or did not answer; the message has its last lines of output."""


@dataclass(frozen=True, kw_only=True)
class StartupOptions:
    num_iters_warmup: Length = 1
    num_iters_warm: Count = 3
    command: str | None = None
    output_json: str | None = flag(read=output_file)


def time_starts(args: argparse.Namespace) -> int:
    """Time the start of a server up to its first token."""
    try:
        command = shlex.split(args.command or "") or [*PENSTOCK, "serve", "--port", "{port}"]
    except ValueError as error:
        raise ConfigError(f"command: {args.command} given; {error}") from None
    if not any("{port}" in word for word in command):
        raise ConfigError(f"command: {args.command} given; without {{port}} in it the server's port is not known")
    seconds = []
    for index in range(args.num_iters_warmup + args.num_iters_warm):
        try:
            with stop_signals(partial(signal.default_int_handler, signal.SIGINT, None), END_SIGNALS):
                seconds.append(first_token_s(command))
        except (OSError, StartupError) as error:
            print(f"penstock: {error}", file=sys.stderr)
            return 1
        print(f"start {index + 1}: first token after {seconds[-1]:.2f} s", file=sys.stderr)
    measured = seconds[args.num_iters_warmup :]
    print(f"Avg startup time: {fmean(measured):.2f} seconds")
    write_json(args.output_json, {"avg_warm_startup_time": fmean(measured), "warm_startup_times": measured})
    return 0


def first_token_s(
    command: Sequence[str], prompt: str = "Hello", timeout_s: float = TIMEOUT_S, env: Mapping[str, str] | None = None
) -> float:
    """Start the server, stop it after its first token and return the seconds in between.

    `{port}` in the command is replaced by a free port; `env` is the whole environment (None: that of this process).
    """
    port = str(free_port())
    words, url = [part.replace("{port}", port) for part in command], f"http://127.0.0.1:{port}/v1"
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        # A process group of its own, so that the processes that the server starts end with it.
        null = subprocess.DEVNULL
        server = subprocess.Popen(words, stdin=null, stdout=log, stderr=log, start_new_session=True, env=env)
        try:
            models = _poll(server, f"{url}/models", None, started + timeout_s)
            body = {"model": models["data"][0]["id"], "prompt": prompt, "max_tokens": 1, "temperature": 0}
            _poll(server, f"{url}/completions", body, started + timeout_s)
            return time.perf_counter() - started
        except StartupError as error:
            log.seek(0)
            last_lines = log.read().decode(errors="replace").splitlines()[-20:]
            raise StartupError("\n".join([str(error), *last_lines])) from None
        finally:
            stop(server)


def _poll(server: "subprocess.Popen[bytes]", url: str, body: Any, deadline: float) -> Any:
    """Poll until the status is 200. Responses of a server that is still loading (refused, 404, 503) are not final."""
    headers = {"Content-Type": "application/json", **key_header()}  # the server inherits the key too
    request = Request(url, json.dumps(body).encode() if body else None, headers)
    last = "nothing listens"
    while time.perf_counter() < deadline:
        if server.poll() is not None:
            raise StartupError(f"the server ended with code {server.returncode}")
        try:
            with WITHOUT_PROXY.open(request, timeout=deadline - time.perf_counter()) as answer:
                return json.load(answer)
        except HTTPError as error:
            last = f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
            if error.code in (400, 401, 422):
                break
        except OSError as error:
            last = str(error)
        time.sleep(POLL_S)
    raise StartupError(f"{url} was not answered: {last}")
