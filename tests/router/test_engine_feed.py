"""A fleet of engines of another kind, followed over their ZMQ publishers."""

from typing import Any

import httpx
import pytest

from penstock.router.backend import Backend, RouteError
from penstock.router.config import RouterConfig, check_together, resolve
from tests.support.engine_publisher import StandIn, answer_with, names_of, removed, stand_in, stored
from tests.support.fake_engine import byte_tokenizer
from tests.support.refusals import table
from tests.support.router_fleet import RunningRouter, running_router, until

TEXT = "a long beginning " * 12
IDS = byte_tokenizer().encode(TEXT)


def view(router: RunningRouter, engine: StandIn) -> dict[str, Any]:
    replicas = router.http.get("/replicas").json()["replicas"]
    return next(dict(each) for each in replicas if each["url"] == engine.http.url)


def blocks(router: RunningRouter, engine: StandIn) -> int:
    return int(view(router, engine)["placement"]["cached_blocks"]["device"])


def predicted(router: RunningRouter, engine: StandIn, text: str = TEXT, **fields: Any) -> int:
    """Tokens of a prompt that are thought to be cached there."""
    found = router.http.post("/route", json={"prompt": text, **fields}).json()
    return int(next(each["cached_tokens"] for each in found["replicas"] if each["url"] == engine.http.url))


def completions(engine: StandIn) -> int:
    return sum(b"/v1/completions" in seen.line for seen in engine.http.seen)


def is_followed(router: RunningRouter, engine: StandIn) -> bool:
    seen = view(router, engine)
    return bool(seen["placement"]["knowledge"] == "events" and seen["events"]["connected"])


