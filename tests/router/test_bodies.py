"""The memory that a request takes while its answer streams."""

import gc
import socket
import types
from typing import Any

import pytest

from penstock.router.exchange import Exchange
from penstock.router.fleet.fleet import Fleet
from tests.support.raw_http import clients, post
from tests.support.router_fleet import RunningRouter, running_router, until
from tests.support.router_stub import EVENT, STREAM, Hold, Seen, stub

LARGE = 100_000


def large_values(router: RunningRouter, exchange: Exchange) -> list[int]:
    """Return the sizes of all large strings of bytes that the exchange keeps alive, however indirectly."""
    seen: set[int] = {id(each) for each in (router.app, router.app.exchanges, router.app.edge, router.app.prompts)}
    sizes, waiting = [], [exchange]
    while waiting:
        each: Any = waiting.pop()
        if id(each) in seen or isinstance(each, (types.ModuleType, types.FunctionType, type, Fleet)):
            continue
        seen.add(id(each))
        if isinstance(each, (bytes, bytearray)) and len(each) >= LARGE:
            sizes.append(len(each))
        if not isinstance(each, types.FrameType):
            waiting += gc.get_referents(each)
    return sizes


@pytest.mark.parametrize(("tokenizes", "is_split"), [(False, False), (True, True)])
def test_a_body_is_dropped_at_the_first_byte_of_its_answer(tokenizes: bool, is_split: bool) -> None:
    may_answer, may_end = Hold(answer=None), Hold(b"0\r\n\r\n", first=STREAM + EVENT)

    def stream(seen: Seen, sock: socket.socket) -> bytes | None:
        may_answer(seen, sock)
        return may_end(seen, sock)

    with stub(stream) as backend, stub(stream) as prefill:
        prefills = (f"{prefill.url},prefill=10.0.0.5:9100",) if is_split else ()
        body = b'{"stream":true,"prompt":"' + b"abcd " * LARGE + b'"}'
        with (
            running_router(backend.url, *prefills, tokenizes=tokenizes) as router,
            clients(router.port, post(body)) as (sock,),
        ):
            until(lambda: bool(backend.seen))
            (exchange,) = router.app.exchanges
            assert router.call(lambda: large_values(router, exchange))
            may_answer.go.set()
            assert b"data: a" in sock.recv(65536)
            assert router.call(lambda: large_values(router, exchange)) == []
            may_end.go.set()
