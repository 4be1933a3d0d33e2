"""Pause, sleep and updates of weights over HTTP, before a real core with the oracle; and the requests of TRL's client. Adapters:
names beside the model's, loading and unloading at run time."""

import argparse
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.engine.commands import serve
from penstock.engine.config import ConfigError
from penstock.engine.http.kv_stream import FrameReader, Hello
from penstock.engine.server.adapters import Adapters
from penstock.engine.server.server_config import LoraModule, ServerConfig, resolve
from penstock.executor.protocol import AdapterError
from tests.support.oracle import content_folder
from tests.support.oracle_engine import oracle_engine
from tests.support.refusals import table
from tests.support.running_server import MODEL, Running, running, started, until
from tests.support.serve_options import check_serve

UPDATES = {"allow_weight_updates": True, "allow_lora_updates": True}
server = started(lambda: oracle_engine(enable_lora=True, max_model_len=4096), "function", **UPDATES)


def choice(server: Running, **fields: Any) -> Any:
    fields = {"max_tokens": 6, "temperature": 0, "return_token_ids": True, **fields}
    return server.complete("hello there", **fields).json()["choices"][0]


def update(server: Running, path: str) -> Any:
    return server.post("/update_weights", {"path": path})


# Requests that wait, each in a thread of its own.
THREADS = ThreadPoolExecutor()


def ask(server: Running, **fields: Any) -> Future[Any]:
    return THREADS.submit(choice, server, **fields)


def test_other_weights_are_another_fingerprint_and_another_answer_at_once(server: Running, tmp_path: Path) -> None:
    first, model = choice(server), server.http.get("/v1/models").json()["data"][0]
    assert "weights_versions" not in first
    updated = update(server, content_folder(tmp_path, "a"))
    assert updated.status_code == 200, updated.text
    assert updated.json()["weights_version"] == 1
    now = server.http.get("/v1/models").json()["data"][0]
    assert now["fingerprint"] == updated.json()["fingerprint"] != model["fingerprint"]
    second = choice(server)
    assert second["token_ids"] != first["token_ids"] and second["weights_versions"] == [1] * 6
    chat = server.chat(max_tokens=3, return_token_ids=True, ignore_eos=True).json()["choices"][0]
    assert chat["weights_versions"] == [1] * 3
    assert update(server, content_folder(tmp_path, "b")).json()["weights_version"] == 2
    assert server.http.get("/weights_version").json() == {"weights_version": 2}


def test_a_refusal_names_the_field_and_changes_nothing(server: Running, tmp_path: Path) -> None:
    first = choice(server)
    (tmp_path / "none").mkdir()
    none = update(server, str(tmp_path / "none"))
    assert none.status_code == 400 and f"path: {tmp_path}/none: no weights" in none.json()["error"]["message"]
    for path, options, status, message in table(__file__, "control"):
        answer = server.http.post(path, **options)
        assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
    assert choice(server) == first
    assert server.http.get("/weights_version").json() == {"weights_version": 0}
    assert server.http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("mode", ["keep", "wait", ""], ids=["keep", "wait", "abort by default"])
def test_a_pause_keeps_awaits_or_ends_running_requests(server: Running, mode: str) -> None:
    first = ask(server, max_tokens=4000, ignore_eos=True)
    until(lambda: server.engine.stats.num_running == 1)
    query, body = (f"?mode={mode}&mode={mode}", {"mode": mode}) if mode else ("?clear_cache=true", {})
    for each in ({}, body):  # the query and the body are one set of fields
        assert server.http.post(f"/pause{query}", json=each).json() == {"status": "paused"}
    assert server.http.post("/pause", json=body).json() == {"status": "paused"}
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    assert server.http.get("/health").status_code == 200
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "the engine is paused"})
    if mode != "keep":
        assert first.result(60)["finish_reason"] == ("length" if mode else "abort")
        until(lambda: len(server.engine.answers) == 0)
    waiting = ask(server)
    until(lambda: len(server.engine.answers) > 0)
    assert server.http.post("/resume").json() == {"status": "resumed"}
    assert waiting.result(60)["finish_reason"] == "length" and server.http.get("/ready").status_code == 200
    assert (len(first.result(60)["token_ids"]) < 4000) is (not mode)
    until(lambda: server.engine.stats.num_used_blocks == 0)


