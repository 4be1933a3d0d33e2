"""The stream of cache events over HTTP, for listeners that are slow, late or one of many; and resets of the cache."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from penstock.cache.keys import block_keys, namespace_root
from penstock.engine.http import kv_stream
from penstock.engine.http.kv_stream import Alive, Changes, Frame, FrameReader, Hello, Snapshot, StreamError, pack
from penstock.engine.messages import CacheUpdate
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server import kv_events
from penstock.engine.server.kv_events import KvEvents
from tests.support.fake_engine import FakeEngine
from tests.support.oracle_engine import oracle_engine
from tests.support.refusals import cases
from tests.support.running_server import Running, running, started, until


class Follower:
    """A router's view of one replica, kept from its stream."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200
        self.frames: list[Frame] = []
        self.held: set[bytes] = set()
        self._pieces, self._reader = response.iter_raw(), FrameReader()

    def follow(self, is_enough: Callable[["Follower"], bool]) -> None:
        while not is_enough(self):
            for frame in self._reader.feed(next(self._pieces)):
                if isinstance(frame, Snapshot):
                    self.held = (set() if frame.is_first else self.held) | keys(frame.keys)
                elif isinstance(frame, Changes):
                    self.held = (self.held - keys(frame.removed)) | keys(frame.stored)
                self.frames.append(frame)


@contextlib.contextmanager
def following(server: Running) -> Iterator[Follower]:
    with server.http.stream("GET", "/kv_events", timeout=60) as response:
        follower = Follower(response)
        follower.follow(lambda each: any(isinstance(frame, Snapshot) and frame.is_last for frame in each.frames))
        yield follower


def keys(run: bytes) -> set[bytes]:
    return {run[at : at + 8] for at in range(0, len(run), 8)}


server = started(lambda: oracle_engine(max_model_len=4000))


def test_a_listener_learns_earlier_and_later_cached_keys(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "ALIVE_S", 0.1)
    info = server.engine.info
    assert server.http.get("/v1/models").json()["data"][0]["num_blocks"] == info.num_blocks - 1

    def expected(text: str) -> set[bytes]:
        root = namespace_root(model=info.fingerprint)
        return {key[:8] for key in block_keys(list(text.encode()), info.block_size, root=root)}

    early, late = "said before " * 8, "said after " * 8
    everything = expected(early) | expected(late)
    server.complete(early, max_tokens=1)
    with following(server) as one, following(server) as two:
        server.complete(late, max_tokens=1)
        for follower in (one, two):
            follower.follow(lambda each: everything <= each.held)
            hello = follower.frames[0]
            assert isinstance(hello, Hello) and hello.fingerprint == info.fingerprint
            seqs = [frame.seq for frame in follower.frames if isinstance(frame, Changes)]
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
        one.follow(lambda each: any(isinstance(frame, Alive) for frame in each.frames))
        assert one.held == two.held
    with following(server) as again:
        assert everything <= again.held
        assert again.frames[0] == hello


async def anext_frame(frames: AsyncGenerator[bytes, None]) -> Frame:
    (frame,) = FrameReader().feed(await anext(frames))
    return frame


async def test_a_slow_listener_gets_a_new_snapshot_instead_of_missed_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_BACKLOG_BYTES", 200)
    engine = FakeEngine()
    frames = KvEvents(service_of(engine)).frames()
    taken = [await anext_frame(frames), await anext_frame(frames)]
    for number in range(20):
        engine.on_cache_update(CacheUpdate("device", number.to_bytes(8, "little") * 2, b""))
    taken.append(await anext_frame(frames))
    engine.on_cache_update(CacheUpdate("device", b"", b""))  # contents for the publisher: not a change
    engine.on_cache_update(CacheUpdate("device", b"", (3).to_bytes(8, "little")))
    taken.append(await anext_frame(frames))
    assert engine.is_watched
    await frames.aclose()
    assert not engine.is_watched
    hello, first, second, change = taken
    assert isinstance(hello, Hello) and first == Snapshot(0, "device", b"", True, True)
    assert isinstance(second, Snapshot) and second.seq == 20 and second.is_first and second.is_last
    assert keys(second.keys) == {number.to_bytes(8, "little") for number in range(20)}
    assert change == Changes(21, "device", b"", (3).to_bytes(8, "little"))


def service_of(engine: FakeEngine) -> Any:
    """Return the part of a service that the stream reads."""
    return SimpleNamespace(engine=engine, info=engine.info, is_draining=False)


async def test_a_large_snapshot_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stream, "FRAME_KEYS", 4)
    engine = FakeEngine()
    events = KvEvents(service_of(engine))
    first = events.frames()
    await anext(first)
    await anext(first)
    for tier in ("device", "host"):
        engine.on_cache_update(CacheUpdate(tier, b"".join(n.to_bytes(8, "big") for n in range(10)), b""))
    second = events.frames()
    await anext(second)
    parts = [cast(Snapshot, await anext_frame(second)) for _ in range(6)]
    await first.aclose()
    await second.aclose()
    assert [len(part.keys) // 8 for part in parts] == [4, 4, 2, 4, 4, 2]
    assert [part.tier for part in parts] == ["device"] * 3 + ["host"] * 3
    assert [part.is_first for part in parts] == [True] + [False] * 5
    assert [part.is_last for part in parts] == [False] * 5 + [True]
    assert {part.seq for part in parts} == {2}


async def test_the_stream_ends_when_the_server_drains() -> None:
    service = service_of(FakeEngine())
    frames = KvEvents(service).frames()
    await anext(frames)
    service.is_draining = True
    assert [frame async for frame in frames] == []


def test_a_head_request_gets_the_head_alone(server: Running) -> None:
    assert server.http.head("/kv_events").status_code == 200


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_survive_any_cut_of_the_bytes(size: int) -> None:
    sent: list[Frame] = [Hello("e", "sha256", b"f", 16, 10), Snapshot(3, "device", b"8" * 16, True, True), Alive(3)]
    sent.append(Changes(4, "host", b"a" * 8, b"b" * 8, True))
    data = b"".join(pack(frame) for frame in sent)
    reader = FrameReader()
    got = [frame for at in range(0, len(data), size) for frame in reader.feed(data[at : at + size])]
    assert got == sent


@pytest.mark.parametrize(("data", "message"), cases(__file__, "no frames", pack=pack, Snapshot=Snapshot))
def test_bytes_that_are_no_frame_are_an_error(data: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        FrameReader().feed(data)


def test_a_listener_that_leaves_without_a_word_is_forgotten(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client, client.stream("GET", "/kv_events"):
        pass
    server.complete("anything else", max_tokens=1)
    until(lambda: not server.app.kv_events._listeners)


def test_an_idle_server_resets_its_cache_and_a_busy_one_says_409(server: Running) -> None:
    def cached() -> int:
        usage = server.complete(list(range(40)), max_tokens=1).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert (cached(), cached()) == (0, 32)  # blocks of 16
    assert server.post("/reset_prefix_cache", {}).json() == {"status": "reset"}
    assert cached() == 0
    engine = FakeEngine()
    engine.hold = True
    with running(engine) as busy:
        generation = busy.call(lambda: engine.generate([1, 2, 3], SamplingParams(detokenize=False)))
        answer = busy.post("/reset_prefix_cache", {})
        assert answer.status_code == 409 and "try again" in answer.json()["error"]["message"]
        busy.call(generation.abort)
        until(lambda: len(engine.answers) == 0)
        assert busy.post("/reset_prefix_cache", {}).status_code == 200
