"""A line of the log for each request, which can be read by a machine whatever the client sends."""

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

from penstock.engine.http.access_line import AccessLine, as_json, as_text
from tests.support.collector import collecting, traced
from tests.support.fake_engine import FakeEngine
from tests.support.refusals import cases
from tests.support.router_fleet import running_router
from tests.support.router_stub import stub, whole
from tests.support.running_server import MODEL, Running, running, until

LINE = AccessLine(route="/v1/completions", status=200, total_ms=12.5, id="a", model="m", prompt_tokens=3)


@contextlib.contextmanager
def lines(room: str) -> Iterator[list[str]]:
    """Collect the messages of a room's access log."""
    messages: list[str] = []
    log, room_log = logging.getLogger(f"penstock.{room}.access"), logging.getLogger(f"penstock.{room}")
    keep = Mock(level=0, handle=lambda record: messages.append(record.getMessage()))
    handlers, level, passes = log.handlers, room_log.level, log.propagate
    room_log.setLevel(logging.INFO)
    log.addHandler(keep)
    try:
        yield messages
    finally:
        log.handlers, log.propagate = handlers, passes
        log.removeHandler(keep)
        room_log.setLevel(level)


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[tuple[Running, list[str]]]:
    with running(FakeEngine(), access_log="json", **settings) as server, lines("engine") as found:
        yield server, found


def test_a_line_has_the_fields_of_its_request_and_its_times() -> None:
    with (
        collecting() as collector,
        serving(api_keys=("first-key", "second-key"), telemetry=traced(collector)) as (server, found),
    ):
        headers = {"x-api-key": "second-key", "authorization": "Bearer first-key", "x-request-id": "mine"}
        body = {"model": MODEL, "prompt": "a prompt of twenty characters", "max_tokens": 3, "n": 2}
        begun_s = time.monotonic()
        answer = server.http.post("/v1/completions", json=body, headers=headers)
        until(lambda: len(found) == 1)
        ended_s = time.monotonic()
        server.app.service.spans.close()
        (trace_id,) = {span.trace_id for span in collector.spans}
    line = json.loads(found[0])
    assert answer.json()["id"] == "cmpl-" + line.pop("id")
    assert 0 < line.pop("first_token_ms") <= line.pop("total_ms") < 1000 * (ended_s - begun_s)
    assert line.pop("time")[10] == "T"
    assert line == {**dict(cases(__file__, "the line of a request", MODEL=MODEL)), "trace_id": trace_id}


def test_nothing_from_outside_breaks_a_line_or_stands_in_it() -> None:
    hostile = b'x","status":200}\\n\x85\xe2\x80\xa8{"canary'
    with serving(api_keys=("the-key",)) as (server, found):
        for path in ("/v1/completions", "/canary\u2028path", "/v1/completions?canary"):
            for key in ("the-key", "canary-key"):
                server.http.post(
                    path,
                    json={"model": "canary\n", "prompt": "canary", "request_id": 'canary"\n'},
                    headers=[(b"x-request-id", hostile), (b"authorization", f"Bearer {key}".encode())],
                )
        until(lambda: len(found) == 6)
    for line in found:
        fields = json.loads(line)
        assert line.isascii() and line.splitlines() == [line]
        assert fields.pop("client_id") == "xstatus:200ncanary" and "canary" not in json.dumps(fields)


def test_every_form_keeps_a_line_on_one_line() -> None:
    line = AccessLine(route="/", status=200, total_ms=1.0, model="a\u2028b\n", client_id="c")
    assert len(as_json(line).splitlines()) == 1 and json.loads(as_json(line))["model"] == "a\u2028b\n"
    named = AccessLine(route="/", status=200, total_ms=1.0, model='sql key=1 "')
    assert as_text(named) == r'/ 200 0.001s model="sql key=1 \""'  # a name cannot look like another field
    assert as_text(LINE) == "/v1/completions 200 0.013s id=a model=m prompt_tokens=3"


def test_probes_have_no_line_and_a_higher_level_silences_all() -> None:
    with serving() as (server, found):
        server.http.get("/health")
        server.http.get("/v1/models")
        until(lambda: len(found) == 1)
        logging.getLogger("penstock.engine").setLevel(logging.WARNING)
        server.http.get("/v1/models")
        logging.getLogger("penstock.engine").setLevel(logging.DEBUG)
        server.http.get("/health")
        until(lambda: len(found) == 2)
    assert [json.loads(line)["route"] for line in found] == ["/v1/models", "/health"]


def test_without_an_access_log_there_is_no_line() -> None:
    with running(FakeEngine(), access_log="off") as server, lines("engine") as found:
        server.complete(max_tokens=1)
    assert found == []


def test_a_router_names_the_replica_of_an_answer_and_logs_refusals() -> None:
    answer = whole(b"{}", b"200 OK", b"x-request-id: theirs", b"x-penstock-cached-tokens: 16")
    with (
        stub(lambda seen, sock: answer) as replica,
        running_router(replica.url, access_log="json", api_keys=("the-key",)) as router,
        lines("router") as found,
    ):
        router.http.headers["authorization"] = "Bearer the-key"
        router.http.post("/v1/completions", json={"prompt": "canary"}, headers={"x-request-id": "mine"})
        router.http.post("/v1/completions", json={"prompt": "canary", "model": "canary\n"})
        router.http.post("/canary", json={})
        router.http.get("/health")
        router.http.get("/replicas", headers={"authorization": "Bearer canary"})
        until(lambda: len(found) == 4)
    first, *others = map(json.loads, found)
    assert 0 < first.pop("first_byte_ms") <= first.pop("total_ms") and first.pop("time")
    assert first == {**dict(cases(__file__, "the line of a routed request")), "replica": replica.url}
    seen = [(line["route"], line["status"], line.get("key")) for line in others]
    assert seen == cases(__file__, "the lines of refused requests")
    assert "canary" not in "".join(found)
