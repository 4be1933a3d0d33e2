"""Cache events of vLLM and SGLang: followed over their ZMQ publishers, and as keys of ours."""

import contextlib
import os
import socket
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq.asyncio

from penstock.cache.keys import block_keys, namespace_root
from penstock.engine.http.kv_stream import Changes
from penstock.router.backend import Backend
from penstock.router.fleet.engine_feed import EngineSource
from penstock.router.placement.engine_blocks import BadEvents, EngineBlocks, OtherBlockSize
from tests.support import engine_publisher
from tests.support.engine_publisher import StandIn, batch, names_of, removed, stand_in, stored
from tests.support.fake_engine import byte_tokenizer
from tests.support.refusals import cases
from tests.support.router_fleet import RunningRouter, running_router, until
from tests.support.router_stub import Answer, Hold, ok, stub, whole

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


NEEDS_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
ADDRESSES = [("127.0.0.1", True), ("127.0.0.1", False), pytest.param("[::1]", True, marks=NEEDS_IPV6)]


@pytest.mark.parametrize(("host", "says_topic"), ADDRESSES)
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


@pytest.mark.parametrize(
    ("answer", "is_removed"), [(ok, True), (lambda seen, sock: whole(b'{"tokens": [1]}'), False), (Hold(), True)]
)
def test_an_engine_that_is_removed_or_makes_other_tokens_is_not_followed(answer: Answer, is_removed: bool) -> None:
    """It is removed while it is followed, or while it is asked for the tokens of a text."""
    with followed() as (router, engine, _):
        feeds, url = router.router.feeds, engine.http.url
        feed = feeds._by_url[url]
        if answer is not ok:
            engine.http.answer, engine.http.models = answer, b'{"data": [{"id": "another"}]}'
            until(feed.done)
        if isinstance(answer, Hold):
            assert answer.is_asked.wait(60)
        if is_removed:
            router.call(lambda: router.app.apply("DELETE", Backend.of(url)))
        until(lambda: feeds._by_url[url].done())
        assert is_removed or router.view(url)["events"] is None


async def test_connections_made_again_and_again_leave_no_file_open() -> None:
    context, opened = zmq.asyncio.Context(), []
    with stand_in() as engine:
        source = EngineSource(context, Backend.of(engine.backend), bytes(32), 16)
        for _ in range(50):
            async with contextlib.aclosing(source.frames()) as batches:
                while not source.is_connected:
                    await anext(batches)
            opened.append(len(os.listdir("/proc/self/fd")))
        context.destroy(0)
    # A thread closes the sockets a little later; the first connections open its descriptors too.
    assert min(opened[40:]) < min(opened[:10]) + 20, opened


def test_the_cached_tokens_in_an_answer_are_compared_with_the_prediction() -> None:
    answer = whole(b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}}')
    with stub(lambda seen, sock: answer) as engine, running_router(engine.url, tokenizes=True) as router:
        for _ in range(20):
            router.complete(TEXT, model="m")
        assert router.view(engine.url)["placement"]["knowledge"] == "approximate"
        assert router.placement_metrics()["compared_requests_total"] == 20


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "backends", Backend=Backend))
def test_a_backend_is_parsed_and_has_one_canonical_url(text: str, expected: Backend) -> None:
    assert Backend.of(text) == expected


TOKENS = list(range(100, 164))  # four blocks
NAMES = names_of(TOKENS, 16)


def keys(tokens: list[int], size: int = 16, **root: Any) -> set[bytes]:
    return {key[:8] for key in block_keys(tokens, size, root=namespace_root(**root))}


class World:
    """The keys of the blocks in each tier, as a router knows them after each batch."""

    def __init__(self, size: int = 16) -> None:
        self.blocks = EngineBlocks(b"", size, "e")
        self.keys: dict[str, set[bytes]] = {"device": set(), "host": set(), "disk": set()}

    def take(self, *events: Any) -> "World":
        for frame in self.blocks.take(batch(*events)):
            assert isinstance(frame, Changes)
            if frame.cleared:
                self.keys[frame.tier].clear()
            self.keys[frame.tier] -= {frame.removed[at : at + 8] for at in range(0, len(frame.removed), 8)}
            self.keys[frame.tier] |= {frame.stored[at : at + 8] for at in range(0, len(frame.stored), 8)}
        self.blocks.check()
        return self


NUMBERS = stored(TOKENS[:32]) | {"block_hashes": [-5, 2**63]}
WINDOW = stored(TOKENS, group_idx=0, kv_cache_spec_kind="sliding_window")
WHOLE = stored(TOKENS, group_idx=1, kv_cache_spec_kind="full_attention")
EVENTS = vars(engine_publisher) | globals()


@pytest.mark.parametrize(("name", "batches", "expected"), cases(__file__, "batches of events", **EVENTS))
def test_blocks_get_the_keys_that_a_prompt_of_their_tokens_has(
    name: str, batches: list[list[Any]], expected: set[bytes] | dict[str, set[bytes]]
) -> None:
    """On the device, if no other tier is expected to have any."""
    world = World()
    for each in batches:
        world.take(*each)
    tiers = expected if isinstance(expected, dict) else {"device": expected}
    assert world.keys == {"device": set(), "host": set(), "disk": set(), **tiers}


def test_blocks_of_images_and_all_behind_them_are_left_out() -> None:
    world = World().take(stored(TOKENS, extra_keys=[None, None, [["image", 3]], None]))
    assert world.keys["device"] == keys(TOKENS[:32]) and world.blocks.counts["not_text"] == 2
    longer = [*TOKENS, *range(16)]
    assert world.take(stored(longer, start=4)).blocks.counts["unknown_parent"] == 1


def test_another_block_size_is_an_error_before_a_block_is_stored() -> None:
    with pytest.raises(OtherBlockSize, match="its blocks have 32 tokens") as error:
        World(16).take(stored(TOKENS, size=32))
    assert error.value.block_size == 32
    assert World(16).take(stored(TOKENS), stored(TOKENS, size=32)).keys["device"] == keys(TOKENS)


@pytest.mark.parametrize("payload", cases(__file__, "invalid batches", **EVENTS))
def test_invalid_batches_are_refused(payload: bytes) -> None:
    with pytest.raises(BadEvents):
        EngineBlocks(b"", 16, "e").take(payload)
