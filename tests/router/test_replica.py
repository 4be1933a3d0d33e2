"""The states of a replica, its probes, what it changes while it is up, and the budget of retries."""

import asyncio
import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from penstock.cache.keys import block_keys, namespace_root
from penstock.router.backend import Backend
from penstock.router.config import RouterConfig
from penstock.router.fleet import replica as life
from penstock.router.fleet.fleet import Fleet, RetryBudget
from penstock.router.fleet.probe import Probe
from penstock.router.fleet.replica import EJECTION_S, FAILURES_TO_EJECT, MAX_EJECTION_S, Replica, State
from penstock.router.http.upstream import ConnectFailed
from penstock.router.placement.placement import ReplicaInfo
from penstock.router.placement.prompts import COMPLETIONS, PromptReader, RequestFields
from tests.engine.server.test_control_api import UNLOAD, load, update
from tests.support.fake_engine import byte_tokenizer
from tests.support.oracle import content_folder
from tests.support.oracle_engine import oracle_engine
from tests.support.refusals import cases
from tests.support.router_fleet import ADMIN, client_request, running_router, until
from tests.support.router_stub import Hold, stub
from tests.support.running_server import MODEL, comes_true, running


def up() -> Replica:
    replica = Replica(Backend("http://127.0.0.1:1"), connect_timeout_s=1.0)
    replica.probe_passed(0.0)
    return replica


def state(replica: Replica) -> State:
    """Return the state, read again: a type checker assumes the last value that it saw."""
    return replica.state


EVENTS: dict[str, Callable[[Replica], None]] = dict(cases(__file__, "what happens to a replica", Replica=Replica))


@pytest.mark.parametrize(("events", "expected"), cases(__file__, "states", **vars(life)))
def test_the_state_follows_from_probes_and_requests(events: str, expected: State) -> None:
    replica = up()
    for event in events.split():
        EVENTS[event](replica)
    assert (state(replica), replica.is_up) == (expected, expected == "up")


def test_each_ejection_is_longer_until_a_trial_succeeds() -> None:
    replica, now_s = up(), 0.0
    lengths: list[float] = []
    for _ in range(8):
        while replica.state != "ejected":
            replica.failed("500", now_s)
        begun_s = now_s
        while replica.state == "ejected":
            now_s += 0.25
            replica.probe_passed(now_s)
        lengths.append(now_s - begun_s)
        assert state(replica) == "trial"
    assert lengths == [min(EJECTION_S * 2**index, MAX_EJECTION_S) for index in range(8)]
    replica.answered()
    assert state(replica) == "up"
    for _ in range(FAILURES_TO_EJECT):
        replica.failed("500", now_s)
    replica.probe_passed(now_s + EJECTION_S)
    assert state(replica) == "trial"  # after the first, short ejection again


async def died(url: str, patience_s: float = 60.0) -> bool:
    replica = Replica(Backend(url), connect_timeout_s=patience_s)
    answer = await replica.has_died(patience_s)
    replica.pool.close()
    await asyncio.sleep(0)
    return answer


async def test_a_process_that_connects_or_sends_a_byte_has_not_died() -> None:
    with stub() as backend:
        url = backend.url
        assert not await died(url)
        backend.questions[b"/health"] = lambda _seen, _sock: b"\0\1\2"
        assert not await died(url)  # something is there
        backend.questions[b"/health"] = Hold()
        assert not await died(url, patience_s=0.3)  # perhaps it is busy
        backend.is_dying = True
        assert await died(url)
    assert await died(url)


