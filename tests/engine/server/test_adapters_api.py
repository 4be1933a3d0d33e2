"""Adapters over HTTP, before a real core with the oracle: names beside the model's, loading and unloading at run time."""

import argparse
import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.engine.commands import serve
from penstock.engine.config import ConfigError
from penstock.engine.server.adapters import Adapters
from penstock.engine.server.server_config import LoraModule, ServerConfig, resolve
from penstock.executor.protocol import AdapterError
from tests.support.oracle import content_folder
from tests.support.oracle_engine import oracle_engine
from tests.support.refusals import table
from tests.support.running_server import MODEL, Running, started
from tests.support.serve_options import check_serve

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


server = started(lambda: oracle_engine(enable_lora=True, max_model_len=4096), "function", allow_lora_updates=True)


def load(server: Running, name: str, path: str, **fields: Any) -> Any:
    return server.post(LOAD, {"lora_name": name, "lora_path": path, **fields})


def ids(server: Running, model: str) -> list[int]:
    answer = server.complete("hello there", model=model, max_tokens=6, temperature=0, return_token_ids=True).json()
    assert answer["model"] == model
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def test_an_adapter_is_a_model_of_its_own_from_loading_to_unloading(server: Running, tmp_path: Path) -> None:
    base = ids(server, MODEL)
    assert load(server, "sql", content_folder(tmp_path, "a")).json() == {"status": "adapter 'sql' is loaded"}
    own, adapter = server.http.get("/v1/models").json()["data"]
    assert (own["id"], own["parent"], own["adapter"]) == (MODEL, None, None)
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("sql", MODEL, MODEL)
    assert len(adapter["adapter"]) == 64 and adapter["fingerprint"] == own["fingerprint"]
    assert server.http.get("/v1/models/sql").json() == adapter
    assert ids(server, "sql") == ids(server, "sql") != base == ids(server, MODEL)
    chat = server.post("/v1/chat/completions", {"model": "sql", "messages": [{"role": "user", "content": "x"}]})
    assert chat.status_code == 200 and chat.json()["model"] == "sql"
    assert server.post(UNLOAD, {"lora_name": "sql"}).json() == {"status": "adapter 'sql' is unloaded"}
    gone = server.complete("hello", model="sql")
    message = "model: 'sql' is not served here; available are: tiny"
    assert (gone.status_code, gone.json()["error"]["message"]) == (404, message)
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == [MODEL]


def test_what_cannot_be_loaded_is_named_and_nothing_changes(server: Running, tmp_path: Path) -> None:
    path, other = content_folder(tmp_path, "a"), content_folder(tmp_path, "b")
    assert load(server, "sql", path).status_code == 200
    first = ids(server, "sql")
    for answer, status, message in (
        (load(server, "sql", other), 400, "lora_name: 'sql' is in use; unload it first, or set load_inplace"),
        (load(server, MODEL, path), 400, "lora_name: 'tiny' is the name of the model itself"),
        (server.post(UNLOAD, {"lora_name": "law"}), 404, "lora_name: 'law' is not a loaded adapter"),
        (server.post(LOAD, {"lora_name": "law"}), 400, "lora_path: the field is required"),
        (server.post(LOAD, {"lora_name": "", "lora_path": path}), 400, "lora_name"),
        (load(server, "a\nb", path), 400, r"lora_name: 'a\nb' has control characters"),
        (load(server, "\x1b[2J\u202e", path), 400, r"lora_name: '\x1b[2J\u202e' has control characters"),
        (load(server, "law", "a\0b"), 400, "lora_path: expected `str` matching regex"),
    ):
        assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
    assert ids(server, "sql") == first
    assert load(server, "sql", other, load_inplace=True).status_code == 200
    assert ids(server, "sql") != first
    assert load(server, "again", path).status_code == 200 and ids(server, "again") == first


def test_modules_are_read_from_the_command_line_or_refused() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    given = ["--enable-lora", "--lora-modules", "sql=/a", "--lora-modules", '{"name": "law", "path": "/b=c"}']
    args = parser.parse_args(["model", *given])
    assert serve.server_config(args, "model", {}).lora_modules == (LoraModule("sql", "/a"), LoraModule("law", "/b=c"))
    check_serve(args)
    for words, message in table(__file__, "lora modules", given=given):
        with pytest.raises(ConfigError, match=message):
            check_serve(parser.parse_args(["model", *words]))
    with pytest.raises(SystemExit):
        parser.parse_args(["model", "--lora-modules", "sql"])


def test_an_adapter_that_cannot_be_loaded_at_the_start_is_named() -> None:
    engine = Mock(load_adapter=Mock(side_effect=AdapterError("/a: no")))
    config = resolve(ServerConfig(lora_modules=(LoraModule("sql", "/a"),)), {})
    with pytest.raises(AdapterError, match="lora_modules: sql: lora_path: /a: no"):
        asyncio.run(Adapters(engine, ("tiny",)).load_all(config.lora_modules))
