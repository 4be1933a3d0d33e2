"""`penstock route` as its user runs it: real processes, real signals, real limits of open files."""

import contextlib
import resource
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.engine.http.telemetry import Telemetry
from penstock.router.backend import RouteError
from penstock.router.config import RouterConfig, check_together, resolve
from penstock.router.http.upstream import ConnectFailed, Upstream
from tests.support.programs import Command
from tests.support.raw_http import clients, connect, post, read_all, status
from tests.support.refusals import table
from tests.support.router_fleet import MockReplica, mock_replicas, running_router, until
from tests.support.router_stub import EVENT, STREAM, Hold, stub

NUM_CLIENTS = 150  # more than 256 descriptors suffice for


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready").status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def draining(num_tokens: int) -> Iterator[tuple[Command, socket.socket, socket.socket, MockReplica]]:
    """Yield a router that got a first signal while it streams an answer, its client, an idle client and the replica."""
    with (
        mock_replicas(1, inter_token_s=0.02) as (replica,),
        Command("route", "--backend", replica.url, "--port", "0") as router,
    ):
        url = router.url()
        until(lambda: is_ready(url))
        with clients(int(url.rpartition(":")[2]), stream_of(num_tokens), b"") as (busy, idle):
            assert b"data: " in busy.recv(65536)
            router.process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(url + "/ready").status_code == 503)
            yield router, busy, idle, replica


def stream_of(num_tokens: int) -> bytes:
    return post(b'{"prompt":"abc","max_tokens":%d,"stream":true,"ignore_eos":true}' % num_tokens)


def test_the_first_signal_drains_and_the_exit_code_is_0() -> None:
    with draining(40) as (router, busy, idle, _):
        idle.sendall(stream_of(40))
        assert status(idle.recv(4096)) == 503
        assert read_all(busy).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert router.process.wait(60) == 0


def test_the_second_signal_ends_it_at_once() -> None:
    with draining(9000) as (router, _, _, replica):
        router.process.send_signal(signal.SIGTERM)
        assert router.process.wait(60) == 0
        until(lambda: replica.metric("vllm:num_requests_running") == 0)


def test_a_router_without_replicas_tells_how_to_add_one() -> None:
    words = ("route", "--port", "0", "--admin-api-key", "sk-admin")
    with Command(*words) as router, mock_replicas(1) as (replica,):
        router.wait_for('no replica is there yet: add each with POST /replicas {"url": ')
        url, headers = router.url(), {"authorization": "Bearer sk-admin"}
        assert httpx.post(url + "/replicas", json={"url": replica.url}, headers=headers).status_code == 200
        until(lambda: is_ready(url))


def test_a_router_that_discovers_its_replicas_names_where() -> None:
    with Command("route", "--port", "0", "--discover", "dns:localhost:1") as router:
        router.wait_for(r"Discovering replicas from dns:localhost:1, routing by .*: http")


def test_keys_come_from_the_configuration_and_the_environment() -> None:
    resolved = resolve(RouterConfig(api_keys=("a",)), {"PENSTOCK_API_KEY": "b", "PENSTOCK_BACKEND_API_KEY": "c"})
    assert (resolved.api_keys, resolved.backend_api_key) == (("a", "b"), "c")


@pytest.mark.parametrize(("options", "environment", "words"), table(__file__, "configurations", Telemetry=Telemetry))
def test_a_configuration_that_cannot_work_is_refused(
    options: dict[str, Any], environment: dict[str, str], words: str
) -> None:
    with pytest.raises(RouteError) as refusal:
        check_together(resolve(RouterConfig(**options), environment))
    assert words in str(refusal.value)


@pytest.mark.parametrize("is_hard", [False, True])
def test_more_streams_than_descriptors_are_answered_and_blame_no_replica(is_hard: bool) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    stream = Hold(b"0\r\n\r\n", first=STREAM + EVENT)
    with stub(stream) as one, stub(stream) as other, contextlib.ExitStack() as stack:
        words = ("route", "--port", "0", "--backend", one.url, "--backend", other.url)
        url = stack.enter_context(Command(*words, max_files=(256, 256 if is_hard else hard))).url()
        until(lambda: httpx.get(url + "/ready").status_code == 200)
        socks = [stack.enter_context(connect(int(url.rpartition(":")[2]))) for _ in range(NUM_CLIENTS)]
        stack.callback(stream.go.set)
        for sock in socks:
            sock.settimeout(60)
            with contextlib.suppress(BrokenPipeError):  # refused before it has sent anything
                sock.sendall(post(b'{"prompt":"abc","stream":true}'))
        answers = Counter(status(sock.recv(4096)) for sock in socks)
        stream.go.set()
        for sock in socks:
            sock.close()
        until(lambda: httpx.get(url + "/replicas").status_code == 200)
        replicas = httpx.get(url + "/replicas").json()["replicas"]
    assert answers.keys() == ({200, 503} if is_hard else {200})
    assert answers[200] > 50
    assert [(each["state"], each["failures"]) for each in replicas] == [("up", 0), ("up", 0)]


def test_without_a_descriptor_left_the_answer_is_503_and_the_replica_up(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []

    async def connect() -> Upstream:
        errors.append(ConnectFailed("Too many open files", is_local=True))
        raise errors[-1]

    with stub() as backend, running_router(backend.url) as router:
        replica = router.fleet.replicas[backend.url]
        monkeypatch.setattr(replica.pool, "connect", connect)
        monkeypatch.setattr("penstock.router.http.upstream.IDLE_S", -1.0)
        until(lambda: router.call(replica.pool.sweep) or len(errors) > 2)  # a connection may have been in the making
        answers = [router.complete(model="m") for _ in range(6)]
        until(lambda: len(errors) > 12)  # the probes fail in the same way
        assert [answer.status_code for answer in answers] == [503] * 6
        assert "Too many open files" in answers[0].text and answers[0].headers["retry-after"] == "1"
        assert (replica.state, replica.num_failures) == ("up", 0)
        monkeypatch.undo()
        assert router.complete(model="m").status_code == 200
