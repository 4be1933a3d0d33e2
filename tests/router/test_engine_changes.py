"""What the router learns of a replica that changes while it is up: adapters come and go, weights are others."""

import asyncio
from pathlib import Path

from penstock.cache.keys import block_keys, namespace_root
from penstock.router.placement.prepared_request import RequestFields
from penstock.router.placement.prompts import COMPLETIONS, PromptReader
from tests.engine.server.test_adapters_api import UNLOAD, load
from tests.engine.server.test_control_api import update
from tests.support.fake_engine import byte_tokenizer
from tests.support.oracle import content_folder
from tests.support.oracle_engine import oracle_engine
from tests.support.router_fleet import client_request, probed
from tests.support.running_server import MODEL, comes_true, running


def test_a_replica_is_asked_again_for_its_adapters_and_their_keys_tell_them_apart(tmp_path: Path) -> None:
    with running(oracle_engine(enable_lora=True, max_model_len=4096), allow_lora_updates=True) as server:

        async def run() -> None:
            async with probed(server.url) as (fleet, replica):
                group = fleet.group_of(MODEL)
                assert group.adapters == {}
                placement = group.placement
                await asyncio.to_thread(load, server, "sql", content_folder(tmp_path, "a"))
                await comes_true(lambda: bool(group.adapters))
                listed = (await asyncio.to_thread(server.http.get, "/v1/models/sql")).json()
                assert group.adapters == {"sql": listed["adapter"]} and fleet.group_of("sql") is group
                assert group.placement is placement, "what is known of its cache stays"
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
                await asyncio.to_thread(server.post, UNLOAD, {"lora_name": "sql"})
                await comes_true(lambda: "sql" not in replica.models)
                assert group.adapters == {}

        asyncio.run(run())


def test_a_replica_with_other_weights_is_introduced_anew_and_a_paused_one_gets_nothing(tmp_path: Path) -> None:
    with running(oracle_engine(max_model_len=4096), allow_weight_updates=True) as server:

        async def run() -> None:
            async with probed(server.url) as (fleet, replica):
                before = replica.info.fingerprint
                updated = await asyncio.to_thread(update, server, content_folder(tmp_path, "a"))
                await comes_true(lambda: replica.info.fingerprint != before)
                assert replica.info.fingerprint.hex() == updated.json()["fingerprint"]
                (space,) = fleet.group_of(MODEL).placement._spaces
                assert space.root(None, None) == namespace_root(model=replica.info.fingerprint)
                await asyncio.to_thread(server.http.post, "/pause?mode=keep")
                await comes_true(lambda: not replica.is_up)
                await asyncio.to_thread(server.http.post, "/resume")
                await comes_true(lambda: replica.is_up)

        asyncio.run(run())