def test_sleeps_and_pauses_that_wait_end_with_the_last_request(server: Running) -> None:
    asking = ask(server, max_tokens=3000, ignore_eos=True)
    until(lambda: server.engine.stats.num_running == 1)
    waiting = server.engine._pending_replies  # type: ignore[attr-defined]
    routes = ("/sleep?mode=wait", "/pause?mode=wait", "/sleep?mode=wait&level=2")
    replies: list[Future[Any]] = []
    for route in routes:
        replies.append(THREADS.submit(server.http.post, route))
        until(lambda: len(waiting) == len(replies) or asking.done())
    first, paused, second = (reply.result(60) for reply in replies)
    assert asking.result(60)["finish_reason"] == "length"
    assert (first.json(), paused.json()) == ({"status": "asleep"}, {"status": "paused"})
    assert second.status_code == 409 and "the engine sleeps already" in second.text
    assert server.http.post("/wake_up").json() == {"status": "awake"}


@pytest.mark.parametrize(("level", "woken"), [(1, "weights"), (1, "kv_cache"), (2, "weights")])
def test_an_engine_sleeps_and_wakes_part_by_part(server: Running, tmp_path: Path, level: int, woken: str) -> None:
    path = content_folder(tmp_path, "a")
    update(server, path)
    first = choice(server)
    assert server.http.post(f"/sleep?level={level}").json() == {"status": "asleep"}
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    again = server.http.post("/sleep")
    assert again.status_code == 409 and "the engine sleeps already" in again.text
    assert server.http.post("/resume").status_code == 409
    asking = ask(server)
    if level == 2:
        assert "update_weights brings others" in server.http.post("/wake_up").text
    rest = {"weights": "kv_cache", "kv_cache": "weights"}[woken]
    assert server.http.post(f"/wake_up?tags={woken}").json() == {"status": f"asleep, without {rest}"}
    if level == 2 or rest == "weights":
        assert update(server, path).status_code == 200
    if rest == "kv_cache":
        assert server.http.post("/wake_up?tags=kv_cache").json() == {"status": "awake"}
    assert asking.result(60)["token_ids"] == first["token_ids"] == choice(server)["token_ids"]


def test_concurrent_updates_are_applied_one_after_the_other(server: Running, tmp_path: Path) -> None:
    paths = [content_folder(tmp_path, name) for name in "abcd"]
    asking = [ask(server, max_tokens=1500, ignore_eos=True) for _ in range(3)]
    until(lambda: len(server.engine.answers) == 3)
    updates = [updated.json() for updated in THREADS.map(partial(update, server), paths)]
    assert sorted(each["weights_version"] for each in updates) == [1, 2, 3, 4]
    assert len({each["fingerprint"] for each in updates}) == 4
    for each in asking:
        # Absent from an answer that ended before the updates.
        versions = each.result(60).get("weights_versions") or [0] * 1500
        assert len(versions) == 1500 and versions == sorted(versions)
    last = max(updates, key=lambda each: each["weights_version"])
    assert server.http.get("/v1/models").json()["data"][0]["fingerprint"] == last["fingerprint"]


def test_listeners_of_cache_events_get_the_new_fingerprint(server: Running, tmp_path: Path) -> None:
    def first_frame(pieces: Iterator[bytes]) -> Hello:
        frame = FrameReader().feed(next(pieces))[0]
        assert isinstance(frame, Hello)
        return frame

    with server.http.stream("GET", "/kv_events") as stream:
        pieces = stream.iter_raw()
        before = first_frame(pieces)
        new = update(server, content_folder(tmp_path, "a")).json()["fingerprint"]
        for _ in pieces:  # it ends
            pass
    with server.http.stream("GET", "/kv_events") as stream:
        assert first_frame(stream.iter_raw()).fingerprint.hex() == new != before.fingerprint.hex()