@pytest.mark.parametrize(("error", "is_local"), cases(__file__, "failures of a router", errno=errno, socket=socket))
def test_the_routers_failure_kills_no_replica(error: OSError, is_local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", Mock(side_effect=error))
    with pytest.raises(ConnectFailed) as failure:
        asyncio.run(up().pool.connect())
    assert (failure.value.is_local, failure.value.is_dead) == (is_local, False)


def test_the_budget_suffices_for_a_replica_that_dies_in_a_busy_fleet() -> None:
    budget = RetryBudget(0.15)
    for _ in range(1000):
        budget.deposit(num_in_flight=128)
    assert all(budget.take() for _ in range(128 // 8))


@pytest.mark.parametrize("rounds", range(6))
async def test_a_probe_that_is_closed_when_it_becomes_due_ends(rounds: int) -> None:
    fleet = Fleet(RouterConfig(), lambda _replica: None)
    replica = fleet.add(Backend("http://127.0.0.1:1"))
    Probe(fleet, lambda *_: None, replica).start()
    await comes_true(lambda: replica.state != "starting")
    replica.probe_due.set()
    for _ in range(rounds):
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await fleet.tasks.close()


def test_the_late_answer_of_a_removed_replica_does_not_replace_its_successor() -> None:
    fleet = Fleet(RouterConfig(), lambda _replica: None)
    before = fleet.add(Backend("http://127.0.0.1:1"))
    fleet.detach(before)
    after = fleet.add(Backend("http://127.0.0.1:1"))
    for replica in (after, before):  # the removed one answers late
        fleet.assign_group(replica, "m", ("m",), ReplicaInfo())
    assert fleet.group_of("m").replicas == {after.url: after}
    fleet.check()


async def test_a_removed_replica_that_lists_its_models_late_starts_no_feed() -> None:
    fleet, followed = Fleet(RouterConfig(), lambda _replica: None), list[Replica]()
    with stub() as backend:
        replica = fleet.add(Backend(backend.url))
        Probe(fleet, lambda each, _model: followed.append(each), replica).start()
        fleet.detach(replica)
        await comes_true(lambda: replica.state == "up")
        await fleet.tasks.close()
        replica.pool.close()
    assert followed == []


def test_a_failing_replica_is_used_again_when_the_others_are_removed() -> None:
    fleet = Fleet(RouterConfig(), lambda _replica: None)
    failing, other = (fleet.add(Backend(f"http://127.0.0.1:{port}")) for port in (1, 2))
    for replica in (failing, other):
        fleet.assign_group(replica, "m", ("m",), ReplicaInfo())
        with fleet.observing(replica):
            replica.probe_passed(0.0)
    with fleet.observing(failing):
        failing.connection_broke("reset", 0.0)
    placement = fleet.group_of("m").placement
    assert placement.choose(None, num_tokens=1, exclude=frozenset({other.url})) is None
    fleet.detach(other)
    assert placement.choose(None, num_tokens=1) is not None


def test_a_replica_with_an_impossible_block_size_harms_no_other() -> None:
    with stub() as good, stub() as bad:
        bad.models = b'{"data": [{"id": "m", "fingerprint": "ab", "block_size": 0}]}'
        with running_router(good.url, bad.url, wait_for=1, admin_api_keys=(ADMIN,)) as router:
            until(lambda: router.state(bad.url) == "down")
            assert "block_size" in router.fleet.replicas[bad.url].reason
            good.is_ready = False
            until(lambda: router.state(good.url) == "draining")
            good.is_ready = True
            until(lambda: router.state(good.url) == "up")
            assert router.change("DELETE", url=bad.url).status_code == 200
            until(lambda: router.fleet.replicas.keys() == {good.url})
            assert router.complete(model="m").status_code == 200


def test_a_local_model_is_suggested_once_for_its_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.router")
    folder = tmp_path / "a model"
    folder.mkdir()
    with stub() as elsewhere, stub() as first, stub() as second:
        for backend in (first, second):
            backend.models = msgspec.json.encode({"data": [{"id": "m", "root": str(folder)}]})
        with running_router(elsewhere.url, first.url):
            assert "--tokenizer" not in caplog.text, "the folder has no model"
        (folder / "config.json").write_text("{}")
        with running_router(elsewhere.url, first.url, second.url):
            assert caplog.text.count(f"with --tokenizer '{folder}' its cache can be followed") == 1
        with running_router(first.url, tokenizes=True):
            assert caplog.text.count("with --tokenizer") == 1


def test_a_probe_is_restarted_after_a_bug(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    probe, bugs = Probe._probe, [ZeroDivisionError("a bug")]

    async def probe_with_bugs(*arguments: Any) -> None:
        if bugs:
            raise bugs.pop()
        await probe(*arguments)

    monkeypatch.setattr(Probe, "_probe", probe_with_bugs)
    with stub() as backend, running_router(backend.url):  # which waits until it is up
        pass
    (record,) = (record for record in caplog.records if record.exc_info)
    assert backend.url in record.message and record.exc_info is not None


def test_adapters_that_come_and_go_have_block_keys_of_their_own(tmp_path: Path) -> None:
    engine = oracle_engine(enable_lora=True, max_model_len=4096)
    with running(engine, allow_lora_updates=True) as server, running_router(server.url) as router:
        group = router.fleet.group_of(MODEL)
        placement = group.placement
        assert group.adapters == {}
        load(server, "sql", content_folder(tmp_path, "a"))
        until(lambda: bool(group.adapters))
        listed = server.http.get("/v1/models/sql").json()
        assert group.adapters == {"sql": listed["adapter"]} and router.fleet.group_of("sql") is group
        assert group.placement is placement, "the blocks that are cached stay known"
        texts = PromptReader(byte_tokenizer())
        request = client_request(COMPLETIONS, b'{"model": "sql", "prompt": "' + b"a" * 64 + b'"}')
        parsed = RequestFields(model="sql", prompt=b'"' + b"a" * 64 + b'"')  # type: ignore[arg-type]
        for name, adapter in ((MODEL, None), ("sql", listed["adapter"])):
            prepared = texts.prepare(request, parsed, placement, group.adapters.get(name))
            assert prepared.prompt is not None
            ((_, match),) = prepared.prompt.spaces
            root = namespace_root(model=bytes.fromhex(listed["fingerprint"]), adapter=adapter)
            keys = block_keys([97] * 64, listed["block_size"], root=root)
            assert match.tolist() == [int.from_bytes(key[:8], "little") for key in keys]
        texts.close()
        server.post(UNLOAD, {"lora_name": "sql"})
        until(lambda: "sql" not in router.fleet.replicas[server.url].models)
        assert group.adapters == {}


def test_other_weights_have_other_keys_and_a_paused_replica_gets_nothing(tmp_path: Path) -> None:
    engine = oracle_engine(max_model_len=4096)
    with running(engine, allow_weight_updates=True) as server, running_router(server.url) as router:
        replica = router.fleet.replicas[server.url]
        before = replica.info.fingerprint
        updated = update(server, content_folder(tmp_path, "a"))
        until(lambda: replica.info.fingerprint != before)
        assert replica.info.fingerprint.hex() == updated.json()["fingerprint"]
        (space,) = router.fleet.group_of(MODEL).placement.caches.spaces
        assert space.root(None, None) == namespace_root(model=replica.info.fingerprint)
        server.http.post("/pause?mode=keep")
        until(lambda: not replica.is_up)
        server.http.post("/resume")
        until(lambda: replica.is_up)
