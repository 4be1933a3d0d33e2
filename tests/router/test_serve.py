"""`penstock route` as its user runs it: real processes, real signals."""

import contextlib
import signal
import socket
from collections.abc import Iterator

import httpx
import pytest

from penstock.cli import main
from penstock.router.backend import RouteError, canonical_url
from penstock.router.config import RouterConfig, resolve
from tests.support.programs import Command
from tests.support.raw_http import clients, post, read_all, status
from tests.support.refusals import table
from tests.support.router_fleet import MockReplica, mock_replicas, until


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


@pytest.mark.parametrize(("arguments", "words"), table(__file__, "command lines"))
def test_a_command_line_that_cannot_run_is_refused_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["route", *arguments]) == 2
    assert words in capsys.readouterr().err


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


@pytest.mark.parametrize(("variable", "key", "words"), table(__file__, "keys"))
def test_an_invalid_key_in_the_environment_is_refused(variable: str, key: str, words: str) -> None:
    with pytest.raises(RouteError, match=words):
        resolve(RouterConfig(), {variable: key})


def test_a_replica_has_one_canonical_url() -> None:
    assert canonical_url("http://HOST") == canonical_url("http://host:80/") == "http://host:80"
    assert canonical_url("http://[::1]:8000") == "http://[::1]:8000"
