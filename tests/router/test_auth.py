"""Whose key the replicas get, and who may change the fleet; tests/test_edges.py asks every route for a key."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.raw_http import exchange, status
from tests.support.refusals import table
from tests.support.router_fleet import RunningRouter, running_router, until
from tests.support.router_stub import Stub, stub

KEY, ADMIN, BACKEND = "sk-client", "sk-admin", "sk-backend"


@pytest.fixture(scope="module")
def router(backend: Stub) -> Iterator[RunningRouter]:
    with running_router(
        backend.url, api_keys=(KEY, "sk-other"), admin_api_keys=(ADMIN,), backend_api_key=BACKEND
    ) as started:
        yield started


def ask(router: RunningRouter, method: str, target: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: localhost", "connection: close", *headers]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return exchange(router.port, "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"api_keys": (KEY,), "backend_api_key": BACKEND}, [f"Bearer {BACKEND}".encode()]),
        ({}, [f"Bearer {KEY}".encode()]),
        ({"api_keys": (KEY,)}, []),
    ],
    ids=["the backend's", "the client's where the router has none", "none where replicas need none"],
)
def test_which_key_a_replica_gets(settings: dict[str, Any], expected: list[bytes], backend: Stub) -> None:
    with running_router(backend.url, **settings) as router:
        ask(router, "POST", "/v1/completions", f"authorization: Bearer {KEY}", body=b'{"prompt":"a"}')
    assert backend.seen[-1].header(b"authorization") == expected


def test_only_the_admin_key_changes_the_fleet(router: RunningRouter, backend: Stub) -> None:
    with stub() as other:
        body = b'{"url":"%s"}' % other.url.encode()
        for method in ("POST", "DELETE"):
            assert status(ask(router, method, "/replicas", body=body)) == 401
            assert status(ask(router, method, "/replicas", f"authorization: Bearer {KEY}", body=body)) == 403
        admin = f"authorization: Bearer {ADMIN}"
        assert status(ask(router, "POST", "/replicas", admin, body=body)) == 200
        until(lambda: router.states() == ["up", "up"])
        assert status(ask(router, "POST", "/replicas", admin, body=body)) == 400  # it is there
        assert status(ask(router, "DELETE", "/replicas", admin, body=body)) == 200
        until(lambda: list(router.fleet.replicas) == [backend.url])
        assert status(ask(router, "DELETE", "/replicas", admin, body=body)) == 404
    assert status(ask(router, "GET", "/v1/models", admin)) == 401  # it opens nothing else


def test_without_an_admin_key_nobody_changes_the_fleet(backend: Stub) -> None:
    with running_router(backend.url) as plain:
        answer = ask(plain, "POST", "/replicas", body=b'{"url":"http://127.0.0.1:1"}')
    assert status(answer) == 403 and b"--admin-api-key" in answer


@pytest.mark.parametrize("url", table(__file__, "addresses"))
def test_a_replica_must_be_a_plain_address(router: RunningRouter, url: str) -> None:
    answer = ask(router, "POST", "/replicas", f"authorization: Bearer {ADMIN}", body=b'{"url":"%s"}' % url.encode())
    assert status(answer) == 400 and b'"param":"url"' in answer


def test_a_key_never_stands_in_an_answer_or_a_metric(router: RunningRouter) -> None:
    texts = [ask(router, "GET", path, f"authorization: Bearer {KEY}") for path in ("/metrics", "/replicas", "/version")]
    assert not any(key.encode() in text for key in (KEY, ADMIN, BACKEND) for text in texts)
