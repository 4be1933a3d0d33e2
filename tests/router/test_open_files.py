"""The router's limit of open files: it is raised at start, and running out of descriptors is no replica's fault."""

import contextlib
import resource
from collections import Counter

import httpx
import pytest

from penstock.router.http.upstream import ConnectFailed, Upstream
from tests.support.programs import Command
from tests.support.raw_http import connect, post, status
from tests.support.router_fleet import running_router, until
from tests.support.router_stub import EVENT, STREAM, Hold, stub

NUM_CLIENTS = 150


@pytest.mark.parametrize("is_hard", [False, True])
def test_more_streams_than_descriptors_are_answered_and_blame_no_replica(is_hard: bool) -> None:
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


def test_without_a_descriptor_left_the_answer_is_503_and_the_replica_up(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []

    async def connect() -> Upstream:
        errors.append(ConnectFailed("Too many open files", is_local=True))
        raise errors[-1]

    with stub() as backend, running_router(backend.url) as router:
        replica = router.fleet.replicas[backend.url]
        monkeypatch.setattr(replica.pool, "connect", connect)
        until(lambda: router.call(replica.pool.close) or len(errors) > 2)  # a connection may have been in the making
        answers = [router.complete(model="m") for _ in range(6)]
        until(lambda: len(errors) > 12)  # the probes fail in the same way
        assert [answer.status_code for answer in answers] == [503] * 6
        assert "Too many open files" in answers[0].text and answers[0].headers["retry-after"] == "1"
        assert (replica.state, replica.num_failures) == ("up", 0)
        monkeypatch.undo()
        assert router.complete(model="m").status_code == 200
