"""Replicas that are found in a file and by names."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.router import discovery
from penstock.router.backend import RouteError
from penstock.router.background import Tasks
from penstock.router.discovery import check_source, states
from tests.support.refusals import table
from tests.support.router_fleet import running_router, until
from tests.support.router_stub import stub


def take(source: str, count: int = 1, between: Any = lambda number: None) -> list[list[str]]:
    """Its first states; `between` is called behind each."""

    async def run() -> list[list[str]]:
        found: list[list[str]] = []
        async with asyncio.timeout(60), contextlib.aclosing(states(source)) as each:
            async for texts in each:
                found.append(texts)
                between(len(found))
                if len(found) == count:
                    return found
        raise AssertionError

    return asyncio.run(run())


def test_a_file_is_followed_and_replicas_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 0.02)
    monkeypatch.setattr(discovery, "ASK_S", 0.05)
    path = tmp_path / "fleet"
    with stub() as one, stub() as other:
        path.write_text(f"# the fleet\n{one.url}\n\n")
        with running_router(wait_for=1, discover=(f"file:{path}",)) as router:
            path.write_text(f"{one.url}\n{other.url},prefill=9100\n")
            until(lambda: router.states().count("up") == 2)
            path.write_text("rubbish, too long to be mistaken for what was there")
            path.rename(tmp_path / "gone")
            assert router.complete(model="m").status_code == 200
            path.write_text(f"{other.url}\n")
            until(lambda: list(router.fleet.replicas) == [other.url] and router.states() == ["up"])
            assert router.complete(model="m").status_code == 200


def test_a_file_is_not_read_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 0)
    path = tmp_path / "fleet"
    writes = {1: "http://a:1\n", 2: "", 3: "http://a:1\nhttp://b", 4: "http://a:1\nhttp://b:2\n"}  # before each look
    looks = 0

    def read(path: Path) -> str:
        nonlocal looks
        looks += 1
        if looks in writes:
            path.write_text(writes[looks])
        return path.read_bytes().decode()

    async def run() -> None:
        monkeypatch.setattr(Path, "read_text", read)
        async with contextlib.aclosing(states(f"file:{path}")) as found:
            assert await anext(found) == ["http://a:1"]
            assert await anext(found) == ["http://a:1", "http://b:2"]

    asyncio.run(run())


def test_a_replica_that_others_have_added_too_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 0.02)
    path = tmp_path / "fleet"
    with stub() as one, stub() as other:
        path.write_text(one.url)
        with running_router(one.url, discover=(f"file:{path}",)) as router:
            path.write_text(other.url + "\n")
            until(lambda: router.states() == ["up", "up"])
            path.write_text("")
            until(lambda: list(router.fleet.replicas) == [one.url])
            assert router.states() == ["up"]


def test_a_source_that_fails_for_once_is_followed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "ASK_S", 0.01)
    answers: list[Any] = [socket.gaierror(-3, "try again"), ["10.0.0.5"], socket.gaierror(-2, "unknown"), ["10.0.0.5"]]
    found: list[str] = []

    async def addresses(_host: str) -> list[str]:
        answer = answers.pop(0) if answers else ["10.0.0.6"]
        if isinstance(answer, OSError):
            raise answer
        return list(answer)

    async def follow() -> None:
        tasks = Tasks()
        following = discovery.Discovery(
            ("dns:vllm:8000",), lambda method, new: found.append(f"{method} {new.url}"), tasks
        )
        following.start()
        async with asyncio.timeout(60):
            while len(found) < 3:
                await asyncio.sleep(0.01)
        await tasks.close()

    monkeypatch.setattr(discovery, "_addresses", addresses)
    asyncio.run(follow())
    assert found[0] == "POST http://10.0.0.5:8000"
    assert sorted(found[1:3]) == ["DELETE http://10.0.0.5:8000", "POST http://10.0.0.6:8000"]


def test_a_name_stands_for_all_its_addresses() -> None:
    assert take("dns:127.0.0.1:8000,events=5557") == [["http://127.0.0.1:8000,events=5557"]]


@pytest.mark.parametrize(("text", "words"), table(__file__, "sources"))
def test_a_source_that_is_written_wrongly_is_refused(text: str, words: str) -> None:
    with pytest.raises(RouteError, match=words):
        check_source(text)
