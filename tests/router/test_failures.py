"""Replicas that die, stop, drain, fail and fill up, under load: what clients see, and what the fleet learns."""

import asyncio
import contextlib
import dataclasses
import json
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import httpx
import pytest
import uvloop

from penstock.engine.http.errors import HttpError
from penstock.engine.http.limits import Limits
from penstock.engine.text.prompt import INLINE_CHARS
from penstock.router.backend import Backend
from penstock.router.exchange import STALLED_S
from penstock.router.fleet.fleet import RESERVE, RetryBudget
from penstock.router.fleet.replica import FAILURES_TO_EJECT, Replica
from penstock.router.http.heads import ClientRequest
from penstock.router.http.upstream import fetch
from penstock.router.leg import Leg
from tests.support.raw_http import clients, connect, exchange, post, read_all, status
from tests.support.refusals import table
from tests.support.router_fleet import (
    ADMIN,
    QUICK,
    RunningRouter,
    mock_fleet,
    mock_replicas,
    running_router,
    stub_fleet,
    until,
)  # fmt: skip
from tests.support.router_stub import EVENT, STREAM, Answer, Hold, Seen, hang_up, ok, stub, whole


def sick(seen: Seen, sock: socket.socket) -> bytes:
    return whole(b"{}", b"500 Internal Server Error")


def load(
    url: str, count: int, concurrency: int = 24, during: Callable[[], object] = lambda: None
) -> list[tuple[int, str]]:
    """Send `count` requests, call `during` when a third are done; return the status and end of each answer."""
    gate, results = asyncio.Semaphore(concurrency), []

    async def one(client: httpx.AsyncClient, index: int) -> None:
        body = {"prompt": f"prompt {index}", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        async with gate:
            answer = await client.post(url + "/v1/completions", json=body)
            results.append((answer.status_code, answer.text[-400:]))
            if len(results) == count // 3:
                await asyncio.to_thread(during)

    async def all_of_them() -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(one(client, index) for index in range(count)))

    asyncio.run(all_of_them())
    return results


def without_retries(router: RunningRouter) -> None:
    router.fleet.budget.share = router.fleet.budget.tokens = 0.0


def test_when_a_replica_is_killed_what_waited_there_goes_elsewhere_though_no_retry_is_left() -> None:
    """Its death is no misconduct that retries could make worse: those requests are not computed there any more."""
    with mock_fleet(3, inter_token_s=0.02) as (router, replicas):
        without_retries(router)

        def kill_what_others_wait_for() -> None:
            replicas[1].send(signal.SIGSTOP)
            until(lambda: router.view(replicas[1].url)["requests_in_flight"] > 0)
            replicas[1].send(signal.SIGKILL)

        results = load(router.url, 60, during=kill_what_others_wait_for)
        assert Counter(code for code, _ in results) == {200: 60}
        assert router.counts("retries").keys() & {"lost", "unreachable", "moved"}
        until(lambda: sorted(router.states()) == ["down", "up", "up"])


def test_a_replica_that_dies_with_its_listening_socket_last_loses_no_request() -> None:
    with stub_fleet(hang_up, ok, policy="round-robin") as (router, (dying, _)):
        without_retries(router)

        def die(seen: Seen, sock: socket.socket) -> None:
            dying.is_dying = True

        dying.answer = die
        assert [router.complete().status_code for _ in range(2)] == [200, 200]
        assert len(dying.seen) == 1 and router.counts("retries") == {"lost": 1}


def test_a_replica_that_dies_with_its_listening_socket_first_loses_no_request() -> None:
    """Then the probe is refused before the connections of its requests break."""
    with stub_fleet(ok, ok, policy="round-robin") as (router, (dying, _)):
        without_retries(router)
        dying.answer = hold = Hold(answer=None)
        with clients(router.port, *2 * [post()]) as socks:
            assert hold.is_asked.wait(60)
            dying.is_dying = True
            router.refuse(dying.url)
            assert [status(sock.recv(4096)) for sock in socks] == [200, 200]
        assert router.counts("retries") == {"moved": 1}