def test_what_engines_publish_is_known_whatever_the_size_of_their_blocks() -> None:
    with stand_in() as small, stand_in() as large:
        small.publisher.publish(stored(IDS))  # before the router came
        with running_router(small.backend, large.backend, tokenizes=True) as router:
            until(lambda: is_followed(router, small) and is_followed(router, large))
            large.publisher.publish(stored(IDS, size=64))
            until(lambda: predicted(router, small) == len(IDS) // 16 * 16)
            until(lambda: predicted(router, large) == len(IDS) // 64 * 64)
            assert predicted(router, small, "another text " * 20) == 0
            large.publisher.publish(removed(names_of(IDS, 64)))
            until(lambda: predicted(router, large) == 0)
            assert predicted(router, small) > 0


@pytest.mark.parametrize("says_topic", [True, False])
def test_a_gap_is_filled_from_the_replay_endpoint(says_topic: bool) -> None:
    with stand_in(says_topic=says_topic) as engine, running_router(engine.backend, tokenizes=True) as router:
        until(lambda: is_followed(router, engine))
        engine.publisher.publish(stored(IDS[:64]))
        until(lambda: blocks(router, engine) == 4)
        engine.publisher.publish(removed(names_of(IDS[:64], 16)[3:]), is_lost=True)
        engine.publisher.publish(stored(IDS[:48] + IDS[100:116], start=3), is_lost=True)
        engine.publisher.publish(stored(IDS[:32] + [7] * 16, start=2))
        until(lambda: blocks(router, engine) == 5)
        seen = view(router, engine)["events"]
        assert (seen["gaps"], seen["replayed"]) == (1, 4)


@pytest.mark.parametrize("has_replay", [True, False])
def test_after_a_gap_that_cannot_be_filled_nothing_is_believed_that_may_have_been_removed(has_replay: bool) -> None:
    with stand_in(buffer=1) as engine:
        backend = engine.backend if has_replay else engine.backend.partition(",replay")[0]
        with running_router(backend, tokenizes=True) as router:
            until(lambda: is_followed(router, engine))
            engine.publisher.publish(stored(IDS[:32]))
            until(lambda: blocks(router, engine) == 2)
            engine.publisher.publish(removed(names_of(IDS[:32], 16)), is_lost=True)
            engine.publisher.publish(stored([9] * 16))
            until(lambda: view(router, engine)["events"]["gaps"] == 1 and is_followed(router, engine))
            until(lambda: blocks(router, engine) == 1)
            # A block that is stored once more and then removed is not there any more.
            engine.publisher.publish(stored(IDS[:32]))
            until(lambda: blocks(router, engine) == 3)
            engine.publisher.publish(removed(names_of(IDS[:32], 16)))
            until(lambda: blocks(router, engine) == 1)


@pytest.mark.parametrize("has_replay", [True, False])
def test_when_the_numbers_of_batches_start_again_nothing_older_is_believed(has_replay: bool) -> None:
    with stand_in() as engine:
        backend = engine.backend if has_replay else engine.backend.partition(",replay")[0]
        with running_router(backend, tokenizes=True) as router:
            until(lambda: is_followed(router, engine))
            engine.publisher.publish(stored(IDS[:64]))
            engine.publisher.publish(stored([9] * 16))
            until(lambda: blocks(router, engine) == 5)
            engine.publisher.count_from_zero()
            engine.publisher.publish(stored(IDS[:32]))
            until(lambda: blocks(router, engine) == 2 and is_followed(router, engine))


def test_an_engine_that_starts_again_has_nothing_cached() -> None:
    with stand_in() as engine, running_router(engine.backend, tokenizes=True) as router:
        until(lambda: is_followed(router, engine))
        engine.publisher.publish(stored(IDS[:64]))
        until(lambda: blocks(router, engine) == 4)
        engine.restart()
        until(lambda: blocks(router, engine) == 0 and is_followed(router, engine))
        engine.publisher.publish(stored(IDS[:32]))
        until(lambda: blocks(router, engine) == 2)


def test_without_a_replay_endpoint_a_connection_begins_with_nothing() -> None:
    with stand_in() as engine:
        backend = engine.backend.partition(",replay")[0]
        with running_router(backend, tokenizes=True) as router:
            until(lambda: is_followed(router, engine))
            engine.publisher.publish(stored(IDS[:64]))
            until(lambda: blocks(router, engine) == 4)
            engine.restart()
            until(lambda: blocks(router, engine) == 0 and is_followed(router, engine))


def test_an_engine_that_is_taken_out_is_not_listened_to_any_more() -> None:
    with stand_in() as engine, running_router(engine.backend, tokenizes=True) as router:
        until(lambda: is_followed(router, engine))
        follower = router.router.feeds._by_url[engine.http.url]
        router.call(lambda: router.app.apply("DELETE", engine.http.url, None))
        until(follower.done)


def test_requests_go_where_their_beginning_is_cached() -> None:
    with stand_in() as one, stand_in() as other:
        with running_router(one.backend, other.backend, tokenizes=True) as router:
            until(lambda: is_followed(router, one) and is_followed(router, other))
            other.publisher.publish(stored(IDS))
            until(lambda: predicted(router, other) > 0)
            for _ in range(4):
                assert router.complete(TEXT, model="m").status_code == 200
        assert (completions(one), completions(other)) == (0, 4)


def test_answers_that_count_their_cached_tokens_correct_a_guess() -> None:
    with stand_in(answer_with(0)) as engine, running_router(engine.http.url, tokenizes=True) as router:
        for _ in range(20):
            router.complete(TEXT, model="m")
        seen = view(router, engine)["placement"]
        assert seen["knowledge"] == "answers"
        metrics = router.call(lambda: next(iter(router.fleet.groups.values())).placement.metrics())
        assert metrics["compared_requests_total"] == 20 and metrics["answers_replicas"] == 1
        assert seen["cached_blocks"]["device"] <= 32  # of a guess that began with 1,000


def test_a_path_without_a_prompt_is_refused_by_route() -> None:
    with stand_in() as engine, running_router(engine.http.url) as router:
        answer = router.http.post("/route", json={"prompt": TEXT, "path": "/v1/completion"})
    assert answer.status_code == 400 and "'/v1/completion' is not one of" in answer.json()["error"]["message"]


def test_requests_of_others_count_at_a_choice() -> None:
    with stand_in() as busy, stand_in() as idle:
        busy.metrics = busy.metrics.replace('waiting{engine="0"} 0.0', 'waiting{engine="0"} 7.0')
        with running_router(busy.http.url, idle.http.url, policy="least-loaded") as router:
            until(lambda: view(router, busy)["placement"]["other_requests"] == 7)
            for _ in range(4):
                router.complete(model="m")
            assert view(router, busy)["engine"]["waiting"] == 7
        assert (len(busy.http.seen), len(idle.http.seen)) == (0, 4)


def test_each_replica_is_given_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE_KEY", "sk-one")
    headers = {"authorization": "Bearer mine"}
    with stand_in() as one, stand_in() as other:
        backends = f"{one.http.url},key=ONE_KEY", other.http.url
        with running_router(*backends, policy="round-robin") as router:
            for _ in range(2):
                httpx.post(router.url + "/v1/completions", json={"model": "m", "prompt": "x"}, headers=headers)
    assert [seen.header(b"authorization") for seen in one.http.seen] == [[b"Bearer sk-one"]]
    assert [seen.header(b"authorization") for seen in other.http.seen] == [[b"Bearer mine"]]


@pytest.mark.parametrize(
    ("text", "part"),
    table(__file__, "backends"),
)
def test_a_backend_that_is_written_wrongly_is_refused(text: str, part: str) -> None:
    with pytest.raises(RouteError) as error:
        Backend.of(text)
    assert part in str(error.value)


def test_a_backend_is_read_and_written() -> None:
    text = "http://h:8000,events=tcp://h:5557,replay=tcp://h:5558,key=A_KEY"
    assert Backend.of(text).text == text
    assert Backend.of("http://[::1]:8000,events=5557").events == "tcp://[::1]:5557"
    with pytest.raises(RouteError, match="A_KEY is not set"):
        resolve(RouterConfig(backends=("http://h:1,key=A_KEY",)), {})
    with pytest.raises(RouteError, match="--tokenizer"):
        check_together(RouterConfig(backends=("http://h:1,events=1",)))
