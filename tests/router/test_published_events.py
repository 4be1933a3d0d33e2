"""The engine's cache events as vLLM publishes them: routers that read them and routers that read the engine's own stream
come to know the same blocks."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from penstock.engine.commands import serve
from penstock.engine.messages import KeyedBlock
from penstock.engine.server import kv_publisher
from penstock.engine.server.kv_publisher import KvPublisher
from penstock.engine.server.server_config import KvEventsConfig, ServerConfig, resolve
from tests.support.fake_engine import INFO
from tests.support.refusals import hardest, table
from tests.support.router_fleet import RunningRouter, mock_replicas, running_router, until

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


@contextlib.contextmanager
def sockets(name: Path) -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
    context = zmq.Context()
    try:
        events, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        events.setsockopt(zmq.SUBSCRIBE, b"")
        events.connect(f"ipc://{name}.events")
        replay.connect(f"ipc://{name}.replay")
        yield events, replay
    finally:
        context.destroy(0)


def test_messages_have_the_layout_of_vllm(tmp_path: Path) -> None:
    name = tmp_path / "kv"
    with mock_replicas(1, kv_events=name) as (replica,), running_router(replica.url) as router:
        with sockets(name) as (events, replay):
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


def options(text: str) -> Any:
    """Return the configuration that the command line makes of this option."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.server_config(parser.parse_args(["model", "--kv-events-config", text]), "model", {}).kv_events_config


def in_python(text: str) -> ServerConfig:
    return resolve(ServerConfig(kv_events_config=msgspec.json.decode(text, type=KvEventsConfig)), {})


def test_the_configuration_of_events_is_vllms() -> None:
    endpoints = '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"'
    text = f'{{"enable_kv_cache_events": true, "publisher": "zmq", {endpoints}}}'
    assert options(text).is_on and options(text).replay_endpoint == "tcp://*:5558"
    assert in_python(text).kv_events_config == options(text)
    assert not options('{"publisher": "null", "enable_kv_cache_events": true}').is_on


@pytest.mark.parametrize("text", table(__file__, "kv events"))
def test_another_configuration_of_events_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        in_python(text)
    with pytest.raises((SystemExit, msgspec.ValidationError)):
        options(text)