def test_a_core_that_is_killed_in_an_update_ends_the_server_with_an_error(tmp_path: Path) -> None:
    path = content_folder(tmp_path, "a")
    with running(oracle_engine(max_model_len=4096), allow_weight_updates=True) as server:
        process = server.engine._process  # type: ignore[attr-defined]
        os.kill(process.pid, signal.SIGSTOP)  # so that the update is not done before it is killed
        updating = THREADS.submit(update, server, path)
        until(lambda: bool(server.engine._pending_replies))  # type: ignore[attr-defined]
        os.kill(process.pid, signal.SIGKILL)
        answer = updating.result(60)
        assert answer.status_code == 503 and "was killed by SIGKILL" in answer.text
        assert server.http.get("/health").status_code == 503


def test_a_client_that_leaves_while_its_sleep_waits_leaves_no_pause_behind() -> None:
    with running(oracle_engine(max_model_len=4096), allow_weight_updates=True) as server:
        process = server.engine._process  # type: ignore[attr-defined]
        pending = server.engine._pending_replies  # type: ignore[attr-defined]
        ask(server, max_tokens=4000, ignore_eos=True)
        until(lambda: server.engine.stats.num_running == 1)
        os.kill(process.pid, signal.SIGSTOP)  # so that the request is not done before the client has left
        with server.connect() as sock:
            sock.sendall(b"POST /sleep?mode=wait HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
            until(lambda: bool(pending))
        until(lambda: server.app.service.num_open_requests == 1)
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: not pending)
        assert server.http.get("/is_paused").json() == {"is_paused": False}


def test_the_routes_require_a_key_where_there_is_one() -> None:
    with running(oracle_engine(max_model_len=4096), allow_weight_updates=True, api_keys=("secret",)) as server:
        for path in ("/pause", "/resume", "/sleep", "/wake_up", "/update_weights"):
            assert server.post(path, {}).status_code == 401
        assert server.post("/pause", {}, headers={"authorization": "Bearer secret"}).status_code == 200
    message = r"allow_weight_updates: given, and any client that reaches 0\.0\.0\.0 could use it"
    with pytest.raises(ValueError, match=message):
        resolve(ServerConfig(allow_weight_updates=True, host="0.0.0.0"), {})
    resolve(ServerConfig(allow_weight_updates=True, host="0.0.0.0", api_keys=("k",)), {})


def test_the_requests_of_trls_client_are_answered(server: Running) -> None:
    """trl.generation.vllm_client of TRL 1.16: the requests that it makes, and what it reads of the answers."""
    http = server.http
    assert http.get("/health").status_code == 200
    assert http.get("/get_world_size").json()["world_size"] == 1
    info = http.get("/server_info", params={"config_format": "json"}).json()
    assert info["vllm_config"]["weight_transfer_config"] is None  # which it takes as a refusal, in words
    sampling = {"n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    fields = {**sampling, "max_tokens": 4, "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choices = server.post("/v1/completions", {"model": MODEL, "prompt": ["ab", "cd"], **fields}).json()["choices"]
    assert [each["prompt_token_ids"] for each in choices[::2]] == [[97, 98], [99, 100]]
    for each in choices:
        assert each["logprobs"]["tokens"] == [f"token_id:{token}" for token in each["token_ids"]]
        assert [*each["logprobs"]["top_logprobs"][0]] == [f"token_id:{each['token_ids'][0]}"]
    fields |= {"logprobs": True, "top_logprobs": 0, "n": 1}
    chat = server.chat(**fields).json()
    (one,) = chat["choices"]
    assert [entry["token"] for entry in one["logprobs"]["content"]] == [f"token_id:{t}" for t in one["token_ids"]]
    assert chat["prompt_token_ids"]
    assert http.post("/reset_prefix_cache").status_code == 200


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


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
    names = {**globals(), "server": server, "path": path, "other": other}
    for answer, status, message in table(__file__, "adapters that cannot be loaded", **names):
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


async def test_an_adapter_that_cannot_be_loaded_at_the_start_is_named() -> None:
    engine = Mock(load_adapter=Mock(side_effect=AdapterError("/a: no")))
    config = resolve(ServerConfig(lora_modules=(LoraModule("sql", "/a"),)), {})
    with pytest.raises(AdapterError, match="lora_modules: sql: lora_path: /a: no"):
        await Adapters(engine, ("tiny",)).load_all(config.lora_modules)
