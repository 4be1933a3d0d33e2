"""The server's life, as a process of its own: signals, drain, the engine's death, exit codes."""

import json
import signal
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import pytest
import uvloop
from starlette.applications import Starlette

from penstock.engine.http.auth import Keys
from penstock.engine.http.limits import Limits
from penstock.engine.http.listen import Listener
from penstock.engine.http.sockets import PortError, bind_sockets, listen
from penstock.engine.server.server_config import ServerConfig, resolve
from penstock.engine.text.template import ChatTemplate
from tests.support.programs import EndlessProgram
from tests.support.refusals import cases, hardest, hardest_rows, table
from tests.support.running_server import running, until

PROGRAM = """
import logging, signal, sys
import uvloop
from penstock.engine.http.sockets import bind_sockets
from penstock.engine.server.server_config import ServerConfig
from penstock.engine.server.lifetime import serve
from penstock.engine.server.service import Service
from tests.support.fake_engine import FakeEngine, byte_tokenizer, line_template

async def main():
    import asyncio
    engine = FakeEngine(delay_s=0.05)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.die, "the core was killed")
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, engine.hang)
    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, setattr, engine, "delay_s", 0.0)
    config = ServerConfig(port=0, drain_timeout_s=float(sys.argv[1]))
    sockets, announce = bind_sockets(config.host, config.port), lambda url: print(url, flush=True)
    return await serve(Service(engine, byte_tokenizer(), line_template(), config), sockets, announce)

logging.basicConfig(level=logging.INFO, format="%(message)s")
sys.exit(uvloop.run(main()))
"""

# A shell without job control starts background jobs so. Python then has no handler of its own for Ctrl-C.
BACKGROUND = ("bash", "-c", "trap '' INT; exec \"$@\"", "bash")


