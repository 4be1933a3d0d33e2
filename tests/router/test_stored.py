"""Responses that replicas store: requests for one go to its replica, and nothing that changes the store is sent twice."""

import contextlib
import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from penstock.engine.http.auth import OWNER_HEADER, Keys
from penstock.router.backend import Backend
from tests.support.raw_http import connect, post, read_all, status
from tests.support.refusals import cases
from tests.support.router_fleet import RunningRouter, running_router, until
from tests.support.router_stub import Hold, Seen, Stub, first_fails, hang_up, ok, stub, whole
from tests.support.running_server import running

STORED = b"/v1/responses/resp_1"


@contextlib.contextmanager
def two(
    first_model: str = "m", second_model: str = "m", num_ready: int = 2
) -> Iterator[tuple[Stub, Stub, RunningRouter]]:
    """Yield two replicas, of which the second stores the response, and a router before them. The first ones are ready."""
    with stub() as first, stub() as second:
        for backend, name in ((first, first_model), (second, second_model)):
            backend.models = json.dumps({"data": [{"id": name}]}).encode()
        second.questions[STORED] = lambda _seen, _sock: whole(b'{"id": "resp_1"}')
        first.is_ready, second.is_ready = num_ready > 0, num_ready > 1
        with running_router(first.url, second.url, policy="round-robin", wait_for=num_ready) as router:
            yield first, second, router


@pytest.mark.parametrize("models", [("m", "m"), ("m", "other")])
def test_requests_for_a_stored_response_and_those_that_continue_it_go_to_its_replica(models: tuple[str, str]) -> None:
    with two(*models) as (first, second, router):
        for _ in range(3):
            assert router.http.get("/v1/responses/resp_1").json() == {"id": "resp_1"}
            assert router.http.post("/v1/responses/resp_1/cancel").status_code == 200  # without a body
            assert router.http.delete("/v1/responses/resp_1").status_code == 200
            body = {"model": models[1], "input": "x", "previous_response_id": "resp_1"}
            assert router.http.post("/v1/responses", json=body).status_code == 200
        from_a_page = router.http.post("/v1/responses/resp_1/cancel", headers={"origin": "http://localhost"})
        assert from_a_page.status_code == 415 and first.seen == []
        assert [seen.line.split()[0] for seen in second.seen] == [b"POST", b"DELETE", b"POST"] * 3


def test_a_response_that_no_replica_has_is_not_found() -> None:
    with two("m", "other") as (first, second, router):
        answer = router.http.get("/v1/responses/resp_2")
        assert answer.status_code == 404 and "resp_2" in answer.json()["error"]["message"]
        assert router.http.get("/v1/responses/a%20b").status_code == 404
        # A replica itself answers that it does not know the previous response.
        body = {"model": "m", "input": "x", "previous_response_id": "resp_2"}
        assert router.http.post("/v1/responses", json=body).status_code == 200
        assert (len(first.seen), len(second.seen)) == (1, 0)


@pytest.mark.parametrize("body", [None, {"input": "x", "previous_response_id": "resp_1"}])
@pytest.mark.parametrize(("fault", "expected"), cases(__file__, "faults of the replica that stores"))
def test_an_unavailable_replicas_response_is_not_lost(fault: str, expected: int, body: dict[str, str] | None) -> None:
    answers = {"error": whole(b"{}", b"500 Error"), "key": whole(b"{}", b"401 Unauthorized"), "break": None}
    with two() as (first, second, router):
        if fault in answers:
            second.questions[STORED] = second.answer = lambda _seen, _sock: answers[fault]
        else:
            second.is_ready, second.is_dying = fault != "draining", fault == "down"
            until(lambda: router.state(second.url) == fault)
        path = "/v1/responses" if body else "/v1/responses/resp_1"
        answer = router.http.request("POST" if body else "GET", path, json=body)
        assert answer.status_code == expected
        if expected == 503:
            assert answer.headers["retry-after"] == "1"
            assert fault == "draining" or "of 2 replicas" in answer.json()["error"]["message"]
        assert not first.seen


@pytest.mark.parametrize("num_ready", [0, 1])
def test_a_response_may_be_at_a_replica_that_was_not_reached_yet(num_ready: int) -> None:
    with two(num_ready=num_ready) as (_, _, router):
        answer = router.http.get("/v1/responses/resp_1")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("keys", [("sk-backend", "sk-direct"), ()], ids=["replicas with keys", "replicas without"])
