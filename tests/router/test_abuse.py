"""Clients, replicas and operators that do as they please: nothing grows without bound, and nothing is let through."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable

import msgspec
import pytest
import zmq
import zmq.asyncio

from penstock.engine.http.limits import Limits
from penstock.router.backend import Backend, RouteError
from penstock.router.config import RouterConfig, resolve
from penstock.router.fleet.engine_feed import EngineSource
from penstock.router.placement.placement import Placement, ReplicaInfo, _root
from tests.support.raw_http import connect, post
from tests.support.router_fleet import RunningRouter, running_router, until
from tests.support.router_stub import Seen, stub, whole

LARGE = b"x" * 200_000


def buffered(router: RunningRouter) -> int:
    return sum(each.transport.get_write_buffer_size() for each in router.app.edge.connections)


def read(sock: socket.socket, is_all: Callable[[bytes], bool]) -> bytes:
    data = b""
    while not is_all(data):
        more = sock.recv(1 << 20)
        assert more, data[:200]
        data += more
    return data


def test_a_client_that_does_not_read_waits_for_its_next_answers() -> None:
    with contextlib.ExitStack() as stack:
        replica = stack.enter_context(stub(lambda seen, sock: whole(LARGE)))
        router = stack.enter_context(running_router(replica.url))
        sock = stack.enter_context(connect(router.port, receive_buffer=4096))
        sock.sendall(post(close=False) * 50)
        until(lambda: buffered(router) > 0)
        time.sleep(0.3)
        assert buffered(router) < 1_000_000 and len(replica.seen) < 40
        assert not router.app.edge.is_written  # a drain waits for it
        read(sock, lambda data: data.count(b"HTTP/1.1 200") == 50 and data.endswith(LARGE))
        until(lambda: router.app.edge.is_written)
        (connection,) = router.app.edge.connections
        assert connection.deadline_s < float("inf"), "an idle connection is closed some time"


def test_a_client_that_does_not_read_is_cut_though_it_asks_again() -> None:
    def endless(seen: Seen, sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            sock.sendall(b"2710\r\n" + b"x" * 10000 + b"\r\n")

    limits = Limits(write_timeout_s=0.4)
    with contextlib.ExitStack() as stack:
        replica = stack.enter_context(stub(endless))
        router = stack.enter_context(running_router(replica.url, limits=limits))
        sock = stack.enter_context(connect(router.port, receive_buffer=4096))
        sock.sendall(post(close=False))
        until(lambda: any(each.is_paused for each in router.app.edge.connections))
        sock.sendall(post(close=False))
        until(lambda: not router.app.edge.connections and not router.app.exchanges)


def test_a_long_salt_is_not_kept() -> None:
    placement, before = Placement(), _root.cache_info().currsize
    placement.add_replica("r0", ReplicaInfo())
    placement.prepare(bytes(4 * 64), "s" * 257)
    assert _root.cache_info().currsize == before
    placement.prepare(bytes(4 * 64), "s" * 256)
    assert _root.cache_info().currsize == before + 1


def test_events_are_heard_over_ipv6() -> None:
    async def hear() -> object:
        publisher: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        publisher.setsockopt(zmq.IPV6, 1)
        try:
            port = publisher.bind_to_random_port("tcp://[::1]")
        except zmq.ZMQError:
            pytest.skip("no IPv6 here")
        backend, end_s = Backend.of(f"http://[::1]:8000,events={port}"), time.monotonic() + 60
        context = zmq.asyncio.Context()
        source = EngineSource(context, backend, b"", 16)

        async def follow() -> None:
            async for _ in source.frames():
                pass

        task = asyncio.create_task(follow())
        number = 0
        while not source.view()["batches"] and time.monotonic() < end_s:
            publisher.send_multipart([b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [], 0])])
            number += 1
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.close(0)
        context.destroy(0)
        return source.view()["batches"]

    assert asyncio.run(hear())


def test_a_replica_that_says_nothing_leaves_nothing_behind() -> None:
    with stub() as replica, running_router(replica.url) as router:
        until(lambda: not router.router.feeds._tasks._tasks)


@pytest.mark.parametrize(
    ("variable", "key", "words"),
    [
        ("PENSTOCK_BACKEND_API_KEY", "key\nx-injected: 1", "backend_api_key: .*PENSTOCK_BACKEND_API_KEY"),
        ("PENSTOCK_API_KEY", "key\n", "api_keys: a key must be printable"),
        ("PENSTOCK_ADMIN_API_KEY", "k y", "api_keys: a key must be printable"),
    ],
)
def test_a_key_of_the_environment_that_is_none_is_refused(variable: str, key: str, words: str) -> None:
    with pytest.raises(RouteError, match=words):
        resolve(RouterConfig(), {variable: key})
