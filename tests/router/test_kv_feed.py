"""The stream of cache events, followed over the wire: from a replica's first block to its restart."""

import random
import signal
import socket
import threading

import pytest

from penstock.engine.http.kv_stream import Alive, Changes, Frame, Hello, pack, snapshot
from penstock.router.fleet import kv_feed
from penstock.router.http.upstream import Dechunker
from tests.support.router_fleet import mock_replicas, running_router, until
from tests.support.router_stub import STREAM, Hold, Seen, stub

TEXT = "a long beginning " * 20
BEGINNING: list[Frame] = [Hello("e", "sha256", b"", 16, 0), *snapshot(0, {"device": b"k" * 8})]


def chunk(*frames: Frame) -> bytes:
    data = b"".join(map(pack, frames))
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_the_blocks_of_a_replica_are_known_and_predicted_exactly() -> None:
    with mock_replicas(1) as (replica,), running_router(replica.url, tokenizes=True) as router:
        until(lambda: router.view(replica.url)["placement"]["knowledge"] == "events")
        router.chat(TEXT)
        until(lambda: router.num_blocks(replica.url) > 10)
        router.chat(TEXT)
        metrics = router.placement_metrics()
        assert metrics["predicted_cached_tokens_total"] == metrics["actual_cached_tokens_total"] > 0


def test_a_snapshot_tells_of_blocks_before_and_of_an_empty_new_replica() -> None:
    with mock_replicas(1) as (replica,):
        with running_router(replica.url, tokenizes=True) as first:
            first.chat(TEXT)
        with running_router(replica.url, tokenizes=True) as second:
            until(lambda: second.num_blocks(replica.url) > 10)
            replica.send(signal.SIGKILL)
            until(lambda: second.states() == ["down"])
            with mock_replicas(1, port=replica.port):
                until(lambda: second.states() == ["up"])
                until(lambda: second.num_blocks(replica.url) == 0)
                assert second.view(replica.url)["placement"]["knowledge"] == "events"


@pytest.mark.parametrize("fault", ["gap", "stall"])
def test_a_stream_that_stalls_or_has_a_gap_is_connected_to_again(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "stall":
        monkeypatch.setattr(kv_feed, "STALL_S", 0.2)
    num_streams, may_end = 0, threading.Event()

    def events(_seen: Seen, sock: socket.socket) -> None:
        nonlocal num_streams
        num_streams += 1
        sock.sendall(STREAM)
        sock.sendall(chunk(*BEGINNING))
        while not may_end.wait(0.2):  # so that no two frames are read together
            if fault == "gap":
                sock.sendall(chunk(Changes(7, "device", b"", b"", False)))

    with stub() as backend:
        backend.questions[b"/kv_events"] = events
        with running_router(backend.url):
            until(lambda: num_streams >= 2)
            may_end.set()


def test_a_stream_whose_snapshot_is_late_is_kept() -> None:
    events = Hold(first=STREAM + chunk(BEGINNING[0], Alive(0)), answer=chunk(*BEGINNING[1:]))
    with stub() as backend:
        backend.questions[b"/kv_events"] = events
        with running_router(backend.url) as router:
            (group,) = router.fleet.groups.values()
            until(lambda: group.placement._replicas[backend.url].cache.engine_id == "e")
            events.go.set()
            until(lambda: router.view(backend.url)["placement"]["knowledge"] == "events")
    assert len(events.seen) == 1


def test_the_feed_of_a_replica_without_events_ends() -> None:
    with stub() as replica, running_router(replica.url) as router:
        until(lambda: all(feed.done() for feed in router.router.feeds._by_url.values()))


def test_chunks_are_decoded_wherever_the_bytes_are_cut() -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        pieces = [bytes(rng.choices(b"ab\r\n0;", k=rng.randrange(1, 9))) for _ in range(rng.randrange(5))]
        framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        dechunker, decoded = Dechunker(), b""
        while framed:
            size = rng.randrange(1, 6)
            decoded += dechunker.feed(framed[:size])
            framed = framed[size:]
        assert decoded == b"".join(pieces)
