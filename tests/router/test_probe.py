"""Probing, by itself."""

import asyncio

import pytest

from penstock.router.config import RouterConfig
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.probe import Prober
from penstock.router.placement.placement import Placement, ReplicaInfo
from penstock.router.placement.policy import PolicyConfig


@pytest.mark.parametrize("rounds", range(6))
def test_a_prober_that_is_closed_as_evidence_comes_in_ends(rounds: int) -> None:
    async def run() -> None:
        config = RouterConfig(backends=("http://127.0.0.1:1",))
        fleet = Fleet(config, lambda: Placement(PolicyConfig(config.policy)))
        prober = Prober(fleet, config, lambda *_: None)
        replica = fleet.add(*config.backends)
        prober.watch(replica)
        while replica.state == "starting":
            await asyncio.sleep(0.01)
        prober.watch(replica)
        for _ in range(rounds):
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await prober.close()

    asyncio.run(run())


def test_a_replica_that_is_taken_out_while_it_is_asked_does_not_push_out_its_successor() -> None:
    config = RouterConfig(backends=("http://127.0.0.1:1",))
    fleet = Fleet(config, lambda: Placement(PolicyConfig(config.policy)))
    before = fleet.add(*config.backends)
    fleet.detach(before)
    after = fleet.add(*config.backends)
    for replica in (after, before):  # the answer of the one before comes late
        fleet.introduce(replica, "m", ("m",), ReplicaInfo())
    assert fleet.group_of("m").replicas == {after.url: after}
    fleet.check()
