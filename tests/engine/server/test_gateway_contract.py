"""Routes and metrics that inference gateways read: each row names the specification that asks for it."""

import time
from functools import partial
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.messages import Outputs, Stats
from penstock.executor.protocol import AdapterInfo
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.refusals import cases, table
from tests.support.running_server import Running, running
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
