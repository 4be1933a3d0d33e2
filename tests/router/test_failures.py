"""Replicas that die, stop, drain, fail and fill up: the answers that clients get, and the states of the replicas."""

import asyncio
import contextlib
import itertools
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvloop

from penstock.engine.http.errors import HttpError
from penstock.engine.http.limits import Limits
from penstock.engine.text.prompt import INLINE_CHARS
from penstock.router.backend import Backend
from penstock.router.exchange import STALLED_S, Exchange
from penstock.router.fleet.fleet import RESERVE, RetryBudget
from penstock.router.fleet.replica import FAILURES_TO_EJECT, Replica
from penstock.router.http.heads import ClientRequest
from penstock.router.http.upstream import fetch
from penstock.router.leg import Leg
from tests.support import router_stub
from tests.support.raw_http import clients, connect, exchange, post, read_all, status
from tests.support.refusals import cases, table
from tests.support.router_fleet import ADMIN, RunningRouter, mock_fleet, mock_replicas, running_router, stub_fleet
from tests.support.router_stub import EVENT, STREAM, Answer, Hold, Seen, hang_up, in_turn, ok, sick, stub, whole
from tests.support.running_server import until

FULL = whole(b'{"error":{"message":"full"}}', b"429 Too Many Requests", b"retry-after: 7")


def full(seen: Seen, sock: socket.socket) -> bytes:
    return FULL


def load(
    router: RunningRouter, count: int, concurrency: int = 24, during: Callable[[], object] = lambda: None
) -> list[httpx.Response]:
    """Send `count` requests, call `during` when a third are under way; return the answers."""

    def send(number: int) -> httpx.Response:
        if number == count // 3:
            during()
        return router.complete(f"prompt {number}", ignore_eos=True)

    with ThreadPoolExecutor(concurrency) as threads:
        return list(threads.map(send, range(count)))


def without_retries(router: RunningRouter) -> None:
    router.fleet.budget.share = router.fleet.budget.tokens = 0.0


def test_requests_at_a_stopped_replica_move_to_others() -> None:
    # With less time for a probe, a busy machine is taken for a stop.
    with mock_fleet(3, probe_timeout_s=1.0, inter_token_s=0.02) as (router, (_, victim, _)):

        def stop_it_while_requests_wait() -> None:
            victim.send(signal.SIGSTOP)
            until(lambda: router.view(victim.url)["requests_in_flight"] > 0)
            until(lambda: router.state(victim.url) == "down")
            victim.send(signal.SIGCONT)  # an engine that was stopped for 8 s takes its core for dead

        answers = load(router, 60, during=stop_it_while_requests_wait)
        assert [answer.status_code for answer in answers] == [200] * 60
        assert router.counts("retries").keys() & {"lost", "unreachable", "moved"}
        until(lambda: router.states() == ["up"] * 3)


@pytest.mark.parametrize(("probe_fails_first", "retries"), [(False, {"lost": 1}), (True, {"moved": 1})])
def test_a_dying_replica_loses_no_request(probe_fails_first: bool, retries: dict[str, int]) -> None:
    """The kernel may close its listening socket before or after the connections of its requests."""
    hold = Hold(answer=None)
    with stub_fleet(hold, ok, policy="round-robin") as (router, (dying, _)):
        without_retries(router)

        def die(seen: Seen, sock: socket.socket) -> None:
            hold(seen, sock)
            dying.is_dying = True

        dying.answer = die
        with clients(router.port, *2 * [post()]) as socks:
            assert hold.is_asked.wait(60)
            if probe_fails_first:
                dying.is_dying = True
                router.refuse(dying.url)
            hold.go.set()
            assert [status(sock.recv(4096)) for sock in socks] == [200, 200]
        assert router.counts("retries") == retries


def test_one_health_request_tells_whether_a_replica_died_for_all_its_requests() -> None:
    together, health = threading.Barrier(6), Hold()

    def break_off(seen: Seen, sock: socket.socket) -> None:
        together.wait(60)

    with stub(break_off) as backend, running_router(backend.url) as router:
        without_retries(router)
        backend.questions[b"/health"] = health
        with clients(router.port, *6 * [post()]) as socks:
            until(lambda: [each.state for each in list(router.app.exchanges)] == ["between"] * 6)
            assert health.is_asked.wait(60)
            health.go.set()
            assert [status(read_all(sock)) for sock in socks] == [502] * 6
        assert len(health.seen) == 1 and router.counts("not_retried") == {"lost": 6}


