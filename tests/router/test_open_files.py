"""The router's limit of open files: it is raised at start, and running out of descriptors is no replica's fault."""

import asyncio
import contextlib
import errno
import resource
from collections import Counter
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from penstock.router.http import upstream
from tests.support.programs import Command
from tests.support.raw_http import connect, post, status
from tests.support.router_fleet import running_router, until
from tests.support.router_stub import EVENT, STREAM, Hold, stub

NUM_CLIENTS = 150


@pytest.mark.parametrize("is_hard", [False, True])
def test_more_streams_than_descriptors_get_an_answer_each_and_no_replica_is_blamed(is_hard: bool) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    stream = Hold(b"0\r\n\r\n", first=STREAM + EVENT)
    with stub(stream) as one, stub(stream) as other, contextlib.ExitStack() as stack:
        words = ("route", "--port", "0", "--backend", one.url, "--backend", other.url)
        url = stack.enter_context(Command(*words, max_files=(256, 256 if is_hard else hard))).url()
        until(lambda: httpx.get(url + "/ready").status_code == 200)
        socks = [stack.enter_context(connect(int(url.rpartition(":")[2]))) for _ in range(NUM_CLIENTS)]
        stack.callback(stream.go.set)
        for sock in socks:
            sock.settimeout(60)
            with contextlib.suppress(BrokenPipeError):  # refused before it has sent anything
                sock.sendall(post(b'{"prompt":"abc","stream":true}'))
        answers = Counter(status(sock.recv(4096)) for sock in socks)
        stream.go.set()
        for sock in socks:
            sock.close()
        until(lambda: httpx.get(url + "/replicas").status_code == 200)
        replicas = httpx.get(url + "/replicas").json()["replicas"]
    assert answers.keys() == ({200, 503} if is_hard else {200})
    assert answers[200] > 50
    assert [(each["state"], each["failures"]) for each in replicas] == [("up", 0), ("up", 0)]


def test_without_a_descriptor_left_a_client_gets_a_503_and_the_replica_stays_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = []

    class Loop:
        """A running loop whose process has no descriptor left."""

        async def create_connection(self, *_: object) -> None:
            failed.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio.get_running_loop(), name)

    with stub() as backend, running_router(backend.url) as router:
        replica = router.fleet.replicas[backend.url]
        monkeypatch.setattr(upstream, "asyncio", SimpleNamespace(**vars(asyncio) | {"get_running_loop": Loop}))

        def has_no_connection_left() -> bool:
            """One may have been in the making."""
            router.call(replica.pool.close)
            return len(failed) > 2

        until(has_no_connection_left)
        answers = [router.complete(model="m") for _ in range(6)]
        until(lambda: len(failed) > 12)  # the probes fail in the same way
        assert [answer.status_code for answer in answers] == [503] * 6
        assert "Too many open files" in answers[0].text and answers[0].headers["retry-after"] == "1"
        assert (replica.state, replica.num_failures) == ("up", 0)
        monkeypatch.undo()
        assert router.complete(model="m").status_code == 200
