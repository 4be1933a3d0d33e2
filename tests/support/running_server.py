"""The real server on a free port, in a thread with an event loop of its own, over a fake engine."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import pytest
import uvloop

from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.front.client import AsyncEngine
from penstock.engine.http.limits import Limits
from penstock.engine.http.listen import Listener
from penstock.engine.http.sockets import bind_sockets, url_of
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server.app import ServerApp
from penstock.engine.server.server_config import ServerConfig, resolve
from penstock.engine.server.service import Service
from penstock.engine.text.template import ChatTemplate
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import ExecutorConfig
from tests.support.fake_engine import FakeEngine, byte_tokenizer, line_template
from tests.support.raw_http import connect

MODEL = "tiny"
Served = TypeVar("Served")


class Running:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, engine: FakeEngine | AsyncEngine, app: ServerApp, listener: Listener
    ) -> None:
        self.loop = loop
        self.engine = cast(FakeEngine, engine)  # tests of another one know what they have
        self.app = app
        self.listener = listener
        self.url = url_of(listener.sockets[0])
        self.port = listener.sockets[0].getsockname()[1]
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the last request."""
        return self.engine.submitted[-1][1]

    @property
    def prompt(self) -> str:
        """The prompt of the last request, with its special tokens."""
        return self.engine.tokenizer.decode(self.engine.submitted[-1][0], skip_special_tokens=False)

    def openai(self, key: str = "unused") -> Any:  # the overloads of its methods take no plain dictionaries
        """Return a client of OpenAI's package, which the caller closes."""
        import openai  # takes most of a second, and few tests ask for it

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def call(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the server's thread."""
        return call_in(self.loop, work)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        return connect(self.port, receive_buffer)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, prompt: Any = "abc", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        messages = fields.pop("messages", [{"role": "user", "content": "hello"}])
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


@contextlib.contextmanager
def running(
    engine: FakeEngine | AsyncEngine | None = None,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
    **settings: Any,
) -> Iterator[Running]:
    tokenizer = tokenizer or byte_tokenizer()
    engine = engine or FakeEngine(tokenizer=tokenizer)
    limits = Limits(**{name: settings.pop(name) for name in Limits.__dataclass_fields__ if name in settings})
    config = resolve(ServerConfig(**{"port": 0, "served_model_names": (MODEL,), "limits": limits, **settings}), {})

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[Running]:
        if isinstance(engine, AsyncEngine):
            await engine.start()
        app = ServerApp(Service(cast(AsyncEngine, engine), tokenizer, template or line_template(), config))
        async with Listener(app, bind_sockets(config.host, 0), config.limits, app.service.metrics.refused) as listener:
            yield Running(asyncio.get_running_loop(), engine, app, listener)
        app.service.close()
        await engine.close()

    with in_thread(serve()) as started, contextlib.closing(started.http):
        yield started


def started(
    engine: Callable[[], FakeEngine | AsyncEngine] | None = None, scope: Any = "module", **settings: Any
) -> Any:
    """Return a fixture: a server with these settings, over an engine that is made for it."""

    @pytest.fixture(scope=scope)
    def server() -> Iterator[Running]:
        with running(engine and engine(), **settings) as made:
            yield made

    return server


@contextlib.contextmanager
def in_thread(server: contextlib.AbstractAsyncContextManager[Served]) -> Iterator[Served]:
    """Yield what `server` yields, which runs in a thread with an event loop of its own."""
    started: list[Served] = []
    loops: list[asyncio.AbstractEventLoop] = []
    is_up, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with server as served:
            started.append(served)
            loops.append(asyncio.get_running_loop())
            is_up.set()
            await stop.wait()

    def main() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=main)
    thread.start()
    assert is_up.wait(60)
    try:
        yield started[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(60)
        assert not thread.is_alive()


def call_in(loop: asyncio.AbstractEventLoop, work: Callable[[], Any]) -> Any:
    """Run `work` in the thread of an event loop."""

    async def run() -> Any:
        return work()

    return asyncio.run_coroutine_threadsafe(run(), loop).result(60)


def engine_of(folder: Path, tokenizer: Tokenizer | None = None, **executor: Any) -> AsyncEngine:
    """Return the engine of the model in `folder`, with a tokenizer of bytes unless another is given."""
    config = EngineConfig(executor=ExecutorConfig(model=str(folder), **executor), scheduler=SchedulerConfig())
    return AsyncEngine(config, tokenizer=tokenizer or byte_tokenizer())


def until(condition: Callable[[], bool], name: str = "the condition", timeout_s: float = 60.0) -> None:
    """Wait for another thread or process; the limit only ends a broken test."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"never came true: {name}"
        time.sleep(0.005)


async def comes_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():
            await asyncio.sleep(0.01)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a streamed answer, which ends as its API prescribes."""
    assert answer.status_code == 200, answer.text
    *blocks, end = answer.text.split("\n\n")
    assert end == ""
    has_names = blocks[0].startswith("event: ")
    if not has_names:
        assert blocks.pop() == "data: [DONE]"
    found: list[dict[str, Any]] = []
    for block in blocks:
        name, _, data = block.rpartition("data: ")
        found.append(json.loads(data))
        assert name == (f"event: {found[-1]['type']}\n" if has_names else "")
    return found