@pytest.mark.parametrize("is_long", [False, True])
def test_a_bug_of_the_router_is_a_500_and_ends_the_request(
    is_long: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "a" * (INLINE_CHARS + 1 if is_long else 1)
    with stub(hang_up) as backend, running_router(backend.url) as router:
        for owner, name in (RetryBudget, "deposit"), (Leg, "start"), (Exchange, "_failure"):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, lambda *_, **__: 1 // 0)
                assert router.complete(prompt).status_code == 500
        assert router.call(lambda: len(router.app.exchanges)) == 0 and "ZeroDivisionError" in caplog.text
        backend.answer = ok
        assert router.complete(prompt).status_code == 200


def test_a_replica_that_is_removed_and_added_again_finishes_its_requests() -> None:
    hold = Hold()
    with stub(hold) as backend, running_router(backend.url, admin_api_keys=(ADMIN,)) as router:
        with clients(router.port, post()) as (sock,):
            assert hold.is_asked.wait(60)
            for method in ("DELETE", "POST"):
                assert router.change(method, url=backend.url).status_code == 200
            until(lambda: router.states() == ["up"])
            hold.go.set()
            assert status(read_all(sock)) == 200
        until(lambda: not router.fleet.detached)
        assert router.complete().status_code == 200


def check_progress(router: RunningRouter, now_s: float) -> None:
    """Let the router check the progress of its running requests as if it were `now_s`."""

    def check_each() -> None:
        for each in list(router.app.exchanges):
            each.check_progress(now_s, response_s=60)

    router.call(check_each)


def test_a_removed_replica_that_dies_keeps_no_request_waiting() -> None:
    """Its connections stay open, as those of a host without power do."""
    waits, streams = holds = Hold(), Hold(first=STREAM + EVENT)
    with stub_fleet(ok, ok, policy="round-robin", admin_api_keys=(ADMIN,)) as (router, (dying, _)):
        replica = router.fleet.replicas[dying.url]
        dying.answer = in_turn(*holds)
        with clients(router.port, *4 * [post()]) as socks:
            assert waits.is_asked.wait(60) and streams.is_asked.wait(60)
            until(lambda: "relaying" in [each.state for each in list(router.app.exchanges)])
            assert router.change("DELETE", url=dying.url).status_code == 200
            dying.is_dying = True
            until(lambda: replica.num_in_flight == 1)
            now_s = time.monotonic()
            check_progress(router, now_s)  # which reports the event
            check_progress(router, now_s + STALLED_S + 1)
            results = [read_all(sock) for sock in socks]
        assert [status(each) for each in results] == [200] * 4
        assert sum(b"[DONE]" in each for each in results) == 1
        until(lambda: not router.fleet.detached and dying.url not in router.fleet.replicas)


def test_without_a_replica_that_is_up_the_answer_is_503() -> None:
    with stub() as backend, running_router(backend.url) as router:
        backend.is_dying = True
        until(lambda: router.states() == ["down"])
        answer = router.complete()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert [router.http.get(path).status_code for path in ("/ready", "/health")] == [503, 200]
        backend.is_dying = False
        until(lambda: router.states() == ["up"])
        assert router.complete().status_code == 200


def test_a_rolling_restart_fails_no_request() -> None:
    with contextlib.ExitStack() as stack, mock_fleet(3, inter_token_s=0.005) as (router, replicas):

        def roll() -> None:
            for replica in replicas:
                replica.send(signal.SIGTERM)
                until(lambda: router.state(replica.url) == "down")  # noqa: B023
                stack.enter_context(mock_replicas(1, port=replica.port, inter_token_s=0.005))
                until(lambda: router.state(replica.url) == "up")  # noqa: B023

        rolling = threading.Thread(target=roll)
        rolling.start()
        answers: list[httpx.Response] = []
        while rolling.is_alive():
            answers += load(router, 40, concurrency=8)
        rolling.join()
        assert [answer.status_code for answer in answers] == [200] * len(answers)
        assert not any('"finish_reason":"abort"' in answer.text for answer in answers)


def test_retries_stay_within_their_budget_when_half_of_the_requests_fail() -> None:
    def flaky() -> Answer:
        answers = itertools.cycle((ok, hang_up))
        return lambda seen, sock: next(answers)(seen, sock)

    with stub_fleet(*(flaky() for _ in range(4))) as (router, backends):
        assert {answer.status_code for answer in load(router, 200, concurrency=8)} <= {200, 502, 503}
        num_sent = sum(len(each.seen) for each in backends)
        assert 210 < num_sent <= 200 * 0.15 + 200 + RESERVE


@pytest.mark.parametrize(
    ("failure", "path", "answers", "code", "words", "num_asked", "num_failures"),
    cases(__file__, "failures", **vars(router_stub) | globals()),
)
def test_each_kind_of_failure_has_its_answer(
    failure: str, path: str, answers: Sequence[Answer], code: int, words: bytes, num_asked: int, num_failures: int
) -> None:
    """One request is sent to a fleet that gives these answers in turn, whichever replicas are chosen."""
    request = post().replace(b"completions", path.encode())
    with (
        stub_fleet(*len(answers) * [in_turn(*answers)]) as (router, backends),
        clients(router.port, request) as (sock,),
    ):
        for stalled in (each for each in answers if isinstance(each, Hold)):
            assert stalled.is_asked.wait(60)
            check_progress(router, time.monotonic() + 61)
        answer = read_all(sock)
        assert (status(answer), words in answer) == (code, True), answer
        assert sum(bool(each.seen) for each in backends) == num_asked
        assert router.counts("retries").total() == num_asked - 1
        assert sum(each.num_failures for each in router.fleet.replicas.values()) == num_failures
        until(lambda: router.states() == ["up"] * len(answers) and not router.app.exchanges)
        until(lambda: not any(each.pool.busy for each in router.fleet.replicas.values()))
        counts = {key[2]: count for key, count in router.app.metrics.counts.items() if key[0] == "requests"}
        assert counts == {code: 1}


@pytest.mark.parametrize("others", [[ok], []])
def test_a_replica_that_answers_with_errors_is_ejected_until_a_trial_succeeds(others: list[Answer]) -> None:
    """The trial is one request. A replica that no other can replace is sent all requests all the same."""
    with stub_fleet(sick, *others, policy="round-robin") as (router, (bad, *_)):
        while router.state(bad.url) != "ejected":
            router.complete()
        bad.answer = trial = Hold()
        until(lambda: router.state(bad.url) == "trial")
        expected = len(bad.seen) + (1 if others else 3)
        with clients(router.port, *3 * [post()]) as socks:
            until(lambda: len(bad.seen) == expected)
            trial.go.set()
            assert [status(sock.recv(4096)) for sock in socks] == [200] * 3
        until(lambda: router.state(bad.url) == "up")
        assert len(bad.seen) == expected >= FAILURES_TO_EJECT + 1


def test_at_most_half_of_the_replicas_are_ejected() -> None:
    with stub_fleet(*4 * [sick]) as (router, _):
        for _ in range(100):
            assert router.complete().status_code == 500  # the replicas' own word, not "no replica is there"
        available = router.call(
            lambda: [router.fleet.is_available(each) for each in router.fleet.replicas.values()].count(True)
        )
        assert available >= 2


def test_beyond_max_requests_the_answer_is_429() -> None:
    hold = Hold()
    with (
        stub(hold) as backend,
        running_router(backend.url, max_requests=2) as router,
        clients(router.port, *2 * [post()]) as socks,
    ):
        until(lambda: len(backend.seen) == 2)
        answer = exchange(router.port, post())
        assert status(answer) == 429 and b"retry-after: 1" in answer and b"max-requests" in answer
        hold.go.set()
        assert [status(sock.recv(4096)) for sock in socks] == [200, 200]


@pytest.mark.parametrize("end", [None, FULL], ids=["of a kept connection", "of a busy replica"])
def test_every_attempt_has_the_whole_response_timeout(end: bytes | None) -> None:
    """Where a kept connection breaks, the next attempt goes to the same replica."""
    first, second = Hold(answer=end), Hold()
    with stub_fleet(ok, ok, policy="round-robin") as (router, backends):
        assert [router.complete().status_code for _ in range(2)] == [200] * 2
        backends[0].answer = backends[1].answer = in_turn(first, second)
        with clients(router.port, post()) as (sock,):
            assert first.is_asked.wait(60)
            ended_s = time.monotonic()
            first.go.set()
            assert second.is_asked.wait(60)
            check_progress(router, ended_s + 60)
            second.go.set()
            assert status(read_all(sock)) == 200
        assert not any(each.num_failures for each in router.fleet.replicas.values())


def test_a_kept_connection_that_the_replica_closed_costs_nothing() -> None:
    with stub(lambda seen, sock: sock.sendall(whole())) as backend, running_router(backend.url) as router:
        assert [router.complete().status_code for _ in range(5)] == [200] * 5
        assert router.fleet.replicas[backend.url].num_failures == 0


@pytest.mark.parametrize(("rubbish", "reason"), table(__file__, "rubbish"))
def test_an_invalid_answer_of_a_replica_is_a_502_with_the_reason(rubbish: bytes, reason: str) -> None:
    with stub(lambda seen, sock: rubbish) as backend, running_router(backend.url) as router:
        answer = router.complete()
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (502, "server_error") and reason in error["message"]


FRAMES = EVENT + b"9;n=1\r\ndata: b\n\n\r\n0\r\nx: y\r\n\r\n"
LAST_CHUNK = FRAMES.index(b"0\r\nx")


def test_a_stream_that_breaks_off_ends_with_an_error_event_or_is_cut() -> None:
    """An error event can only follow a complete chunk: behind the first digits of a size it would change the size."""
    relayed = threading.Event()
    end = 0  # of what the replica sends

    def answer(seen: Seen, sock: socket.socket) -> None:
        sock.sendall(STREAM + EVENT)
        assert relayed.wait(60)
        sock.sendall(FRAMES[len(EVENT) : end])

    with stub(answer) as backend, running_router(backend.url) as router:
        for end in range(len(EVENT), len(FRAMES)):
            relayed.clear()
            with connect(router.port) as sock:
                sock.sendall(post())
                received = b""
                while not received.endswith(EVENT):
                    received += sock.recv(65536)
                relayed.set()
                body = (received + read_all(sock)).partition(b"\r\n\r\n")[2]
            if end in (len(EVENT), LAST_CHUNK):
                size, _, rest = body[end:].partition(b"\r\n")
                event, after = rest[: int(size, 16)], rest[int(size, 16) :]
                assert event.startswith(b"event: error\ndata: {") and event.endswith(b"}\n\ndata: [DONE]\n\n")
                assert json.loads(event.split(b"\n")[1].removeprefix(b"data: "))["error"]["code"] == 502
                assert after == b"\r\n0\r\n\r\n"
            else:
                assert FRAMES[:end].startswith(body), end
        assert router.app.metrics.counts["broken_streams",] == len(FRAMES) - len(EVENT)
        assert not router.counts("retries")


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_router_that_is_held_up_does_not_take_an_answer_for_late(is_connected: bool) -> None:
    """Each round of the loop takes longer than a time-out, so timers are due before what came in time is read."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
            listener.setblocking(False)
            replica = Replica(Backend.of(f"http://127.0.0.1:{listener.getsockname()[1]}"), connect_timeout_s=0.05)
            served: list[socket.socket] = []

            def serve() -> None:
                """Answer all that has come."""
                with contextlib.suppress(BlockingIOError):
                    served.append(stack.enter_context(listener.accept()[0]))
                    served[-1].setblocking(False)
                for sock in served:
                    with contextlib.suppress(BlockingIOError):
                        if sock.recv(65536):
                            sock.sendall(whole())

            def hold_up() -> None:
                serve()
                time.sleep(delay_s)
                loop.call_soon(hold_up)

            loop, delay_s = asyncio.get_running_loop(), 0.0
            loop.call_soon(hold_up)
            if is_connected:
                assert await fetch(replica.pool, "/ready", b"", 60.0) == (200, b"{}")
            delay_s = 0.1
            assert await fetch(replica.pool, "/ready", b"", 0.05) == (200, b"{}")
            assert len(served) == 1
            replica.pool.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_a_router_that_is_held_up_does_not_take_a_client_for_late(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(header_timeout_s=1.0, body_timeout_s=1.0)
    with stub() as backend, running_router(backend.url, limits=limits) as router, connect(router.port) as sock:
        sock.sendall(post(b'{"prompt":"abc"}')[:30])
        until(lambda: any(not each.is_idle for each in router.app.edge.connections))
        is_held_up, is_sent = threading.Event(), threading.Event()
        admit = router.app.admit

        def slowly(request: ClientRequest) -> HttpError | None:
            # While sockets are being read: what comes now is looked at after the timers.
            is_held_up.set()
            time.sleep(1.5)
            assert is_sent.wait(60)
            return admit(request)

        monkeypatch.setattr(router.app.edge, "admit", slowly)
        with connect(router.port) as other:
            other.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert is_held_up.wait(60)
            monkeypatch.undo()
            sock.sendall(post(b'{"prompt":"abc"}')[30:])
            is_sent.set()
            assert status(read_all(sock)) == 200
