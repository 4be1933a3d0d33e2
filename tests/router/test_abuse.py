"""Slow clients, salts, replicas without events and invalid keys: nothing grows without bound, and no key opens too much."""

import pytest

from penstock.router.backend import RouteError
from penstock.router.config import RouterConfig, resolve
from penstock.router.placement.placement import Placement, ReplicaInfo, _root
from tests.support.raw_http import connect, post
from tests.support.refusals import table
from tests.support.router_fleet import RunningRouter, running_router, until
from tests.support.router_stub import stub, whole

LARGE = b"x" * 200_000


def buffered(router: RunningRouter) -> int:
    return sum(each.transport.get_write_buffer_size() for each in router.app.edge.connections)


def test_a_client_that_does_not_read_waits_for_its_next_answers() -> None:
    with (
        stub(lambda seen, sock: whole(LARGE)) as replica,
        running_router(replica.url) as router,
        connect(router.port, receive_buffer=4096) as sock,
    ):
        sock.sendall(post(close=False) * 50)
        until(lambda: buffered(router) > 0)
        (connection,) = router.app.edge.connections
        for _ in range(50):  # a router that does not wait would read more answers meanwhile
            assert router.complete().status_code == 200
        assert buffered(router) < 1_000_000
        assert sum(seen.body == b'{"prompt":"abc"}' for seen in replica.seen) < 40
        assert not router.app.edge.is_written  # a drain waits for it
        data = bytearray()
        while len(data) < 50 * len(LARGE) or not data.endswith(LARGE):
            more = sock.recv(1 << 20)
            assert more, data[:200]
            data += more
        assert data.count(b"HTTP/1.1 200") == 50
        until(lambda: router.app.edge.is_written)
        assert connection.deadline_s < float("inf"), "an idle connection is closed some time"


def test_a_salt_is_not_cached() -> None:
    placement, before = Placement(), _root.cache_info().currsize
    placement.add_replica("r0", ReplicaInfo())
    for salt in ("s", "s" * 257):
        placement.prepare(bytes(4 * 64), salt, "an adapter of this test")
        assert _root.cache_info().currsize == before
    placement.prepare(bytes(4 * 64), None, "an adapter of this test")
    assert _root.cache_info().currsize == before + 1


def test_the_feed_of_a_replica_without_events_ends() -> None:
    with stub() as replica, running_router(replica.url) as router:
        until(lambda: all(feed.done() for feed in router.router.feeds._by_url.values()))


@pytest.mark.parametrize(("variable", "key", "words"), table(__file__, "keys"))
def test_an_invalid_key_in_the_environment_is_refused(variable: str, key: str, words: str) -> None:
    with pytest.raises(RouteError, match=words):
        resolve(RouterConfig(), {variable: key})
