"""Engines of another kind, whose events the router follows over their ZMQ publishers."""

import contextlib
import socket
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.router.backend import Backend, RouteError
from penstock.router.config import RouterConfig, check_together
from tests.support.engine_publisher import StandIn, names_of, removed, stand_in, stored
from tests.support.fake_engine import byte_tokenizer
from tests.support.refusals import table
from tests.support.router_fleet import RunningRouter, running_router, until
from tests.support.router_stub import stub, whole

TEXT = "a long beginning " * 12
IDS = byte_tokenizer().encode(TEXT)


def predicted(router: RunningRouter, engine: StandIn, text: str = TEXT) -> int:
    """Return how many tokens of a prompt the router believes to be cached at the engine."""
    return router.predicted(array("i", byte_tokenizer().encode(text)).tobytes())[engine.http.url]


def completions(engine: StandIn) -> int:
    return sum(b"/v1/completions" in seen.line for seen in engine.http.seen)


def is_followed(router: RunningRouter, engine: StandIn) -> bool:
    view = router.view(engine.http.url)
    return bool(view["placement"]["knowledge"] == "events" and view["events"]["connected"])


@contextlib.contextmanager
def followed(
    has_replay: bool = True, **settings: Any
) -> Iterator[tuple[RunningRouter, StandIn, Callable[[int], None]]]:
    """Yield a router that follows an engine, the engine, and a function that waits until so many blocks are known."""
    with stand_in(**settings) as engine:
        backend = engine.backend if has_replay else engine.backend.partition(",replay")[0]
        with running_router(backend, tokenizes=True) as router:
            until(lambda: is_followed(router, engine))

            def know(count: int) -> None:
                until(lambda: router.num_blocks(engine.http.url) == count and is_followed(router, engine))

            yield router, engine, know


def test_published_blocks_of_any_size_are_known_and_attract_requests() -> None:
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
            for _ in range(4):
                assert router.complete(TEXT, model="m").status_code == 200
            assert (completions(small), completions(large)) == (4, 0)


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.parametrize(
    ("host", "says_topic"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1", False),
        pytest.param("[::1]", True, marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
    ],
)
def test_a_gap_is_filled_from_the_replay_endpoint(host: str, says_topic: bool) -> None:
    with followed(host=host, says_topic=says_topic) as (router, engine, know):
        engine.publisher.publish(stored(IDS[:64]))
        know(4)
        engine.publisher.publish(removed(names_of(IDS[:64], 16)[3:]), is_lost=True)
        engine.publisher.publish(stored(IDS[:48] + IDS[100:116], start=3), is_lost=True)
        engine.publisher.publish(stored(IDS[:32] + [7] * 16, start=2))
        know(5)
        view = router.view(engine.http.url)["events"]
        assert (view["gaps"], view["replayed"]) == (1, 4)


@pytest.mark.parametrize("has_replay", [True, False])
def test_after_a_gap_that_cannot_be_filled_no_older_block_is_believed(has_replay: bool) -> None:
    with followed(has_replay, buffer=1) as (router, engine, know):
        engine.publisher.publish(stored(IDS[:32]))
        know(2)
        engine.publisher.publish(removed(names_of(IDS[:32], 16)), is_lost=True)
        engine.publisher.publish(stored([9] * 16))
        until(lambda: router.view(engine.http.url)["events"]["gaps"] == 1)
        know(1)
        # A block that is stored once more and then removed is not there any more.
        engine.publisher.publish(stored(IDS[:32]))
        know(3)
        engine.publisher.publish(removed(names_of(IDS[:32], 16)))
        know(1)


@pytest.mark.parametrize(("has_replay", "is_restarted"), [(True, True), (False, False)])
def test_when_the_batches_are_numbered_anew_no_older_block_is_believed(has_replay: bool, is_restarted: bool) -> None:
    with followed(has_replay) as (_, engine, know):
        engine.publisher.publish(stored(IDS[:64]))
        engine.publisher.publish(stored([9] * 16))
        know(5)
        if is_restarted:
            engine.restart()
            know(0)
        else:
            engine.publisher.count_from_zero()
        engine.publisher.publish(stored(IDS[:32]))
        know(2)


@pytest.mark.parametrize("is_removed", [True, False])
def test_an_engine_that_is_removed_or_makes_other_tokens_is_not_followed(is_removed: bool) -> None:
    with followed() as (router, engine, _):
        feeds, url = router.router.feeds, engine.http.url
        feed = feeds._by_url[url]
        if is_removed:
            router.call(lambda: router.app.apply("DELETE", Backend.of(url)))
        else:
            engine.http.answer = lambda seen, sock: whole(b'{"tokens": [1]}')
            engine.http.models = b'{"data": [{"id": "another"}]}'
        until(feed.done)
        if not is_removed:
            until(feeds._by_url[url].done)
            assert router.view(url)["events"] is None


def test_the_cached_tokens_in_an_answer_are_compared_with_the_prediction() -> None:
    answer = whole(b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}}')
    with stub(lambda seen, sock: answer) as engine, running_router(engine.url, tokenizes=True) as router:
        for _ in range(20):
            router.complete(TEXT, model="m")
        assert router.view(engine.url)["placement"]["knowledge"] == "approximate"
        assert router.placement_metrics()["compared_requests_total"] == 20


@pytest.mark.parametrize(("text", "part"), table(__file__, "backends"))
def test_an_invalid_backend_is_refused(text: str, part: str) -> None:
    with pytest.raises(RouteError) as error:
        Backend.of(text)
    assert part in str(error.value)


def test_a_backend_is_parsed() -> None:
    text = "http://h:8000,events=tcp://h:5557,replay=tcp://h:5558,prefill=h:9100"
    assert Backend.of(text) == Backend("http://h:8000", "tcp://h:5557", "tcp://h:5558", "h:9100")
    assert Backend.of("http://[::1]:8000,events=5557").events == "tcp://[::1]:5557"
    assert Backend.of("http://h,prefill=[::1]:9100") == Backend("http://h:80", prefill="[::1]:9100")
    assert Backend.of("http://[::1]:8000,prefill=9100").prefill == "[::1]:9100"
    with pytest.raises(RouteError, match="--tokenizer"):
        check_together(RouterConfig(backends=("http://h:1,events=1",)))
