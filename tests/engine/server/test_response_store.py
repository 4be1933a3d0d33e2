"""The store of finished responses: what it keeps, for whom and how long."""

from penstock.engine.server.agents.response_store import ResponseStore, StoredResponse


def stored(size_bytes: int = 10, owner: bytes = b"") -> StoredResponse:
    return StoredResponse(owner, b"r" * (size_bytes - 2), b"[]", None)


def kept(store: ResponseStore, *names: str) -> list[str]:
    store.check()
    return [name for name in names if store.get(b"", name) is not None]


def test_the_least_recently_used_response_is_evicted_first() -> None:
    for store in (ResponseStore(max_responses=3), ResponseStore(max_bytes=30)):
        for name in "abc":
            assert store.put(name, stored())
        assert store.get(b"", "a") is not None
        assert store.put("d", stored())
        assert kept(store, *"abcd") == ["a", "c", "d"]


def test_a_large_response_evicts_several_and_one_larger_than_the_store_none() -> None:
    store = ResponseStore(max_bytes=30)
    for name in "abc":
        store.put(name, stored())
    assert not store.put("huge", stored(31))
    assert kept(store, *"abc", "huge") == ["a", "b", "c"]
    assert store.put("large", stored(20))
    assert kept(store, *"abc", "large") == ["c", "large"]
