"""What the router knows of a replica whose weights change: the keys of its blocks are others from then on."""

import asyncio
from pathlib import Path

from penstock.cache.keys import namespace_root
from tests.engine.server.test_control_api import update
from tests.support.oracle import content_folder
from tests.support.oracle_engine import oracle_engine
from tests.support.router_fleet import probed
from tests.support.running_server import MODEL, running


def test_a_replica_with_other_weights_is_introduced_anew_and_a_paused_one_gets_nothing(tmp_path: Path) -> None:
    with running(oracle_engine(max_model_len=4096), allow_weight_updates=True) as server:

        async def run() -> None:
            async with probed(server.url) as (fleet, replica):
                before = replica.info.fingerprint
                updated = await asyncio.to_thread(update, server, content_folder(tmp_path, "a"))
                while replica.info.fingerprint == before:
                    await asyncio.sleep(0.01)
                assert replica.info.fingerprint.hex() == updated.json()["fingerprint"]
                (space,) = fleet.group_of(MODEL).placement._spaces
                assert space.root(None, None) == namespace_root(model=replica.info.fingerprint)
                await asyncio.to_thread(server.http.post, "/pause?mode=keep")
                while replica.is_up:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(server.http.post, "/resume")
                while not replica.is_up:
                    await asyncio.sleep(0.01)

        asyncio.run(run())
