"""Requests longer than a replica's context: they go where they fit, if that is anywhere."""

import json

from tests.support.engine_publisher import stand_in
from tests.support.router_fleet import mock_replicas, running_router, until
from tests.support.router_stub import stub


def models(max_model_len: int | None) -> bytes:
    return json.dumps({"data": [{"id": "m", "max_model_len": max_model_len}]}).encode()


def test_a_request_goes_only_where_its_answer_fits() -> None:
    with stub() as short, stub() as long:
        short.models, long.models = models(100), models(1000)
        with running_router(short.url, long.url) as router:
            for number in range(12):
                assert router.complete(f"number {number}", max_tokens=101).status_code == 200
                assert router.chat(f"number {number}", max_completion_tokens=1000).status_code == 200
            assert not short.seen and len(long.seen) == 24
            for number in range(40):
                assert router.complete(f"short {number}", max_tokens=100).status_code == 200
            assert short.seen
            before = len(short.seen) + len(long.seen)
            assert router.complete(max_tokens=1001).status_code == 200  # a replica says what it makes of that
            assert len(short.seen) + len(long.seen) == before + 1
            asked = router.http.post("/route", json={"prompt": "x", "max_tokens": 500}).json()
            assert asked["replica"] == long.url
            long.is_ready = False
            until(lambda: "down" in router.states() or "draining" in router.states())
            assert router.complete(max_tokens=500).status_code == 503  # it is not too long, only who holds it is away


def test_a_replica_that_does_not_say_its_context_is_asked_whatever_is_wanted() -> None:
    with stub() as short, stub() as silent:
        short.models, silent.models = models(100), models(None)
        with running_router(short.url, silent.url) as router:
            assert [router.complete(max_tokens=10**6).status_code for _ in range(5)] == [200] * 5
            assert not short.seen


def test_the_prompt_counts_where_its_tokens_are_sure() -> None:
    with (
        mock_replicas(1, max_model_len=200) as short,
        mock_replicas(1, max_model_len=400) as long,
        running_router(short[0].url, long[0].url, tokenizes=True) as router,
    ):
        for number in range(6):
            assert router.complete(f"{number}" * 195, max_tokens=10).status_code == 200
        assert router.fleet.replicas[short[0].url].num_requests == 0
        assert router.fleet.replicas[long[0].url].num_requests == 6
        assert router.complete("x" * 395, max_tokens=10).status_code == 400  # too long for both: said by one of them
        assert sum(replica.num_requests for replica in router.fleet.replicas.values()) == 7


def test_tokens_that_an_engine_may_make_otherwise_do_not_count() -> None:
    with stand_in() as engine:
        engine.http.models = models(100)
        with running_router(engine.http.url, tokenizes=True) as router:
            assert router.complete("x" * 300, max_tokens=4).status_code == 200
