"""The cache events of a replica, from its first block to its restart: its own stream, and what it publishes as vLLM does."""

import asyncio
import random
import signal
import socket
import threading
from pathlib import Path

import httpx
import msgspec
import pytest
import zmq

from penstock.engine.http.kv_stream import Alive, Changes, Frame, Hello, pack, snapshot
from penstock.engine.messages import KeyedBlock
from penstock.engine.server import kv_publisher
from penstock.engine.server.kv_publisher import KvPublisher
from penstock.engine.server.server_config import KvEventsConfig
from penstock.router.fleet import kv_feed
from penstock.router.http.upstream import ConnectFailed, Dechunker, Pool
from tests.support.fake_engine import INFO
from tests.support.refusals import cases, hardest
from tests.support.router_fleet import RunningRouter, mock_replicas, running_router, until
from tests.support.router_stub import STREAM, Hold, Seen, stub
from tests.support.running_server import comes_true

TEXT = "a long beginning " * 20
BEGINNING: list[Frame] = [Hello("e", "sha256", b"", 16, 0), *snapshot(0, {"device": b"k" * 8})]


def chunk(*frames: Frame) -> bytes:
    data = b"".join(map(pack, frames))
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_the_blocks_of_a_replica_are_known_and_predicted_until_it_restarts() -> None:
    with mock_replicas(1) as (replica,):
        with running_router(replica.url, tokenizes=True) as first:
            until(lambda: first.view(replica.url)["placement"]["knowledge"] == "events")
            first.chat(TEXT)
            until(lambda: first.num_blocks(replica.url) > 10)
            first.chat(TEXT)
            metrics = first.placement_metrics()
            assert metrics["predicted_cached_tokens_total"] == metrics["actual_cached_tokens_total"] > 0
        with running_router(replica.url, tokenizes=True) as second:
            until(lambda: second.num_blocks(replica.url) > 10)  # from the snapshot
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


async def test_a_replica_that_is_removed_while_its_feed_connects_keeps_no_connection() -> None:
    with stub() as replica:
        pool = Pool("127.0.0.1", replica.server_address[1], b"", 60.0)
        connecting = asyncio.create_task(pool.connect())
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(ConnectFailed, match="was removed"):
            await connecting
        await comes_true(lambda: replica.num_closed == 1)


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


TEXTS = [f"number {number}, " * 30 + "and the rest " * number for number in range(12)]


def cached_tokens(router: RunningRouter) -> list[list[int]]:
    """Return how many tokens of each text the router believes to be cached in its one replica."""
    ids = [b"".join(byte.to_bytes(4, "little") for byte in text.encode()) for text in TEXTS]
    return [list(router.predicted(each).values()) for each in ids]


@pytest.mark.parametrize("kv_tokens", hardest([1 << 16, 3000], 3000))
def test_published_and_streamed_events_tell_the_same(tmp_path: Path, kv_tokens: int) -> None:
    name = tmp_path / "kv"
    with mock_replicas(1, kv_events=name, kv_tokens=kv_tokens) as (replica,):
        backend = f"{replica.url},events=ipc://{name}.events,replay=ipc://{name}.replay"
        with running_router(replica.url, tokenizes=True) as streamed, running_router(backend, tokenizes=True) as read:
            for router in (streamed, read):
                until(lambda: router.view(replica.url)["placement"]["knowledge"] == "events")  # noqa: B023
            for text in (*TEXTS, *TEXTS[:5]):
                # The client passes by both routers, which predict the effect of their own requests.
                body = {"prompt": text, "max_tokens": 40}
                assert httpx.post(replica.url + "/v1/completions", json=body, timeout=60).status_code == 200
            until(lambda: streamed.num_blocks(replica.url) == read.num_blocks(replica.url))
            count = read.num_blocks(replica.url)
            assert count > 100
            until(lambda: cached_tokens(streamed) == cached_tokens(read))
            events = read.view(replica.url)["events"]
            assert events["gaps"] == 0 and not events["unplaced"]
        with running_router(backend, tokenizes=True) as late:  # by the replay alone
            until(lambda: late.num_blocks(replica.url) == count)


def test_all_blocks_but_the_cached_and_the_newest_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "SPARE", 8)
    publisher = KvPublisher(msgspec.structs.replace(INFO, num_blocks=16), KvEventsConfig(enable_kv_cache_events=True))

    def computed(first: int, *cached: set[bytes]) -> set[bytes]:
        """Report a prompt of four blocks; return their keys."""
        keys = [number.to_bytes(8, "little") for number in range(first, first + 4)]
        blocks = [KeyedBlock(key, b"", bytes(64), None, None) for key in keys]
        publisher.remember(blocks, dict(zip(("device", "host"), cached, strict=False)))
        return set(keys)

    again, cached = computed(1), computed(5)
    for first in range(100, 4000, 4):
        if first == 124:  # before any was forgotten
            publisher.most = 0  # at once
            computed(1, cached, set())
            assert again | cached <= publisher.blocks.keys()
        computed(first, cached, set())
    assert cached <= publisher.blocks.keys() and not again & publisher.blocks.keys()
    assert len(publisher.blocks) <= 4 + 8 + 32
    publisher.close()


def test_messages_have_the_layout_of_vllm(tmp_path: Path) -> None:
    name = tmp_path / "kv"
    with mock_replicas(1, kv_events=name) as (replica,), running_router(replica.url) as router:
        with zmq.Context() as context, context.socket(zmq.SUB) as events, context.socket(zmq.DEALER) as replay:
            events.setsockopt(zmq.SUBSCRIBE, b"")
            events.connect(f"ipc://{name}.events")
            replay.connect(f"ipc://{name}.replay")
            for number in range(1000):  # until the subscription stands; all prompts begin in their own way
                router.complete(f"{number:04}".ljust(64, "x"), cache_salt="pepper")
                if events.poll(20):
                    topic, first, payload = events.recv_multipart()
                    _, (event, *_), rank = msgspec.msgpack.decode(payload)
                    if event["parent_block_hash"] is None:  # it may stand in the middle of a request
                        break
            replay.send_multipart([b"", first])
            assert replay.recv_multipart() == [b"", topic, first, payload] and topic == b""
            while (message := replay.recv_multipart())[-1]:
                assert int.from_bytes(message[-2], "big") > int.from_bytes(first, "big")
            assert message[-2] == b"\xff" * 8
        assert rank == 0 and event["type"] == "BlockStored" and event["parent_block_hash"] is None
        assert event["token_ids"][4:16] == [ord("x")] * 12 and event["block_size"] == 16 and event["medium"] == "GPU"
        assert event["extra_keys"][0] == ["pepper"] and not any(event["extra_keys"][1:])
        assert all(isinstance(each, int) and each < 2**64 for each in event["block_hashes"])


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "configurations of events"))
def test_the_configuration_of_events_is_vllms(text: str, expected: tuple[object, ...]) -> None:
    config = msgspec.json.decode(text, type=KvEventsConfig)
    assert (config.is_on, config.endpoint, config.replay_endpoint)[: len(expected)] == expected