def test_whether_a_replica_has_died_is_asked_once_for_all_of_its_requests() -> None:
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
def test_a_bug_of_ours_is_a_500_and_the_request_does_not_count_for_ever(
    is_long: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "a" * (INLINE_CHARS + 1 if is_long else 1)
    with stub() as backend, running_router(backend.url) as router:
        monkeypatch.setattr(RetryBudget, "deposit", lambda *_: 1 // 0)
        assert router.complete(prompt).status_code == 500
        monkeypatch.undo()
        monkeypatch.setattr(Leg, "start", lambda *_: 1 // 0)  # with its load charged
        assert router.complete(prompt).status_code == 500
        monkeypatch.undo()
        assert router.call(lambda: len(router.app.exchanges)) == 0 and "ZeroDivisionError" in caplog.text
        assert router.complete(prompt).status_code == 200


def test_a_replica_that_is_added_again_lets_what_it_had_begun_finish() -> None:
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


def look(router: RunningRouter, now_s: float) -> None:
    """Let the router look at its running requests as if it were `now_s`."""

    def look_at_each() -> None:
        for each in list(router.app.exchanges):
            each.check_progress(now_s, response_s=60)

    router.call(look_at_each)


def test_a_removed_replica_that_dies_keeps_no_request_waiting() -> None:
    """Its connections stay open, as those of a host without power do."""
    waits, streams = holds = Hold(), Hold(first=STREAM + EVENT)
    with stub_fleet(ok, ok, policy="round-robin", admin_api_keys=(ADMIN,)) as (router, (dying, _)):
        replica, answers = router.fleet.replicas[dying.url], iter(holds)
        dying.answer = lambda seen, sock: next(answers)(seen, sock)
        with clients(router.port, *4 * [post()]) as socks:
            assert waits.is_asked.wait(60) and streams.is_asked.wait(60)
            until(lambda: "relaying" in [each.state for each in list(router.app.exchanges)])
            assert router.change("DELETE", url=dying.url).status_code == 200
            dying.is_dying = True
            until(lambda: replica.num_in_flight == 1)
            now_s = time.monotonic()
            look(router, now_s)  # which reports the event
            look(router, now_s + STALLED_S + 1)
            results = [read_all(sock) for sock in socks]
        assert [status(each) for each in results] == [200] * 4
        assert sum(b"[DONE]" in each for each in results) == 1
        until(lambda: not router.fleet.detached and dying.url not in router.fleet.replicas)


def test_a_stream_whose_replica_is_killed_ends_with_an_error_event_and_the_end_mark() -> None:
    with mock_fleet(2, inter_token_s=0.02) as (router, replicas):
        body = {"prompt": "abc", "max_tokens": 5000, "stream": True, "ignore_eos": True}
        with router.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            busy = next(each for each in router.fleet.replicas.values() if each.num_in_flight)
            next(each for each in replicas if each.url == busy.url).send(signal.SIGKILL)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["code"] == 502
        assert router.app.metrics.counts["broken_streams",] == 1
        assert not router.counts("retries")


def test_a_stopped_replica_is_taken_out_and_what_waited_there_goes_elsewhere() -> None:
    timeouts = dataclasses.replace(QUICK, probe_timeout_s=1.0)  # less, and a busy machine is taken for a stop
    with mock_fleet(3, timeouts, prefill_tps=2000, inter_token_s=0.01) as (router, replicas):

        def stop_until_it_is_out() -> None:
            """And no longer: an engine that was stopped for 8 s takes its core for dead."""
            replicas[1].send(signal.SIGSTOP)
            try:
                until(lambda: router.state(replicas[1].url) == "down")
            finally:
                replicas[1].send(signal.SIGCONT)

        results = load(router.url, 90, during=stop_until_it_is_out)
        assert Counter(code for code, _ in results) == {200: 90}
        until(lambda: router.states().count("up") == 3)


def test_when_all_are_down_the_answer_is_503_and_when_one_is_back_it_serves() -> None:
    with mock_fleet(1) as (router, (first,)):
        first.send(signal.SIGKILL)
        until(lambda: router.states() == ["down"])
        answer = router.complete()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert router.http.get("/ready").status_code == 503
        assert router.http.get("/health").status_code == 200
        with mock_replicas(1, port=first.port):
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
        results: list[tuple[int, str]] = []
        while rolling.is_alive():
            results += load(router.url, 40, concurrency=8)
        rolling.join()
        assert Counter(code for code, _ in results) == {200: len(results)}
        assert not any('"finish_reason":"abort"' in text for _, text in results)


def flaky(share: float) -> Answer:
    """A backend that hangs up on this share of the requests."""
    counts = Counter[str]()

    def answer(seen: Seen, sock: socket.socket) -> bytes | None:
        counts["all"] += 1
        if (counts["all"] * share) % 1 < share:
            counts["failed"] += 1
            return None
        return whole(b'{"ok":1}')

    return answer


def test_when_half_of_the_requests_fail_retries_stay_within_their_budget() -> None:
    with stub_fleet(*(flaky(0.5) for _ in range(4))) as (router, backends):
        results = load(router.url, 200, concurrency=8)
        assert {code for code, _ in results} <= {200, 502, 503}
        asked = sum(len(each.seen) for each in backends)
        assert 210 < asked <= 200 * 0.15 + 200 + RESERVE


def test_a_request_that_breaks_two_replicas_is_not_given_to_a_third() -> None:
    with stub_fleet(*4 * [hang_up]) as (router, backends):
        assert router.complete().status_code == 502
        assert sum(bool(each.seen) for each in backends) == 2


def test_a_busy_replicas_answer_is_replaced_by_anothers_and_passed_on_when_all_are_busy() -> None:
    full = whole(b'{"error":{"message":"full"}}', b"429 Too Many Requests", b"retry-after: 7")
    with stub_fleet(lambda seen, sock: full, ok, policy="round-robin") as (router, (busy, idle)):
        assert [router.complete().status_code for _ in range(6)] == [200] * 6
        assert busy.seen and router.counts("retries")["busy"]
        idle.answer = lambda seen, sock: full
        answer = router.complete()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert answer.json()["error"]["message"] == "full"
        assert router.states() == ["up", "up"]  # full is not sick
        counts = router.app.metrics.counts
        until(lambda: {key[2]: count for key, count in counts.items() if key[0] == "requests"} == {200: 6, 429: 1})


def test_a_busy_replicas_answer_that_breaks_off_is_not_passed_on() -> None:
    def break_off(seen: Seen, sock: socket.socket) -> None:
        sock.sendall(whole(b"{}", b"429 Too Many Requests")[:-1])

    with stub_fleet(break_off) as (router, _):
        answer = router.complete()
        assert answer.status_code == 502 and "error" in answer.json()


@pytest.mark.parametrize(("path", "expected"), [("/v1/responses", 502), ("/v1/completions", 504)])
def test_a_busy_replicas_answer_does_not_hide_that_a_request_may_have_run(path: str, expected: int) -> None:
    """After a 429 the client would send the request again, although the replica that was asked next has read it."""
    full, hold = whole(b"{}", b"429 Too Many Requests"), Hold(answer=None)
    answers = iter(list[Answer]([lambda seen, sock: full, hold]))
    request = post().replace(b"/v1/completions", path.encode())
    with (
        stub_fleet(*2 * [lambda seen, sock: next(answers)(seen, sock)]) as (router, _),
        clients(router.port, request) as (sock,),
    ):
        assert hold.is_asked.wait(60)
        if expected == 504:
            look(router, time.monotonic() + 61)
        hold.go.set()
        assert status(read_all(sock)) == expected


def test_a_replica_that_answers_with_errors_is_ejected_for_a_while_and_comes_back_by_a_trial() -> None:
    with stub_fleet(sick, ok, policy="round-robin") as (router, (bad, _)):
        codes = [router.complete().status_code for _ in range(4 * FAILURES_TO_EJECT)]
        assert codes.count(500) == FAILURES_TO_EJECT
        assert router.state(bad.url) == "ejected"
        bad.answer = ok
        until(lambda: router.state(bad.url) == "trial")
        router.complete(), router.complete()
        until(lambda: router.state(bad.url) == "up")


def test_misconduct_never_takes_out_more_than_its_share() -> None:
    with stub_fleet(*4 * [sick]) as (router, _):
        for _ in range(100):
            assert router.complete().status_code == 500  # the replicas' own word, not "no replica is there"
        available = router.call(
            lambda: [router.fleet.is_available(each) for each in router.fleet.replicas.values()].count(True)
        )
        assert available >= 2


def test_beyond_the_requests_a_replica_may_have_the_answer_is_429() -> None:
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


def test_a_replica_that_never_answers_is_given_up_without_a_second_try() -> None:
    timeouts = dataclasses.replace(QUICK, response_s=0.5)
    with stub_fleet(Hold(), ok, policy="round-robin", timeouts=timeouts) as (router, _):
        assert sorted(router.complete().status_code for _ in range(2)) == [200, 504]


@pytest.mark.parametrize("num_before", [0, 2])  # with kept connections, a new one to the same replica comes first
def test_every_attempt_has_the_whole_response_timeout(num_before: int) -> None:
    first, second = holds = Hold(answer=None), Hold()
    with stub_fleet(ok, ok, policy="round-robin") as (router, backends):
        assert [router.complete().status_code for _ in range(num_before)] == [200] * num_before
        answers = iter(holds)
        for each in backends:
            each.answer = lambda seen, sock: next(answers)(seen, sock)
        with clients(router.port, post()) as (sock,):
            assert first.is_asked.wait(60)
            broke_s = time.monotonic()
            first.go.set()
            assert second.is_asked.wait(60)
            look(router, broke_s + 60)
            second.go.set()
            assert status(read_all(sock)) == 200


def test_a_kept_connection_that_the_replica_closed_costs_nothing() -> None:
    def once(seen: Seen, sock: socket.socket) -> None:
        sock.sendall(whole())  # and hangs up, without having said so

    with stub(once) as backend, running_router(backend.url) as router:
        assert [router.complete().status_code for _ in range(5)] == [200] * 5
        assert router.fleet.replicas[backend.url].num_failures == 0


@pytest.mark.parametrize(("rubbish", "reason"), table(__file__, "rubbish"))
def test_rubbish_from_a_replica_is_a_502_with_the_reason_and_never_passed_on(rubbish: bytes, reason: str) -> None:
    with stub(lambda seen, sock: rubbish) as backend, running_router(backend.url) as router:
        answer = router.complete()
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (502, "server_error") and reason in error["message"]


FRAMES = EVENT + b"9;n=1\r\ndata: b\n\n\r\n0\r\nx: y\r\n\r\n"
LAST_CHUNK = FRAMES.index(b"0\r\nx")


def test_a_stream_that_breaks_off_is_well_framed_to_its_end_or_cut() -> None:
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
                assert event.startswith(b"event: error\n") and event.endswith(b"\n\ndata: [DONE]\n\n")
                assert after == b"\r\n0\r\n\r\n"
            else:
                assert FRAMES[:end].startswith(body), end


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_router_whose_loop_is_held_up_does_not_take_a_replica_that_answers_for_dead(is_connected: bool) -> None:
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


def test_a_client_is_not_late_when_it_is_the_router_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
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
