"""Replicas that are found in a file, by names and by Kubernetes."""

import asyncio
import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.router import discovery
from penstock.router.backend import RouteError
from penstock.router.discovery import SourceError, ask_srv, check_source, states
from tests.support.router_fleet import running_router, until
from tests.support.router_stub import Stub, stub, whole


def take(source: str, count: int = 1, between: Any = lambda number: None) -> list[list[str]]:
    """Its first states; `between` is called behind each."""

    async def run() -> list[list[str]]:
        found: list[list[str]] = []
        async with asyncio.timeout(30), contextlib.aclosing(states(source)) as each:
            async for texts in each:
                found.append(texts)
                between(len(found))
                if len(found) == count:
                    return found
        raise AssertionError

    return asyncio.run(run())


def test_a_file_is_followed_and_replicas_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 0.02)
    monkeypatch.setattr(discovery, "ASK_S", 0.05)
    path = tmp_path / "fleet"
    with stub() as one, stub() as other:
        path.write_text(f"# the fleet\n{one.url}\n\n")
        with running_router(wait_for=1, discover=(f"file:{path}",)) as router:
            path.write_text(f"{one.url}\n{other.url},canary=0.5\n")
            until(lambda: router.states().count("up") == 2)
            path.write_text("rubbish, too long to be mistaken for what was there")
            path.rename(tmp_path / "gone")
            assert router.complete(model="m").status_code == 200
            path.write_text(f"{other.url}\n")
            until(lambda: list(router.fleet.replicas) == [other.url] and router.states() == ["up"])
            assert router.complete(model="m").status_code == 200


def test_a_file_is_not_read_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 0)
    path = tmp_path / "fleet"
    writes = {1: "http://a:1\n", 2: "", 3: "http://a:1\nhttp://b", 4: "http://a:1\nhttp://b:2\n"}  # before each look
    looks = 0

    def stat(path: Path) -> os.stat_result:
        nonlocal looks
        looks += 1
        if looks in writes:
            Path(path).write_text(writes[looks])
        return os.stat(path)

    async def run() -> None:
        monkeypatch.setattr(discovery, "os", SimpleNamespace(stat=stat, environ=os.environ))
        async with contextlib.aclosing(states(f"file:{path}")) as found:
            assert await anext(found) == ["http://a:1"]
            assert await anext(found) == ["http://a:1", "http://b:2"]

    asyncio.run(run())


def test_a_replica_that_others_have_added_too_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 0.02)
    path = tmp_path / "fleet"
    with stub() as one, stub() as other:
        path.write_text(one.url)
        with running_router(one.url, discover=(f"file:{path}",)) as router:
            path.write_text(other.url + "\n")
            until(lambda: router.states() == ["up", "up"])
            path.write_text("")
            until(lambda: list(router.fleet.replicas) == [one.url])
            assert router.states() == ["up"]


def test_a_source_that_says_something_else_for_once_is_followed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "ASK_S", 0.01)
    answers: list[Any] = [
        {},
        {"items": None, "metadata": {}},
        [],
        {"items": [{"endpoints": [{}], "ports": [{"port": 1}]}]},
    ]
    answers.append({"items": [slice_of("10.0.0.5")], "metadata": {"resourceVersion": "7"}})
    found: list[str] = []

    async def follow() -> None:
        following = discovery.Discovery(("k8s:prod/vllm:http",), lambda method, text: found.append(f"{method} {text}"))
        following.start()
        async with asyncio.timeout(30):
            while not found:
                await asyncio.sleep(0.01)
        await following.close()

    with stub() as server:
        monkeypatch.setenv("KUBERNETES_API", server.url)
        server.questions[SLICES] = lambda seen, sock: whole(json.dumps(answers.pop(0)).encode())
        asyncio.run(follow())
    assert found == ["POST http://10.0.0.5:8000"]


def test_a_name_stands_for_all_its_addresses() -> None:
    assert take("dns:127.0.0.1:8000,events=5557") == [["http://127.0.0.1:8000,events=5557"]]


