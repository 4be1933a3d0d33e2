"""Ray Serve applications: replicas that each run `penstock serve`, and one `penstock route` in front of them.

    serve run penstock.router.ray_serve:app model=Qwen/Qwen3-0.6B replicas=2 port=8080
    serve deploy deploy/ray-serve.yaml

Ray Serve starts, checks, replaces and scales the processes. Requests do not pass through it: clients use the router's own
port. Each replica reports its address to an actor, from which the router's deployment writes the file that
`penstock route --discover file:…` follows.
"""

import asyncio
import logging
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self

import click
import msgspec
import ray
from msgspec import Meta
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.exceptions import RayServeException

from penstock.engine.options import converted

log = logging.getLogger("penstock.router")

REPORT_S = 15.0  # an address that was not reported for so long is forgotten
FOLLOW_S = 0.5  # between two looks of the router's deployment at the addresses
FOLLOW_TIMEOUT_S = 10.0  # of one look
LEAVE_S = 4.0  # from leaving the list until the router has read the file
DRAIN_S = 30.0  # both programs' default of --drain-timeout
TIMES: dict[str, Any] = {
    "health_check_period_s": 2.0,  # after three failures in a row, Ray Serve replaces a replica
    "graceful_shutdown_timeout_s": DRAIN_S + LEAVE_S + 20,  # then Ray Serve kills a replica that stops
}

Positive = Annotated[int, Meta(ge=1)]


