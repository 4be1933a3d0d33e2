"""A replica that changes while it is up: adapters come and go, weights are replaced, it pauses."""

from pathlib import Path

from penstock.cache.keys import block_keys, namespace_root
from penstock.router.placement.prepared_request import RequestFields
from penstock.router.placement.prompts import COMPLETIONS, PromptReader
from tests.engine.server.test_adapters_api import UNLOAD, load
from tests.engine.server.test_control_api import update
from tests.support.fake_engine import byte_tokenizer
from tests.support.oracle import content_folder
from tests.support.oracle_engine import oracle_engine
from tests.support.router_fleet import client_request, running_router, until
from tests.support.running_server import MODEL, running


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
        (space,) = router.fleet.group_of(MODEL).placement._spaces
        assert space.root(None, None) == namespace_root(model=replica.info.fingerprint)
        server.http.post("/pause?mode=keep")
        until(lambda: not replica.is_up)
        server.http.post("/resume")
        until(lambda: replica.is_up)