class Server(EndlessProgram):
    """The server as a process. `before`: the words of a command that runs it."""

    def __init__(self, drain_timeout_s: float = 60.0, before: Sequence[str] = ()) -> None:
        super().__init__("-c", PROGRAM, str(drain_timeout_s), before=before)
        self.url = self.line("http")
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(60)

    def log(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def end(self) -> None:
        self.http.close()
        super().end()


THREADS = ThreadPoolExecutor()


def begin_stream(server: Server) -> Future[list[str]]:
    """Request a stream of 900 tokens, and return its events, of which the first has come."""
    has_begun, events = threading.Event(), list[str]()

    def read() -> list[str]:
        body = {"prompt": "abc", "max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            try:
                for line in filter(None, answer.iter_lines()):
                    events.append(line.removeprefix("data: "))
                    has_begun.set()
            except httpx.RemoteProtocolError:
                events.append("cut off")
        return events

    stream = THREADS.submit(read)
    assert has_begun.wait(60)
    return stream


def text(events: list[str]) -> str:
    return "".join(json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]")


WAYS = [(before, number) for before in (BACKGROUND, ()) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(("before", "number"), hardest_rows(WAYS, WAYS[:1]))
def test_a_first_signal_finishes_requests_and_refuses_new_ones(number: signal.Signals, before: Sequence[str]) -> None:
    with Server(before=before) as server:
        stream = begin_stream(server)
        assert server.http.get("/ready").status_code == 200
        server.signal(number)
        until(lambda: server.http.get("/ready").status_code == 503)
        assert server.http.get("/health").status_code == 200
        refused = server.http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "the server is shutting down"
        assert refused.headers["connection"] == "close"
        server.signal(signal.SIGWINCH)  # the rest of the answer comes at once
        events = stream.result(60)
        assert text(events) == "abc" * 300
        assert events[-1] == "[DONE]"
        assert server.exit_code() == 0


def test_a_second_signal_ends_the_server_and_the_log_has_no_prompt_and_no_key() -> None:
    with Server() as server:
        body = {"prompt": "canary-prompt", "max_tokens": 3, "user": "canary-user"}
        headers = {"authorization": "Bearer canary-key", "x-request-id": "mine-7<>"}
        server.http.post("/v1/completions?canary-query", json=body, headers=headers)
        server.http.post("/v1/completions", content=b'{"prompt": "canary-prompt", "canary-field": 1}', headers=headers)
        server.http.get("/canary-path")
        stream = begin_stream(server)
        server.signal(signal.SIGTERM)
        until(lambda: server.http.get("/ready").status_code == 503)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert stream.result(60)[-1] == "cut off"
        log = server.log()
    assert "canary" not in log
    assert "/v1/completions 200" in log and "client_id=mine-7" in log
    assert "unmatched 404" in log


# Why the server ends answers, the time to drain, the signals, and the message of the error, with which the process fails.
ENDS = {why: ends for why, *ends in cases(__file__, "ends of answers", signal=signal)}


@pytest.mark.parametrize("why", hardest(ENDS, *({*ENDS} - {"the engine is dead"})))
def test_answers_that_the_server_ends_say_so_and_the_exit_code_does(why: str) -> None:
    drain_timeout_s, numbers, message = ENDS[why]
    with Server(drain_timeout_s) as server:
        stream = begin_stream(server)
        server.signal(numbers[0])
        for number in numbers[1:]:
            until(lambda: server.http.get("/ready").status_code == 503)
            server.signal(number)
        *_, last, done = map(str, stream.result(60))
        assert done == "[DONE]"
        if message is None:
            assert json.loads(last)["choices"][0]["finish_reason"] == "abort"
        else:
            error = json.loads(last)["error"]
            assert (error["code"], error["message"]) == (503, message)
        assert server.exit_code() == int(message is not None)


def test_a_template_that_loops_ends_with_a_400_while_the_server_answers_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # The test ends the rendering itself.
    monkeypatch.setattr("penstock.engine.text.render_time.RENDER_S", 60.0)
    loops = "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    template = ChatTemplate(loops + "{% endfor %}{% endif %}{{ messages[0].content }}")
    before = {*threading.enumerate()}
    with running(template=template) as server, ThreadPoolExecutor(3) as threads:

        def ask(content: str) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            return httpx.post(f"http://127.0.0.1:{server.port}/v1/chat/completions", json=body, timeout=300)

        looping = [threads.submit(ask, "loop") for _ in range(3)]
        until(lambda: template.is_slow)
        assert server.http.get("/health").status_code == 200
        assert not any(each.done() for each in looping)
        assert sum(thread.name.startswith("template") for thread in {*threading.enumerate()} - before) <= 2
        monkeypatch.setattr("penstock.engine.text.render_time.monotonic", count(1e9, 100.0).__next__)
        for each in looping:
            assert each.result(300).status_code == 400
            assert "messages: the model's chat template takes longer than" in each.result().json()["error"]["message"]
        monkeypatch.undo()
        assert ask("hello").status_code == 200


def test_the_second_of_two_servers_that_bind_a_port_at_once_names_it() -> None:
    """The kernel lets both bind it, as neither listens while its model is loaded."""
    (first,) = bind_sockets("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = bind_sockets("127.0.0.1", port)

    async def start() -> None:
        async with Listener(Starlette(), second, Limits(), Counter()):
            raise AssertionError("it listens")

    listen(first)
    with pytest.raises(PortError, match=f"port: cannot listen on 127.0.0.1:{port}: Address already in use"):
        uvloop.run(start())
    first.close()
    second[0].close()


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Let the name "both" resolve to two addresses, as "localhost" does where IPv4 and IPv6 are on."""
    addresses = ("127.0.0.1", "127.0.0.2")
    resolve_name = socket.getaddrinfo

    def resolve_both(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        hosts = addresses if host == "both" else (host,)
        return [entry for each in hosts for entry in resolve_name(each, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_both)
    return addresses


def test_a_server_listens_at_every_address_of_its_host(two_addresses: tuple[str, str]) -> None:
    with running(host="both") as server:
        for address in two_addresses:
            assert httpx.get(f"http://{address}:{server.port}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "both"])
def test_a_taken_port_is_named_at_a_second_address_too(two_addresses: tuple[str, str], host: str) -> None:
    address = two_addresses[host == "both"]
    (taken,) = bind_sockets(address, 0)
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(OSError, match=f"cannot listen on {address}:{port}: Address already in use"):
        bind_sockets(host, port)
    taken.close()


@pytest.mark.parametrize("settings, message", table(__file__, "settings", Limits=Limits))
def test_settings_that_cannot_run_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(ServerConfig(**settings), {})


def test_a_key_of_the_environment_is_accepted_too_and_an_empty_one_is_an_error() -> None:
    assert resolve(ServerConfig(api_keys=("a",)), {"PENSTOCK_API_KEY": "b"}).api_keys == ("a", "b")
    with pytest.raises(ValueError, match="PENSTOCK_API_KEY is set but empty"):
        resolve(ServerConfig(), {"PENSTOCK_API_KEY": ""})
    for key, message in (("", "not empty"), ("two words", "without spaces")):
        with pytest.raises(ValueError, match=message):
            Keys([key])
