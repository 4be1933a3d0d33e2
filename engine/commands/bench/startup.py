"""`penstock bench startup`: measures the time from starting a server's process to the first token of its first answer.

It starts `penstock serve`, or another server with `--command`, and polls it over HTTP until a completion is answered: a
server that listens or reports good health may not answer yet.
"""

import argparse
import http.client
import json
import os
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
from typing import Any, NamedTuple

from penstock.engine.commands.bench.benchmark import Benchmark
from penstock.engine.commands.bench.report import output_file, percentiles, write_json
from penstock.engine.commands.prove.http_client import key_header
from penstock.engine.commands.prove.own.server import END_SIGNALS, PENSTOCK, free_port, stop
from penstock.engine.config import ConfigError, EngineOptions
from penstock.engine.options import Count, Length, Seconds, flag, given_options, options_of
from penstock.executor.process_life import stop_signals

POLL_S = 0.02


class Startup(NamedTuple):
    """Times of one start, in seconds since the process was started."""

    api_s: float  # /v1/models is answered
    first_token_s: float  # a completion is answered


class StartupError(RuntimeError):
    """The server ended or did not answer; the message has its last lines of output."""


@dataclass(frozen=True, kw_only=True)
class StartupOptions:
    model: str | None = flag("hub name, folder or .gguf file (default: the default model)")
    num_iters_warmup: Length = flag("starts before the measured ones (default: 1)", "N", default=1)
    num_iters_warm: Count = flag("measured starts (default: 3)", "N", default=3)
    prompt: str = flag("prompt of the first request (default: %(default)s)", default="Hello")
    timeout: Seconds = flag("most seconds for one start (default: %(default)g)", "S", default=900.0)
    command: str | None = flag(
        "start this instead of penstock serve; {port} is replaced by the port to listen on", "CMD"
    )
    output_json: str | None = flag("write the result as JSON", "FILE", read=output_file)


def run(args: argparse.Namespace) -> int:
    try:
        command = shlex.split(args.command or "") or serve_command(args.model, given_options(args, EngineOptions))
    except ValueError as error:
        raise ConfigError(f"command: {args.command} given; {error}") from None
    starts = []
    for index in range(args.num_iters_warmup + args.num_iters_warm):
        try:
            with stop_signals(partial(signal.default_int_handler, signal.SIGINT, None), END_SIGNALS):
                start = measure(command, prompt=args.prompt, timeout_s=args.timeout)
        except (OSError, StartupError) as error:
            print(f"penstock: {error}", file=sys.stderr)
            return 1
        kind = "warm-up" if index < args.num_iters_warmup else "measured"
        print(f"{kind}: API after {start.api_s:.2f} s, first token after {start.first_token_s:.2f} s", file=sys.stderr)
        if index >= args.num_iters_warmup:
            starts.append(start)
    result = {
        **_summary("startup", [start.first_token_s for start in starts]),
        **_summary("api", [start.api_s for start in starts]),
    }
    print(f"Avg startup time: {result['avg_warm_startup_time']:.2f} seconds")
    print(f"Avg time to the API: {result['avg_warm_api_time']:.2f} seconds")
    write_json(args.output_json, result)
    return 0


def serve_command(model: str | None, options: Mapping[str, Any]) -> list[str]:
    """Return the command that runs `penstock serve` under this interpreter with these engine options."""
    command = [*PENSTOCK, "serve", *([model] if model else []), "--port", "{port}"]
    words = {option.name: option.words[0] for option in options_of(EngineOptions)}
    for name, value in options.items():
        if isinstance(value, bool):
            command.append(words[name] if value else words[name].replace("--", "--no-", 1))
            continue
        for each in value if isinstance(value, (list, tuple)) else [value]:
            command += [words[name], json.dumps(each) if isinstance(each, dict) else str(each)]
    return command


def measure(
    command: Sequence[str], *, prompt: str = "Hello", timeout_s: float = 900, env: Mapping[str, str] | None = None
) -> Startup:
    """Start the server, wait for its first token and stop it. `{port}` in the command is replaced by a free port."""
    port = free_port()
    argv = [part.replace("{port}", str(port)) for part in command]
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        # A process group of its own, so that the processes that the server starts end with it.
        server = subprocess.Popen(
            argv,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        try:
            models = _poll(server, port, "GET", "/v1/models", None, started + timeout_s)
            api_s = time.perf_counter() - started
            body = {"model": models["data"][0]["id"], "prompt": prompt, "max_tokens": 1, "temperature": 0}
            _poll(server, port, "POST", "/v1/completions", body, started + timeout_s)
            return Startup(api_s, time.perf_counter() - started)
        except StartupError as error:
            log.seek(0)
            last_lines = log.read().decode(errors="replace").splitlines()[-20:]
            raise StartupError("\n".join([str(error), *last_lines])) from None
        finally:
            stop(server)


def _poll(server: "subprocess.Popen[bytes]", port: int, method: str, path: str, body: Any, deadline: float) -> Any:
    """Poll until the status is 200. Responses of a server that is still loading (refused, 404, 503) are not final."""
    last = "nothing listens"
    while time.perf_counter() < deadline:
        if server.poll() is not None:
            raise StartupError(f"the server ended with code {server.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=deadline - time.perf_counter())
        try:
            headers = {"Content-Type": "application/json", **key_header()}  # the server inherits the key too
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status == 200:
                return json.loads(text)
            last = f"HTTP {answer.status}: {text[:300].decode(errors='replace')}"
            if answer.status in (400, 401, 422):
                break
        except OSError as error:
            last = str(error)
        finally:
            connection.close()
        time.sleep(POLL_S)
    raise StartupError(f"{path} was not answered: {last}")


def _summary(name: str, values: list[float]) -> dict[str, Any]:
    return {
        f"avg_warm_{name}_time": fmean(values),
        f"warm_{name}_times": values,
        f"warm_{name}_percentiles": percentiles(values),
    }


STARTUP = Benchmark("startup", "Time the start of a server up to its first token.", run, options=(StartupOptions,))
