"""Fleets for tests: mock replicas as processes, and the router in a thread with an event loop of its own."""

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any, TextIO

import httpx

from penstock.engine.http.limits import Limits
from penstock.engine.http.sockets import bind_sockets
from penstock.router.config import RouterConfig, Timeouts, resolve
from penstock.router.http.heads import ClientRequest
from penstock.router.placement.placement import Placement, Prompt
from penstock.router.placement.prompts import PromptReader
from penstock.router.serve import RouterProcess
from tests.support.fake_engine import byte_tokenizer, line_template
from tests.support.fork_server import fork_server
from tests.support.router_stub import Answer, Stub, stub
from tests.support.running_server import call_in, in_thread
from tests.support.running_server import until as until  # for the tests of the router

ADMIN = "sk-admin"
QUICK = Timeouts(probe_interval_s=0.05, probe_timeout_s=2.0, connect_s=2.0)


class MockReplica:
    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.pid = pid
        self.url = f"http://127.0.0.1:{port}"

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics").text
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)), 0.0)


@contextlib.contextmanager
def mock_replicas(count: int = 1, **settings: Any) -> Iterator[list[MockReplica]]:
    """Start mock replicas. `settings` are those of mock_replica.py."""
    with contextlib.ExitStack() as stack:
        started = [_start(stack, json.dumps(settings, default=str)) for _ in range(count)]
        yield [MockReplica(int(output.readline()), pid) for pid, output in started]


def _start(stack: contextlib.ExitStack, settings: str) -> tuple[int, TextIO]:
    """Start a process that ends with the stack; return its id and its output."""
    reads, writes = os.pipe()
    output = stack.enter_context(os.fdopen(reads))
    child = fork_server("tests.support.mock_replica").start(settings, fds={1: writes})
    os.close(writes)
    stack.callback(child.wait, 20)
    stack.callback(child.kill)
    return child.pid, output


def predicted_tokens(placement: Placement, prompt: Prompt) -> dict[str, int]:
    """Return by replica how many tokens of the prompt the placement believes to be cached there, without a choice."""
    placement._match_prompt(prompt)
    return {name: int(placement.loads.cached[replica.load.row]) for name, replica in placement._replicas.items()}


class RunningRouter:
    def __init__(self, loop: asyncio.AbstractEventLoop, router: RouterProcess, port: int) -> None:
        self.loop = loop
        self.router = router
        self.app = router.app
        self.fleet = router.fleet
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def call(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the router's thread."""
        return call_in(self.loop, work)

    def complete(self, prompt: Any = "abc", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields})

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def predicted(self, ids: bytes) -> dict[str, int]:
        """Return `predicted_tokens` of a prompt of token ids (int32, little-endian)."""
        placement = self.fleet.group_of(None).placement
        return dict(self.call(lambda: predicted_tokens(placement, placement.prepare(ids))))

    def counts(self, name: str) -> Counter[str]:
        """Return what a counter has counted, by its one label."""
        return Counter({str(key[1]): count for key, count in self.app.metrics.counts.items() if key[0] == name})

    def states(self) -> list[str]:
        return [replica.state for replica in self.fleet.replicas.values()]

    def state(self, url: str) -> str:
        return self.fleet.replicas[url].state

    def change(self, method: str, **fields: str) -> httpx.Response:
        """Add a replica or take it out, with the key `ADMIN`."""
        return self.http.request(method, "/replicas", json=fields, headers={"authorization": f"Bearer {ADMIN}"})

    def refuse(self, url: str) -> None:
        """Mark a replica as down, as if its probe had been refused."""

        def refuse() -> None:
            replica = self.fleet.replicas[url]
            with self.fleet.observing(replica):
                replica.probe_refused("refused by the test", is_draining=False)

        self.call(refuse)

    def view(self, url: str) -> dict[str, Any]:
        """Return the entry of a replica in `GET /replicas`."""
        replicas = self.http.get("/replicas").json()["replicas"]
        return next(dict(each) for each in replicas if each["url"] == url)

    def num_blocks(self, url: str) -> int:
        """Return how many blocks the router takes to be cached on the device of a replica."""
        return int(self.view(url)["placement"]["cached_blocks"]["device"])

    def placement_metrics(self) -> dict[str, Any]:
        return dict(self.call(lambda: next(iter(self.fleet.groups.values())).placement.metrics()))


def client_request(path: str, body: bytes) -> ClientRequest:
    """Return a client's request as the router's handler gets it."""
    request = ClientRequest.of(b"POST", path.encode(), [], {}, "1.1", True)
    request.body = body
    return request


@contextlib.contextmanager
def running_router(
    *backends: str, wait_for: int | None = None, tokenizes: bool = False, limits: Limits | None = None, **settings: Any
) -> Iterator[RunningRouter]:
    """Run a router in front of `backends`, and yield it once `wait_for` of them (by default all) are up."""
    config = resolve(
        RouterConfig(**{"port": 0, "backends": backends, "timeouts": QUICK, "limits": limits or Limits(), **settings}),
        {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
    )
    texts = PromptReader(byte_tokenizer(), line_template()) if tokenizes else PromptReader()

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[RunningRouter]:
        router = RouterProcess(config, texts)
        sockets = bind_sockets(config.host, 0)
        await router.start(sockets)
        yield RunningRouter(asyncio.get_running_loop(), router, sockets[0].getsockname()[1])
        router.app.check()
        await router.close()

    with in_thread(serve()) as running, contextlib.closing(running.http):
        expected = len(backends) if wait_for is None else wait_for
        until(lambda: running.states().count("up") >= expected)
        yield running


@contextlib.contextmanager
def stub_fleet(*answers: Answer, **settings: Any) -> Iterator[tuple[RunningRouter, list[Stub]]]:
    """Run a router in front of a stub for each of these answers."""
    with contextlib.ExitStack() as stack:
        stubs = [stack.enter_context(stub(answer)) for answer in answers]
        yield stack.enter_context(running_router(*(each.url for each in stubs), **settings)), stubs


@contextlib.contextmanager
def mock_fleet(
    count: int, probe_timeout_s: float = QUICK.probe_timeout_s, **pace: Any
) -> Iterator[tuple[RunningRouter, list[MockReplica]]]:
    """Run a router in front of so many mock replicas."""
    timeouts = replace(QUICK, probe_timeout_s=probe_timeout_s)
    with mock_replicas(count, **pace) as mocks, contextlib.ExitStack() as stack:
        yield stack.enter_context(running_router(*(each.url for each in mocks), timeouts=timeouts)), mocks
