"""The store of responses: its bounds, its faults and its tenants."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.http.errors import HttpError
from penstock.engine.server.agents import item_store
from penstock.engine.server.agents.item_store import ItemStore
from penstock.engine.server.server_config import Keeping, ServerConfig, resolve


def kept(text: str = "") -> dict[str, Any]:
    return {"items": [{"id": "msg_1", "text": text}]}


def put(store: ItemStore, kept_id: str, text: str = "", tenant: bytes = b"") -> bool:
    return asyncio.run(store.put(tenant, kept_id, kept(text)))


def get(store: ItemStore, kept_id: str, tenant: bytes = b"") -> dict[str, Any] | None:
    return asyncio.run(store.get(tenant, kept_id))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now_s = [1000.0]

    class Clock:
        monotonic = time.monotonic

        @staticmethod
        def time() -> float:
            now_s[0] += 0.001
            return now_s[0]

    monkeypatch.setattr(item_store, "time", Clock)

    def advance(seconds: float) -> None:
        now_s[0] += seconds

    return advance


def test_what_is_kept_comes_back_and_goes_when_it_is_deleted() -> None:
    store = ItemStore(Keeping())
    assert put(store, "resp_a", "x") and get(store, "resp_a") == kept("x")
    assert asyncio.run(store.change(b"", "resp_a", lambda found: found["items"].append({"id": "msg_2"})))
    assert [item["id"] for item in (get(store, "resp_a") or {})["items"]] == ["msg_1", "msg_2"]
    assert asyncio.run(store.delete(b"", "resp_a")) and not asyncio.run(store.delete(b"", "resp_a"))
    assert get(store, "resp_a") is None and asyncio.run(store.change(b"", "resp_a", dict.clear)) is None
    store.close()


def test_one_tenant_neither_reads_nor_changes_nor_deletes_what_is_anothers() -> None:
    store = ItemStore(Keeping())
    put(store, "resp_a", "x", tenant=b"one")
    assert get(store, "resp_a", b"two") is None and not asyncio.run(store.delete(b"two", "resp_a"))
    assert asyncio.run(store.change(b"two", "resp_a", dict.clear)) is None
    assert get(store, "resp_a", b"one") == kept("x")
    store.close()


def test_what_was_not_used_for_longest_makes_room(clock: Callable[[float], None]) -> None:
    store = ItemStore(Keeping(max_responses=3))
    for name in "abc":
        put(store, name)
    get(store, "a")
    put(store, "d")
    assert [name for name in "abcd" if get(store, name)] == ["a", "c", "d"]
    store.close()
    store = ItemStore(Keeping(response_store_bytes=1000))
    for name in "abcd":
        assert put(store, name, "x" * 300)
    assert [name for name in "abcd" if get(store, name)] == ["c", "d"]
    assert not put(store, "e", "x" * 2000)  # larger than all of it; nothing goes for its sake
    assert [name for name in "abcde" if get(store, name)] == ["c", "d"]
    store.close()


def test_what_is_too_old_is_not_there_any_more(clock: Callable[[float], None]) -> None:
    store = ItemStore(Keeping(response_age_s=60))
    put(store, "a")
    put(store, "b")
    clock(40)
    get(store, "a")
    clock(40)
    assert get(store, "b") is None and get(store, "a") is not None
    store.close()


def test_a_file_does_not_grow_beyond_its_limit(tmp_path: Path) -> None:
    store = ItemStore(Keeping(response_store=str(tmp_path / "kept"), response_store_bytes=100_000))
    for place in range(300):
        assert put(store, f"resp_{place}", "x" * 5000)
    store.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 600_000
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0


def test_a_full_disk_fails_what_needs_it_and_leaves_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ItemStore(Keeping(response_store=str(tmp_path / "kept")))
    assert put(store, "a", "x")
    assert store._opened is not None
    (pages,) = store._opened.execute("PRAGMA page_count").fetchone()
    store._opened.execute(f"PRAGMA max_page_count = {pages}")  # SQLite answers as on a full disk
    assert not put(store, "b", "x" * 100_000)
    assert "b is not kept: database or disk is full" in caplog.text
    assert get(store, "a") == kept("x") and get(store, "b") is None
    store.close()


def test_two_servers_on_one_machine_may_share_a_file(tmp_path: Path) -> None:
    keeping = Keeping(response_store=str(tmp_path / "kept"))
    one, two = ItemStore(keeping), ItemStore(keeping)
    put(one, "a", "x")
    put(two, "b", "y")
    assert (get(two, "a"), get(one, "b")) == (kept("x"), kept("y"))
    one.close()
    two.close()


def test_a_server_that_starts_beside_another_waits_for_it(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")  # as another does that turns the new file to WAL; SQLite itself does not wait here
    ends = threading.Timer(0.2, other.execute, ["COMMIT"])
    ends.start()
    ItemStore(Keeping(response_store=str(path))).try_out()
    ends.join()
    other.close()


def test_a_file_that_another_holds_for_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_store, "BUSY_S", 0.1)
    other = sqlite3.connect(tmp_path / "kept", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ValueError, match="response_store: .* cannot be used: database is locked"):
        ItemStore(Keeping(response_store=str(tmp_path / "kept"))).try_out()
    other.close()


def test_a_file_that_is_no_store_is_refused_at_the_start_and_fails_nothing_else_later(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"rubbish" * 1000)
    with pytest.raises(ValueError, match=r"response_store: '.*kept' cannot be used: file is not a database"):
        resolve(ServerConfig(keeping=Keeping(response_store=str(path))), {})
    with pytest.raises(ValueError, match="response_store: .* cannot be used"):
        resolve(ServerConfig(keeping=Keeping(response_store=str(tmp_path / "no" / "kept"))), {})
    store = ItemStore(Keeping(response_store=str(path)))
    assert not put(store, "a")
    with pytest.raises(HttpError) as refused:
        get(store, "a")
    assert refused.value.status == 503 and str(path) not in refused.value.message
    assert sqlite3.threadsafety  # one connection is used from several threads, one at a time