def test_a_stored_response_belongs_to_the_key_that_created_it(keys: tuple[str, ...], num_replicas: int) -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(api_keys=keys)) for _ in range(num_replicas)]
        clients = ("sk-1", "sk-2")
        router = stack.enter_context(
            running_router(*(each.url for each in servers), api_keys=clients, backend_api_key=keys[0] if keys else None)
        )
        forged = {"X-Penstock-Owner": Keys(clients).identity(1).decode()}

        def ask(http: httpx.Client, key: str, method: str, stored_id: str, **headers: str) -> int:
            headers["authorization"] = f"Bearer {key}"
            if method != "POST":
                return http.request(method, f"/v1/responses/{stored_id}", headers=headers).status_code
            fields = {"input": "and then?", "previous_response_id": stored_id}
            return http.post("/v1/responses", json=fields, headers=headers).status_code

        first = {"input": "x", "max_output_tokens": 4}
        created = router.http.post("/v1/responses", json=first, headers={"authorization": "Bearer sk-1"})
        stored_id = created.json()["id"]
        for headers in ({}, forged):
            for http, key in ((router.http, "sk-2"), *((each.http, "sk-direct") for each in servers if keys)):
                answers = [ask(http, key, method, stored_id, **headers) for method in ("GET", "POST", "DELETE")]
                assert answers == [404, 400, 404], (key, headers)
        assert [ask(router.http, "sk-1", method, stored_id) for method in ("GET", "POST")] == [200, 200]
        statuses = [ask(each.http, "sk-backend", "GET", stored_id, **forged) for each in servers]
        assert sorted(statuses) == [200, 404][:num_replicas]  # with the replicas' key a client counts as the router
        assert ask(router.http, "sk-1", "DELETE", stored_id) == 200


def test_a_digest_of_the_clients_key_goes_with_every_request(backend: Stub) -> None:
    with running_router(backend.url, api_keys=("sk-1", "sk-2")) as router:
        seen = []
        for key, path in (("sk-1", "/v1/responses"), ("sk-2", "/v1/responses"), ("sk-1", "/v1/completions")):
            router.http.post(path, json={"input": "x"}, headers={"authorization": f"Bearer {key}"})
            seen.append(backend.seen[-1].header(OWNER_HEADER))
    assert [len(values) for values in seen] == [1, 1, 1] and seen[0] == seen[2] != seen[1]
    assert not any(b"sk-" in value for values in seen for value in values)


@pytest.mark.parametrize(("method", "path", "store", "is_repeated"), cases(__file__, "requests that break off"))
def test_stored_responses_change_only_once(method: str, path: str, store: dict[str, bool], is_repeated: bool) -> None:
    with two() as (first, second, router):
        first.answer = second.answer = first_fails(hang_up, ok)
        answer = router.http.request(method, path, json={"input": "x", "prompt": "x", **store})
        assert answer.status_code == (200 if is_repeated else 502)
        if is_repeated:
            assert first.seen and second.seen
        else:
            assert "not sent again" in answer.json()["error"]["message"]
            assert len(first.seen) + len(second.seen) == 1


def test_a_request_that_may_have_been_stored_does_not_move() -> None:
    with two() as (first, second, router), connect(router.port) as sock:
        first.answer = second.answer = hold = Hold(answer=None)
        sock.sendall(post().replace(b"/v1/completions", b"/v1/responses"))
        assert hold.is_asked.wait(60)
        (url,) = (each.url for each in (first, second) if each.seen)
        router.refuse(url)
        assert status(read_all(sock)) == 502
        assert len(first.seen) + len(second.seen) == 1


def test_a_request_for_a_stored_response_does_not_go_to_a_replica_that_joins_meanwhile() -> None:
    with two() as (_, holder, router), stub() as new, connect(router.port) as sock:
        holder.answer = hold = Hold(answer=None)
        sock.sendall(post(b'{"store":false,"previous_response_id":"resp_1"}').replace(b"completions", b"responses"))
        assert hold.is_asked.wait(60)
        router.call(lambda: router.app.apply("POST", Backend.of(new.url)))
        until(lambda: router.state(new.url) == "up")
        hold.go.set()
        assert status(read_all(sock)) == 502 and not new.seen


def test_a_request_that_is_stored_gets_a_new_connection() -> None:
    """If one broke, nobody could tell whether the replica had read the request."""
    used: set[socket.socket] = set()

    def once(_seen: Seen, sock: socket.socket) -> bytes | None:
        is_new = sock not in used
        used.add(sock)
        return whole() if is_new else None

    with stub(once) as backend, running_router(backend.url) as router:
        for _ in range(3):
            assert router.http.post("/v1/responses", json={"input": "x"}).status_code == 200
        assert len(backend.seen) == 3
        until(lambda: router.state(backend.url) == "up")
