"""The probes of a replica: they survive bugs, late answers and impossible ones."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.router.backend import Backend
from penstock.router.config import RouterConfig
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.probe import Probe
from penstock.router.placement.placement import ReplicaInfo
from tests.support.router_fleet import ADMIN, running_router, until
from tests.support.router_stub import stub


@pytest.mark.parametrize("rounds", range(6))
def test_a_probe_that_is_closed_when_it_becomes_due_ends(rounds: int) -> None:
    async def run() -> None:
        fleet = Fleet(RouterConfig(), lambda _replica: None)
        replica = fleet.add(Backend("http://127.0.0.1:1"))
        Probe(fleet, lambda *_: None, replica).start()
        while replica.state == "starting":
            await asyncio.sleep(0.01)
        replica.probe_due.set()
        for _ in range(rounds):
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await fleet.tasks.close()

    asyncio.run(run())


def test_the_late_answer_of_a_removed_replica_does_not_replace_its_successor() -> None:
    fleet = Fleet(RouterConfig(), lambda _replica: None)
    before = fleet.add(Backend("http://127.0.0.1:1"))
    fleet.detach(before)
    after = fleet.add(Backend("http://127.0.0.1:1"))
    for replica in (after, before):  # the removed one answers late
        fleet.assign_group(replica, "m", ("m",), ReplicaInfo())
    assert fleet.group_of("m").replicas == {after.url: after}
    fleet.check()


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


def test_a_model_of_a_replica_that_is_on_this_machine_is_suggested_once_for_its_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_probe_that_fails_by_a_bug_is_logged_and_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
