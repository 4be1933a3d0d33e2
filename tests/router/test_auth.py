"""The keys that replicas get and that change the fleet; tests/test_edges.py sends every route a wrong key."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.refusals import cases
from tests.support.router_fleet import ADMIN, RunningRouter, running_router, until
from tests.support.router_stub import Stub, stub

KEY, BACKEND = "sk-client", "sk-backend"
WITH_KEY, WITH_ADMIN = ({"authorization": f"Bearer {key}"} for key in (KEY, ADMIN))


@pytest.fixture(scope="module")
def router(backend: Stub) -> Iterator[RunningRouter]:
    with running_router(
        backend.url, api_keys=(KEY, "sk-other"), admin_api_keys=(ADMIN,), backend_api_key=BACKEND
    ) as started:
        yield started


@pytest.mark.parametrize(("key", "settings", "expected"), cases(__file__, "keys of replicas", KEY=KEY, BACKEND=BACKEND))
def test_a_replica_gets_the_right_key(key: str, settings: dict[str, Any], expected: list[bytes], backend: Stub) -> None:
    with running_router(backend.url, **settings) as router:
        router.http.post("/v1/completions", json={"prompt": "a"}, headers=WITH_KEY)
    assert backend.seen[-1].header(b"authorization") == expected


def test_only_the_admin_key_changes_the_fleet(router: RunningRouter, backend: Stub) -> None:
    with stub() as other:
        for method in ("POST", "DELETE"):
            for headers, expected in (({}, 401), (WITH_KEY, 403)):
                answer = router.http.request(method, "/replicas", json={"url": other.url}, headers=headers)
                assert answer.status_code == expected
        assert router.change("POST", url=other.url).status_code == 200
        until(lambda: router.states() == ["up", "up"])
        assert router.change("POST", url=other.url).status_code == 400  # it is there
        assert router.change("DELETE", url=other.url).status_code == 200
        until(lambda: list(router.fleet.replicas) == [backend.url])
        assert router.change("DELETE", url=other.url).status_code == 404
    assert router.http.get("/v1/models", headers=WITH_ADMIN).status_code == 401  # it opens nothing else

    with running_router(backend.url) as plain:  # without an admin key, nobody does
        answer = plain.change("POST", url="http://127.0.0.1:1")
    assert answer.status_code == 403 and "--admin-api-key" in answer.text


def test_no_answer_or_metric_contains_a_key(router: RunningRouter) -> None:
    answers = [router.http.get(path, headers=WITH_KEY) for path in ("/metrics", "/replicas", "/version")]
    texts = [f"{answer.headers} {answer.text}" for answer in answers]
    assert not any(key in text for key in (KEY, ADMIN, BACKEND) for text in texts)
