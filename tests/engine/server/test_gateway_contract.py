"""Routes and metrics that inference gateways read: each row names the specification that asks for it."""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml  # type: ignore[import-untyped]
import zmq
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.messages import Outputs, Stats
from penstock.engine.server.kv_publisher import KvPublisher
from penstock.engine.server.server_config import KvEventsConfig
from penstock.executor.protocol import AdapterInfo
from tests.support import endpoint_picker
from tests.support.endpoint_picker import Picker, Unfit
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.oracle_engine import oracle_engine
from tests.support.refusals import cases, table
from tests.support.running_server import MODEL, Running, running, until
from tests.support.three_apis import APIS, SCHEMA

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAMES = {"CHAT": CHAT, "COMPLETIONS": COMPLETIONS, "TOOL": APIS["chat"].tool("weather", SCHEMA)}
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}


def test_the_gauges_of_the_protocol_have_its_names_and_labels() -> None:
    with running(FakeEngine(info=msgspec.structs.replace(INFO, max_loras=4))) as server:
        server.app.service.adapters.served |= {name: AdapterInfo(f"key of {name}", 8, 1) for name in ("a", "b", "c")}
        used = Stats(adapters=[["key of a", "key of b", "key of one that is unloaded"], ["key of b"]])
        before_s = time.time()
        for stats in (used, Stats()):  # not every step has them
            server.call(partial(server.engine.on_step, Outputs([], stats)))
        families = {each.name: each for each in text_string_to_metric_families(server.http.get("/metrics").text)}
    for specification, name, labels in cases(__file__, "gauges that gateways read"):
        (sample,) = families[name].samples
        assert (families[name].type, sample.labels) == ("gauge", labels), specification
    assert before_s <= sample.value <= time.time(), "the gauge of the adapters is the time of their last change"


@pytest.mark.parametrize(("specification", "name", "value"), cases(__file__, "fields of rendered requests"))
def test_a_rendered_request_has_the_field(server: Running, specification: str, name: str, value: Any) -> None:
    body = {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}, "cache_salt": "s", "priority": 3}
    (found,) = server.post(f"{COMPLETIONS}/render", body).json()
    assert found[name] == value, specification


@pytest.mark.parametrize(("path", "fields"), cases(__file__, "requests to render", **NAMES))
def test_a_request_is_rendered_as_it_is_submitted(server: Running, path: str, fields: dict[str, Any]) -> None:
    before, body = len(server.engine.submitted), NEEDED[path] | fields
    assert server.post(path, body).status_code == 200
    submitted = server.engine.submitted[before:]
    answer = server.post(f"{path}/render", body).json()
    assert len(server.engine.submitted) == before + len(submitted), "rendering does not run the model"
    found = [answer] if path == CHAT else answer
    for each, (ids, params, _) in zip(found, submitted, strict=True):
        room = INFO.max_model_len - len(ids)
        length = room if params.max_tokens is None else min(params.max_tokens, room)
        assert each["token_ids"] == ids
        assert each["sampling_params"] == msgspec.to_builtins(params, str_keys=True) | {"max_tokens": length}
    if fields.keys() <= {"tools", "tool_choice"}:
        assert found[0]["token_ids"] == server.post("/tokenize", body).json()["tokens"]


@pytest.mark.parametrize("path", NEEDED)
def test_rendering_refuses_what_the_route_itself_refuses(server: Running, path: str) -> None:
    for field, value in [*table(__file__, "fields"), ("model", "other"), ("prompt", 5), ("messages", [])]:
        body = NEEDED[path] | {field.partition(".")[0]: value}
        itself, rendered = server.post(path, body), server.post(f"{path}/render", body)
        if rendered.status_code == 200:
            assert field.split(".")[0] in ("response_format", "structured_outputs"), "only a grammar is not compiled"
        else:
            assert (rendered.status_code, rendered.json()) == (itself.status_code, itself.json()), field


MANIFEST = Path(__file__).parents[3] / "deploy/kubernetes/llm-d.yaml"
PICKER = next(each for each in yaml.safe_load_all(MANIFEST.read_text()) if each["kind"] == "ConfigMap")
CONFIG = yaml.safe_load(PICKER["data"]["penstock.yaml"].replace("smollm2", MODEL))


@contextlib.contextmanager
def replica() -> Iterator[tuple[Running, endpoint_picker.Server]]:
    """Yield a real server with the block size of the manifest, which publishes its cache events; and the picker's view of it."""
    with running(oracle_engine(max_model_len=4000, block_size=64)) as server, contextlib.ExitStack() as stack:
        address, free = f"127.0.0.1:{server.port}", "tcp://127.0.0.1:*"
        config = KvEventsConfig(True, endpoint=free, replay_endpoint=free, topic=f"kv@{address}@{MODEL}")
        publisher = KvPublisher(server.app.service.info, config)
        server.call(publisher.start)
        stack.callback(server.call, publisher.close)
        server.call(partial(server.app.kv_events.publish_to, publisher.publish))
        stack.callback(server.call, partial(server.app.kv_events.publish_to, None))
        ends = [each.getsockopt_string(zmq.LAST_ENDPOINT) for each in (publisher._socket, publisher._replay)]
        yield server, stack.enter_context(contextlib.closing(endpoint_picker.Server(address, *ends)))


def only_at(number: int) -> dict[str, dict[str, Any]]:
    """Return requests with a long beginning that only one of two replicas has computed before."""
    text = f"Only number {number} has this. " * 20
    return {COMPLETIONS: {"prompt": text}, CHAT: {"messages": [{"role": "user", "content": text}]}}


@pytest.fixture(scope="module")
def two_replicas() -> Iterator[list[tuple[Running, endpoint_picker.Server]]]:
    with replica() as first, replica() as second:
        for number, (server, _) in enumerate((first, second)):
            for path, body in only_at(number).items():
                assert server.post(path, body | {"max_tokens": 1}).status_code == 200
        yield [first, second]


@pytest.mark.parametrize("path", NEEDED)
@pytest.mark.parametrize("number", [0, 1])
def test_a_picker_sends_a_request_to_the_replica_that_has_its_beginning(
    two_replicas: list[tuple[Running, endpoint_picker.Server]], number: int, path: str
) -> None:
    picker = Picker(CONFIG, [view for _, view in two_replicas])
    server, view = two_replicas[number]
    until(lambda: picker.pick(path, only_at(number)[path]) == view.address)
    assert server.http.post("/reset_prefix_cache").status_code == 200
    until(lambda: picker.pick(path, NEEDED[path]) != "" and not view.keys)
    for body in only_at(number).values():
        assert server.post(COMPLETIONS if "prompt" in body else CHAT, body | {"max_tokens": 1}).status_code == 200
    until(lambda: picker.pick(path, only_at(number)[path]) == view.address)


@pytest.mark.parametrize("name", cases(__file__, "names that a picker needs"))
def test_a_picker_refuses_a_server_that_lacks_a_name(
    two_replicas: list[tuple[Running, endpoint_picker.Server]], name: str
) -> None:
    views = [view for _, view in two_replicas]
    for view in views:
        view.number, view.keys = 0, {}
    other = name[0].encode() + b"X" * (len(name) - 1)
    picker = Picker(CONFIG, views, lambda data: data.replace(name.encode(), other))
    with pytest.raises(Unfit, match=name):
        for path in NEEDED:
            picker.pick(path, NEEDED[path])