class Nameserver(threading.Thread):
    """Answers one question with two SRV records, the second one's host written as a pointer, and a worse one."""

    def __init__(self, code: int = 0) -> None:
        super().__init__()
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.bind(("127.0.0.1", 0))
        self.code = code

    def run(self) -> None:
        question, address = self.sock.recvfrom(1000)
        host = b"\x03one\x04pods\x00"
        second = b"\x03two" + struct.pack(">H", 0xC000 + len(question) + 12 + 6 + 4)
        records = b""
        for priority, port, name in ((1, 8000, host), (1, 8001, second), (9, 8002, host)):
            data = struct.pack(">HHH", priority, 0, port) + name
            records += b"\xc0\x0c" + struct.pack(">HHIH", 33, 1, 5, len(data)) + data
        head = question[:2] + struct.pack(">HHHHH", 0x8180 + self.code, 1, 0 if self.code else 3, 0, 0)
        self.sock.sendto(head + question[12:] + records, address)
        self.sock.close()


def test_srv_records_are_read_and_a_failure_is_no_empty_fleet() -> None:
    for code, expected in ((0, [("one.pods", 8000), ("two.pods", 8001)]), (3, None)):
        server = Nameserver(code)
        server.start()
        address = server.sock.getsockname()
        if expected is None:
            with pytest.raises(SourceError, match="no such name"):
                asyncio.run(ask_srv("_http._tcp.svc", address))
        else:
            assert asyncio.run(ask_srv("_http._tcp.svc", address)) == expected
        server.join()


SLICES = b"/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dvllm"


def slice_of(*addresses: str, ready: bool = True) -> dict[str, Any]:
    return {
        "ports": [{"name": "metrics", "port": 9090}, {"name": "http", "port": 8000}],
        "endpoints": [{"addresses": [each], "conditions": {"ready": ready}} for each in addresses],
    }


@contextlib.contextmanager
def api_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Stub, list[Any]]]:
    """A stand-in for Kubernetes' API: the list, and a watch that says once that something has changed."""
    (tmp_path / "token").write_text("secret-token\n")
    slices: list[Any] = [slice_of("10.0.0.5")]
    with stub() as server:

        def listed(seen: Any, _sock: Any) -> bytes:
            if seen.header(b"authorization") != [b"Bearer secret-token"]:
                return whole(b"", b"401 Unauthorized")
            return whole(json.dumps({"metadata": {"resourceVersion": "7"}, "items": slices}).encode())

        def watched(_seen: Any, _sock: Any) -> bytes:
            slices.append(slice_of("10.0.0.6"))
            slices.append(slice_of("10.0.0.7", ready=False))
            lines = [b'{"type":"BOOKMARK"}\n', b'{"type":"ADDED","object":{}}\n']
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in lines)
            return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks

        server.questions[SLICES] = listed
        server.questions[SLICES + b"&watch=1&resourceVersion=7&timeoutSeconds=300"] = watched
        monkeypatch.setenv("KUBERNETES_API", server.url)
        monkeypatch.setenv("KUBERNETES_SERVICE_ACCOUNT", str(tmp_path))
        yield server, slices


def test_the_ready_endpoints_of_a_service_are_listed_and_watched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 0.02)
    with api_server(monkeypatch, tmp_path):
        found = take("k8s:prod/vllm:http,events=5557", 2)
    one, two = (f"http://10.0.0.{number}:8000,events=5557" for number in (5, 6))
    assert found == [[one], [one, two]]


def test_a_watch_that_ends_at_once_is_not_asked_for_again_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 60.0)
    with api_server(monkeypatch, tmp_path) as (_, slices), pytest.raises(TimeoutError):
        asyncio.run(ask_for(0.3))
    assert len(slices) <= 3  # it was asked for once


async def ask_for(seconds: float) -> None:
    async with asyncio.timeout(seconds), contextlib.aclosing(states("k8s:prod/vllm:http")) as each:
        async for _ in each:
            pass


def test_an_api_server_that_refuses_us_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with api_server(monkeypatch, tmp_path):
        (tmp_path / "token").write_text("stale")
        with pytest.raises(SourceError, match="answers 401"):
            take("k8s:prod/vllm")


@pytest.mark.parametrize("text", ["etcd:x", "dns:name", "k8s:service", "file:", "dns:h:1,colour=1", "srv:a b"])
def test_a_source_that_is_written_wrongly_is_refused(text: str) -> None:
    with pytest.raises(RouteError, match="discover"):
        check_source(text)
