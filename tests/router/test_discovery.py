"""Replicas that are found in a file and by names."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.router import discovery
from penstock.router.background import Tasks
from penstock.router.discovery import states
from tests.support.router_fleet import running_router, until
from tests.support.router_stub import stub
from tests.support.running_server import comes_true


def write(path: Path, *lines: str) -> None:
    """Write the file at once, for a part of it that stood unchanged during two looks would count."""
    path.with_suffix(".new").write_text("".join(f"{line}\n" for line in lines))
    path.with_suffix(".new").replace(path)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a file of replicas, which is looked at all the time."""
    monkeypatch.setattr(discovery, "LOOK_S", 0.02)
    monkeypatch.setattr(discovery, "ASK_S", 0.05)
    return tmp_path / "replicas"


def test_a_file_is_followed_and_replicas_come_and_go(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with stub() as one, stub() as other:
        write(path, "# the fleet", one.url, "")
        with running_router(wait_for=1, discover=(f"file:{path}",)) as router:
            write(path, one.url, f"{other.url},prefill=9100")
            until(lambda: router.states().count("up") == 2)
            write(path, "not an address")
            until(lambda: "not an address" in caplog.text)
            path.unlink()
            until(lambda: "No such file" in caplog.text)
            assert router.complete(model="m").status_code == 200
            write(path, other.url)
            until(lambda: list(router.fleet.replicas) == [other.url] and router.states() == ["up"])
            assert router.complete(model="m").status_code == 200


async def test_a_file_is_not_read_while_it_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter(["http://a:1\n", "", "http://a:1\nhttp://b", *2 * ["http://a:1\nhttp://b:2\n"]])  # at each look
    monkeypatch.setattr(Path, "read_text", lambda _: next(texts))
    async with contextlib.aclosing(states(f"file:{path}")) as lists:
        assert await anext(lists) == ["http://a:1"]
        assert await anext(lists) == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize("is_in_file", [True, False])
def test_a_replica_that_is_named_elsewhere_too_is_not_removed(path: Path, is_in_file: bool) -> None:
    with stub() as one, stub() as other:
        files = [path, path.with_name("more")] if is_in_file else [path]
        for each in files:
            write(each, one.url)
        backends = () if is_in_file else (one.url,)
        with running_router(*backends, wait_for=1, discover=[f"file:{each}" for each in files]) as router:
            write(path, other.url)
            until(lambda: router.states() == ["up", "up"])
            write(path)
            until(lambda: list(router.fleet.replicas) == [one.url])
            assert router.states() == ["up"]


async def test_a_source_that_fails_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "ASK_S", 0.01)
    first, last = ["10.0.0.5"], ["10.0.0.6"]
    lookups: Iterator[list[str] | OSError] = iter(
        [socket.gaierror(-3, "try again"), first, socket.gaierror(-2, "unknown"), first]
    )
    changes: list[str] = []

    async def addresses(_host: str) -> list[str]:
        if isinstance(result := next(lookups, last), OSError):
            raise result
        return result

    monkeypatch.setattr(discovery, "_addresses", addresses)
    tasks = Tasks()
    apply = lambda method, backend: changes.append(f"{method} {backend.url}")  # noqa: E731
    discovery.Discovery(("dns:vllm:8000",), apply, tasks).start()
    await comes_true(lambda: len(changes) == 3)
    await tasks.close()
    assert changes[0] == "POST http://10.0.0.5:8000"
    assert sorted(changes[1:]) == ["DELETE http://10.0.0.5:8000", "POST http://10.0.0.6:8000"]


async def test_a_name_stands_for_all_its_addresses() -> None:
    async with contextlib.aclosing(states("dns:127.0.0.1:8000,events=5557")) as lists:
        assert await anext(lists) == ["http://127.0.0.1:8000,events=5557"]
