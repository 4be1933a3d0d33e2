"""`penstock route` as its user runs it: real processes, real signals."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from penstock.cli import main
from penstock.router.backend import canonical_url
from penstock.router.config import RouterConfig, resolve
from tests.support.fork_server import ROOT
from tests.support.raw_http import connect, post, read_all, status
from tests.support.refusals import table
from tests.support.router_fleet import mock_replicas, until

ADMIN = {"authorization": "Bearer sk-admin"}


@contextlib.contextmanager
def route(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    command = [sys.executable, "-m", "penstock.cli", "route", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT / "tests"
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found is not None, process.stderr.read()
        yield process, found[0]
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()
        process.stderr.close()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_the_first_signal_drains_and_the_exit_code_is_0() -> None:
    with (
        mock_replicas(1, inter_token_s=0.02) as (replica,),
        route("--backend", replica.url, "--port", "0") as (child, url),
    ):
        until(lambda: is_ready(url))
        port = int(url.rpartition(":")[2])
        body = b'{"prompt":"abc","max_tokens":40,"stream":true,"ignore_eos":true}'
        with connect(port) as sock, connect(port) as other:
            sock.sendall(post(body))
            assert b"data: " in sock.recv(65536)
            child.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(url + "/ready").status_code == 503)
            other.sendall(post(body))
            assert status(other.recv(4096)) == 503
            assert read_all(sock).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert child.wait(60) == 0


def test_the_second_signal_ends_it_at_once() -> None:
    with (
        mock_replicas(1, inter_token_s=0.02) as (replica,),
        route("--backend", replica.url, "--port", "0") as (child, url),
    ):
        until(lambda: is_ready(url))
        with connect(int(url.rpartition(":")[2])) as sock:
            sock.sendall(post(b'{"prompt":"abc","max_tokens":9000,"stream":true,"ignore_eos":true}'))
            assert b"data: " in sock.recv(65536)
            child.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(url + "/ready").status_code == 503)
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0
        until(lambda: replica.metric("vllm:num_requests_running") == 0)


@pytest.mark.parametrize(("arguments", "words"), table(__file__, "command lines"))
def test_what_cannot_run_is_said_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["route", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_router_without_replicas_says_how_to_add_one() -> None:
    with route("--port", "0", "--admin-api-key", "sk-admin") as (child, url), mock_replicas(1) as (replica,):
        assert child.stderr is not None
        assert 'no replica is there yet: add each with POST /replicas {"url": ' in child.stderr.readline()
        assert httpx.post(url + "/replicas", json={"url": replica.url}, headers=ADMIN).status_code == 200
        until(lambda: is_ready(url))


def test_keys_come_from_the_configuration_and_the_environment() -> None:
    resolved = resolve(RouterConfig(api_keys=("a",)), {"PENSTOCK_API_KEY": "b", "PENSTOCK_BACKEND_API_KEY": "c"})
    assert (resolved.api_keys, resolved.backend_api_key) == (("a", "b"), "c")


def test_a_replica_is_known_by_one_spelling() -> None:
    assert canonical_url("http://HOST") == canonical_url("http://host:80/") == "http://host:80"
    assert canonical_url("http://[::1]:8000") == "http://[::1]:8000"