class ArgumentError(click.ClickException, RayServeException):  # type: ignore[misc]
    """An argument cannot be used. Both `serve run` and `serve status` show the message alone, without a traceback."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    fleet: str = "penstock"  # the router of the same name serves the replicas

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Self:
        """Convert the arguments, in which numbers may be text, as on the command line. Raise ArgumentError, which names one."""
        for name in arguments:
            if name not in cls.__struct_fields__:
                raise ArgumentError(f"{name}: there is no such argument; there are {', '.join(cls.__struct_fields__)}")
        try:
            return converted(arguments, cls, strict=False)
        except ValueError as error:
            raise ArgumentError(str(error)) from None


class ReplicaSettings(Settings, frozen=True, kw_only=True):
    model: str | None = None  # as for `penstock serve`
    replicas: Positive = 1  # with max_replicas, the minimum
    max_replicas: Positive | None = None  # scale between `replicas` and this number, by running and waiting sequences
    sequences_per_replica: Positive = 64  # the target of scaling
    cpus: Annotated[float, Meta(ge=0)] = 1.0  # of a replica
    gpus: Annotated[int, Meta(ge=0)] = 0  # of a replica; with several, tensor parallelism
    serve_options: str = ""  # more options of `penstock serve`


class RouterSettings(Settings, frozen=True, kw_only=True):
    port: Annotated[int, Meta(ge=1, le=65535)] = 8080  # on the head node
    route_options: str = "--host 0.0.0.0"  # more options of `penstock route`


class Addresses:
    """An actor that knows the address of each replica."""

    def __init__(self) -> None:
        self._reported_s: dict[str, float] = {}  # address → when it was last reported
        self._known_from_s = time.monotonic() + REPORT_S * ray.get_runtime_context().was_current_actor_reconstructed

    def report(self, url: str) -> None:
        self._reported_s[url] = time.monotonic()

    def forget(self, url: str) -> None:
        self._reported_s.pop(url, None)

    def urls(self) -> list[str] | None:
        """Return the addresses of all replicas; None while this actor, after a restart, may not know all."""
        now_s = time.monotonic()
        if now_s < self._known_from_s:
            return None
        return sorted(url for url, at_s in self._reported_s.items() if now_s - at_s < REPORT_S)


class Program:
    """A child process that ends with this process; it serves when the constructor returns. Its output goes to this one's."""

    def __init__(self, words: list[str]) -> None:
        life = (sys.executable, "-P", "-m", "penstock.executor.process_life", str(os.getpid()))
        command = [*life, sys.executable, "-P", "-m", "penstock.cli", *words]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL
        )
        output, last = self._output(), ""
        for line in output:
            last = line.strip() or last
            if (found := re.match(r"(?:Ready after|Routing to|Discovering) .*(http://\S+:\d+)", line)) is not None:
                break
        else:
            raise RuntimeError(f"penstock ended with code {self._process.wait()}: {last}")
        self.url = found[1]
        threading.Thread(target=deque, args=(output, 0), daemon=True).start()  # copies what follows

    def _output(self) -> Iterator[str]:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                print(line, end="", flush=True)
                yield line

    def fetch(self, path: str) -> str:
        """Return the body of a GET; raise OSError if the program has ended, does not answer or answers with an error."""
        if (code := self._process.poll()) is not None:
            raise OSError(f"penstock has ended with code {code}")
        key = os.environ.get("PENSTOCK_API_KEY")
        request = urllib.request.Request(self.url + path, headers={"authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read(), "utf-8", "replace")

    async def stop(self) -> None:
        self._process.terminate()
        await asyncio.to_thread(self._process.wait)


class ReplicaDeployment:
    """One `penstock serve`. The constructor returns when it serves."""

    def __init__(self, words: list[str], fleet: str) -> None:
        self._addresses = _addresses(fleet)
        self._server = Program([*words, "--host", ray.util.get_node_ip_address(), "--port", "0"])

    async def check_health(self) -> None:
        await asyncio.to_thread(self._server.fetch, "/health")
        await self._addresses.report.remote(self._server.url)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        text = await asyncio.to_thread(self._server.fetch, "/metrics")
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)(?:{.*})? (\S+)$", text, re.MULTILINE)
        return {"sequences": sum(map(float, found))}

    async def __del__(self) -> None:
        """Leave the list of replicas, then let the running requests finish. Ray Serve calls this before it stops a replica."""
        await self._addresses.forget.remote(self._server.url)
        await asyncio.sleep(LEAVE_S)
        await self._server.stop()


class Router:
    """`penstock route` for all replicas."""

    def __init__(self, words: list[str], fleet: str, _replicas: Any) -> None:  # the handle makes them one application
        self._addresses = _addresses(fleet)
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-router-")
        file = Path(self._folder.name) / "replicas.txt"
        file.touch()
        try:
            self._router = Program([*words, "--discover", f"file:{file}"])
        except BaseException:
            self._folder.cleanup()
            raise
        self._is_over = threading.Event()
        self._follower = threading.Thread(target=_follow, args=(self._addresses, file, self._is_over), daemon=True)
        self._follower.start()

    async def check_health(self) -> None:
        if not self._follower.is_alive():
            raise RuntimeError("the thread that writes the list of replicas has ended")
        await asyncio.to_thread(self._router.fetch, "/health")

    async def __del__(self) -> None:
        """Stop the router, and remove its list of replicas once nobody reads or writes it any more."""
        self._is_over.set()
        await self._router.stop()
        await asyncio.to_thread(self._follower.join)
        self._folder.cleanup()


def _follow(addresses: Any, file: Path, is_over: threading.Event) -> None:
    """Keep the addresses of all replicas in the file until `is_over`. While they cannot be read or written, the file
    stays as it is."""
    listed: list[str] = []
    fresh = file.with_suffix(".new")
    while not is_over.wait(FOLLOW_S):
        try:
            urls = ray.get(addresses.urls.remote(), timeout=FOLLOW_TIMEOUT_S)
            if urls is not None and urls != listed:
                fresh.write_text("".join(f"{url}\n" for url in urls))
                fresh.replace(file)  # at once: the router never reads a part of the list
                listed = urls
        except (RayError, OSError) as error:
            log.warning("the list of replicas was not updated: %s", error)


def scale(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas for the running and waiting sequences: Ray Serve's autoscaling policy."""
    sequences = sum(context.aggregated_metrics.get("sequences", {}).values())
    return math.ceil(sequences / context.config.target_ongoing_requests), {}  # Ray Serve applies the bounds


def app(arguments: dict[str, Any]) -> serve.Application:
    """Build replicas and router as one application, which Ray Serve restarts as a whole when an argument changes."""
    of_router = {name: value for name, value in arguments.items() if name in RouterSettings.__struct_fields__}
    of_replicas = {name: value for name, value in arguments.items() if name == "fleet" or name not in of_router}
    return _router(of_router, replicas(of_replicas))


def router(arguments: dict[str, Any]) -> serve.Application:
    """Build the router as an application of its own."""
    return _router(arguments)


def replicas(arguments: dict[str, Any]) -> serve.Application:
    """Build the replicas as an application of their own: a change of its arguments replaces one replica after the other."""
    settings = ReplicaSettings.of(arguments)
    words = ["serve", *([settings.model] if settings.model else []), *_words("serve_options", settings.serve_options)]
    if settings.gpus > 1:
        words += ["--tensor-parallel-size", str(settings.gpus)]
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": settings.cpus, "num_gpus": settings.gpus}}
    if settings.max_replicas is None:
        options["num_replicas"] = settings.replicas
    elif settings.max_replicas < settings.replicas:
        raise ArgumentError(f"max_replicas: {settings.max_replicas} given; replicas is {settings.replicas}")
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=settings.replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.sequences_per_replica,
            policy=AutoscalingPolicy(policy_function="penstock.router.ray_serve:scale"),
        )
    return serve.deployment(name="Replica", **TIMES, **options)(ReplicaDeployment).bind(words, settings.fleet)


def _router(arguments: dict[str, Any], replicas: serve.Application | None = None) -> serve.Application:
    settings = RouterSettings.of(arguments)
    words = ["route", "--port", str(settings.port), *_words("route_options", settings.route_options)]
    on_head_node = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}  # so that its address is known
    return serve.deployment(**TIMES, ray_actor_options=on_head_node)(Router).bind(words, settings.fleet, replicas)


def _words(field: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:  # a quotation mark without its pair
        raise ArgumentError(f"{field}: {text!r} given; {error}") from None


def _addresses(fleet: str) -> Any:
    """Return the actor that knows the addresses of a fleet; the first call in a cluster starts it."""
    kind = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Addresses)
    options = {"name": f"addresses of {fleet}", "namespace": "penstock", "lifetime": "detached", "get_if_exists": True}
    return kind.options(**options).remote()
