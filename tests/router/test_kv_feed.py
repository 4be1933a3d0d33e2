"""The stream of cache events, followed over the wire: from a replica's first block to its restart."""

import random
import signal
import socket
import threading
from typing import Any

import pytest

from penstock.engine.http.kv_stream import Changes, Frame, Hello, pack, snapshot
from penstock.router.fleet import kv_feed
from penstock.router.http.upstream import Dechunker
from tests.support.router_fleet import RunningRouter, mock_replicas, running_router, until
from tests.support.router_stub import Seen, stub


def view(router: RunningRouter, url: str) -> dict[str, Any]:
    replicas = router.http.get("/replicas").json()["replicas"]
    known: dict[str, Any] = next(each for each in replicas if each["url"] == url)["placement"]
    return known


def test_what_a_replica_caches_is_known_and_predicted_exactly() -> None:
    with mock_replicas(1) as (replica,), running_router(replica.url, tokenizes=True) as router:
        until(lambda: view(router, replica.url)["knowledge"] == "events")
        router.chat("a long beginning " * 20)
        until(lambda: view(router, replica.url)["cached_blocks"]["device"] > 10)
        router.chat("a long beginning " * 20)
        metrics = router.call(lambda: next(iter(router.fleet.groups.values())).placement.metrics())
        assert metrics["predicted_cached_tokens_total"] == metrics["actual_cached_tokens_total"] > 0


def test_blocks_that_were_cached_before_the_router_came_are_known_by_the_snapshot() -> None:
    with mock_replicas(1) as (replica,):
        with running_router(replica.url, tokenizes=True) as first:
            first.chat("a long beginning " * 20)
        with running_router(replica.url, tokenizes=True) as second:
            until(lambda: view(second, replica.url)["cached_blocks"]["device"] > 10)


def test_a_replica_that_comes_back_is_listened_to_anew_and_has_nothing_cached() -> None:
    with mock_replicas(1) as (replica,):
        router = running_router(replica.url, tokenizes=True)
        with router as running:
            running.chat("a long beginning " * 20)
            until(lambda: view(running, replica.url)["cached_blocks"]["device"] > 10)
            replica.send(signal.SIGKILL)
            until(lambda: running.states() == ["down"])
            with mock_replicas(1, port=replica.port):
                until(lambda: running.states() == ["up"])
                until(lambda: view(running, replica.url)["cached_blocks"]["device"] == 0)
                assert view(running, replica.url)["knowledge"] == "events"


def test_a_gap_is_noticed_at_once_though_frames_come_one_by_one() -> None:
    num_streams, may_end = 0, threading.Event()

    def events(_seen: Seen, sock: socket.socket) -> None:
        nonlocal num_streams
        num_streams += 1
        sock.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        send(sock, [Hello("e", "sha256", b"", 16, 0), *snapshot(0, {"device": b"k" * 8})])
        while not may_end.wait(0.5):  # so that no two frames are read together
            send(sock, [Changes(7, "device", b"", b"", False)])

    def send(sock: socket.socket, frames: list[Frame]) -> None:
        data = b"".join(map(pack, frames))
        sock.sendall(b"%x\r\n%s\r\n" % (len(data), data))

    with stub() as backend:
        backend.questions[b"/kv_events"] = events
        with running_router(backend.url):
            until(lambda: num_streams >= 2)
            may_end.set()


def test_a_stream_that_stalls_is_left_and_connected_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "STALL_S", 0.2)
    num_streams, may_end = 0, threading.Event()

    def events(_seen: Seen, sock: socket.socket) -> None:
        nonlocal num_streams
        num_streams += 1
        sock.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        frames: list[Frame] = [Hello("e", "sha256", b"", 16, 0), *snapshot(0, {"device": b"k" * 8})]
        data = b"".join(map(pack, frames))
        sock.sendall(b"%x\r\n%s\r\n" % (len(data), data))
        may_end.wait()  # nothing more is sent, and the connection stays open

    with stub() as backend:
        backend.questions[b"/kv_events"] = events
        with running_router(backend.url):
            until(lambda: num_streams >= 2, timeout_s=30)
            may_end.set()


def test_chunks_come_off_wherever_the_bytes_are_cut() -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        pieces = [bytes(rng.choices(b"ab\r\n0;", k=rng.randrange(1, 9))) for _ in range(rng.randrange(5))]
        framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        dechunker, found = Dechunker(), b""
        while framed:
            size = rng.randrange(1, 6)
            found += dechunker.feed(framed[:size])
            framed = framed[size:]
        assert found == b"".join(pieces)
