"""Requests that cannot be served: each is a 4xx that names the field, comes before heavy work, and harms no other request."""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from unittest.mock import Mock

import httpx
import msgspec
import pytest

from penstock.engine.front.answer import Answer
from penstock.engine.front.engine import EngineDead, QueueFull
from penstock.engine.http import body as body_of_http
from penstock.engine.http import token_form
from penstock.engine.http.errors import MAX_MESSAGE_CHARS, HttpError
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server import prompts
from penstock.engine.server.conversation import MAX_PAST_CALLS
from penstock.engine.server.tool_choice import MAX_SCHEMA_BYTES, MAX_TOOLS
from penstock.executor.protocol import WeightsError
from tests.support.fake_engine import FakeEngine
from tests.support.refusals import cases, table
from tests.support.running_server import Running, running, until
from tests.support.three_apis import tool


def post(server: Running, path: str, body: bytes, content_type: str = "application/json") -> httpx.Response:
    return server.http.post(path, content=body, headers={"content-type": content_type})


def refused(answer: httpx.Response, code: int = 400, param: str | None = None) -> str:
    """Return the message of a refusal, whose size is bounded and which has the error format."""
    assert answer.status_code == code, answer.text[:500]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert len(answer.content) < 4 * MAX_MESSAGE_CHARS
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]
    return str(error["message"])


MESSAGE = {"role": "user", "content": "hello"}
TOOLS = [tool(name="weather", description="Weather."), tool(name="clock")]


def past(*ids: str, role: str = "assistant", arguments: str = "{}") -> dict[str, Any]:
    """Return a message with calls of these ids."""
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}} for i in ids]
    return {"role": role, "content": None, "tool_calls": calls}


NAMES: dict[str, Any] = {"MESSAGE": MESSAGE, "TOOLS": TOOLS, "tool": tool, "past": past, "MAX_TOOLS": MAX_TOOLS}
NAMES |= {"MAX_SCHEMA_BYTES": MAX_SCHEMA_BYTES, "MAX_PAST_CALLS": MAX_PAST_CALLS}


BAD_FIELDS = table(__file__, "fields")  # (field, value), refused by completions and by chat


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_field_out_of_range_or_of_another_endpoint_is_refused_by_name(server: Running, endpoint: str) -> None:
    send = server.complete if endpoint == "completions" else server.chat
    before = len(server.engine.submitted)
    for field, value in BAD_FIELDS:
        answer = send(**{field.partition(".")[0]: value})
        shown = field[:79]
        assert answer.status_code == 400, (field, str(value)[:60], answer.text[:300])
        error = answer.json()["error"]
        assert error["param"].split("[")[0].rstrip("…").startswith(shown[:40]), (field, error)
        assert len(answer.content) < 4 * MAX_MESSAGE_CHARS, field
    assert len(server.engine.submitted) == before


def test_fields_that_change_nothing_are_accepted(server: Running) -> None:
    for field, value in table(__file__, "harmless"):
        for send in (server.complete, server.chat):
            assert send(max_tokens=2, **{field: value}).status_code == 200, (field, value)


def requests() -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """Yield paths, bodies, the field that is refused in each, and words of the message."""
    complete, chat = "/v1/completions", "/v1/chat/completions"
    for field, value, param in table(__file__, "prompts"):
        yield complete, {"prompt": "abc", field: value}, param, ""
    for fields, param in table(__file__, "conversations", **NAMES):
        yield chat, {"messages": [MESSAGE], **fields}, param, ""
    for path, fields, param, *words in table(__file__, "endpoints", **NAMES):
        yield path, fields, param, "".join(words)
    for field, value, words in table(__file__, "reasons"):
        yield complete, {"prompt": "abc", field: value}, field, words
    for value, param, words in table(__file__, "peers"):
        yield complete, {"prompt": "abc", "kv_transfer_params": value}, param, words
        yield chat, {"messages": [MESSAGE], "kv_transfer_params": value}, param, words
    for fields, param, words in table(__file__, "grammars"):
        for stream in (False, True):
            yield complete, {"prompt": "abc", "stream": stream, **fields}, param, words
            yield chat, {"messages": [MESSAGE], "stream": stream, **fields}, param, words


CALLS = [
    ("/v1/chat/completions", {"messages": [MESSAGE], **each}, *rest)
    for each, *rest in table(__file__, "calls", **NAMES)
]


@pytest.mark.parametrize(
    ("name", "path", "body", "param", "words"),
    [*(("server", *row) for row in requests()), *(("qwen", *row) for row in CALLS)],
)
def test_a_refusal_names_the_field(
    name: str, path: str, body: dict[str, Any], param: str, words: str, request: pytest.FixtureRequest
) -> None:
    """That of tools and calls, too, where the template has tools."""
    server = request.getfixturevalue(name)
    before = len(server.engine.submitted)
    assert words in refused(server.post(path, body), 400, param)
    assert len(server.engine.submitted) == before


@pytest.mark.parametrize("body", table(__file__, "bodies"))
def test_a_body_that_is_not_a_proper_json_object_is_refused(server: Running, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"):
        refused(post(server, path, body))


@pytest.mark.parametrize(("path", "body", "message"), table(__file__, "malformed bodies"))
def test_a_malformed_body_is_refused_with_the_place_of_the_mistake(
    server: Running, path: str, body: bytes, message: str
) -> None:
    assert message in refused(post(server, path, body))


def test_token_ids_behind_a_body_are_refused_where_they_would_be_ignored(server: Running) -> None:
    kind = token_form.CONTENT_TYPE.decode()
    for path in ("/v1/embeddings", "/tokenize", "/detokenize", "/reset_prefix_cache"):
        form = token_form.join(b'{"input":"a"}', b"a\0\0\0")
        refused(post(server, path, form, kind), 415, "content-type")
    for path, field, value in (("completions", "prompt", b'"a"'), ("chat/completions", "messages", b"[]")):
        form = token_form.join(b'{"%s":%s}' % (field.encode(), value), b"a\0\0\0")
        refused(post(server, f"/v1/{path}", form, kind), 400, field)
        form = token_form.pack({field: msgspec.Raw(value)}, field, b"a\0\0\0")
        assert post(server, f"/v1/{path}", form, kind).status_code == 200


def test_json_must_be_called_json(server: Running) -> None:
    for content_type in ("", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"):
        refused(post(server, "/v1/completions", b'{"prompt": "a"}', content_type), 415)
    assert post(server, "/v1/completions", b'{"prompt": "a"}', "Application/JSON; charset=utf-8").status_code == 200


@pytest.mark.parametrize(("path", "body"), cases(__file__, "millions", pytest=pytest))
def test_no_million_values_are_built(server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes) -> None:
    monkeypatch.setattr(prompts, "decode", Mock(side_effect=AssertionError("decoded")))
    refused(post(server, path, body), 400, next(iter(json.loads(body[:12].split(b":")[0] + b":0}"))))


def test_a_prompt_that_cannot_fit_is_refused_untokenized(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.app.service.tokenizer, "encode_batch", Mock(side_effect=AssertionError("tokenized")))
    message = refused(server.complete("x" * 200_000), 400, "prompt")
    assert "200000 characters" in message


TOO_MANY = cases(__file__, "too many log probabilities", pytest=pytest, MESSAGE=MESSAGE)


@pytest.mark.parametrize(("path", "fields", "limit", "param"), TOO_MANY)
def test_log_probabilities_of_prompts_are_bounded(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], limit: int, param: str
) -> None:
    for maximum in (limit, limit - 1):
        monkeypatch.setattr(prompts, "MAX_PROMPT_LOGPROBS", maximum)
        answer = server.post(path, {**fields, "n": 2, "max_tokens": 1})
        if maximum == limit:
            assert answer.status_code == 200, answer.text
    message = refused(answer, 400, param)
    assert str(limit - 1) in message and " × 2" in message


def test_an_unknown_model_is_a_404_that_names_the_known_ones(server: Running) -> None:
    assert "'gpt-4'" in refused(server.complete(model="gpt-4"), 404, "model")
    assert f"'{'x' * 79}…'" in refused(server.chat(model="x" * 100_000), 404, "model")
    refused(server.http.get("/v1/models/nope/at/all"), 404, "model")


def test_every_served_name_is_a_model_and_is_echoed() -> None:
    with running(served_model_names=("one", "org/two")) as server:
        assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["one", "org/two"]
        assert server.http.get("/v1/models/org/two").json()["root"] == "one"
        assert server.complete(model="org/two").json()["model"] == "org/two"
        assert server.post("/v1/completions", {"prompt": "a"}).json()["model"] == "one"


def test_unknown_routes_and_methods_are_refused_in_the_error_format(server: Running) -> None:
    refused(server.http.get("/v2/models"), 404)
    refused(server.http.get("/v1/models/../../etc/passwd"), 404)
    refused(server.http.get(f"/{'x' * 5000}"), 404)
    for path in table(__file__, "optional routes"):  # the operator has not allowed them
        refused(server.post(path, {}), 404)
        refused(server.http.get(path), 404)
    answer = server.http.get("/v1/completions")
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert server.http.request("BREW", "/health").status_code in (400, 405)


def test_a_full_queue_is_a_429_with_a_time_and_before_tokenizing() -> None:
    engine = FakeEngine(max_open=2)
    engine.hold, engine.most = True, 3
    with running(engine) as server:
        for ask, field in ((server.complete, "prompt"), (server.chat, "n")):
            answer = ask(n=3)
            refused(answer, 429)
            assert answer.headers["retry-after"] == "7"
            refused(ask(n=4), 400, field)
        tokenizer = server.app.service.tokenizer
        tokenizer.encode_batch = None  # type: ignore[assignment]  # would be a 500 if it were called
        refused(server.complete(n=3), 429)
        refused(server.post("/v1/embeddings", {"input": ["a", "b", "c"]}), 429)
        refused(server.post("/v1/embeddings", {"input": ["a", "b", "c", "d"]}), 400, "input")
    assert engine.submitted == []


def test_prompts_that_are_being_tokenized_count_as_queued() -> None:
    with running(FakeEngine(max_open=1)) as server:
        tokenizer, go_on = server.app.service.tokenizer, threading.Event()
        encode = tokenizer.encode_batch

        def slow(texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
            assert go_on.wait(60)
            return encode(texts, add_special_tokens)

        tokenizer.encode_batch = slow  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as threads:
            body = {"prompt": "x" * 5000, "truncate_prompt_tokens": 5}
            answer = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body)
            until(lambda: server.call(lambda: server.app.service._num_preparing) == 1)
            refused(server.complete(), 429)
            go_on.set()
            assert answer.result().status_code == 200
        assert server.complete("x" * 5000, truncate_prompt_tokens=5).status_code == 200


def test_a_refused_prompt_takes_back_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(delay_s=0.01)
    generate = engine.generate

    def generate_one(*arguments: Any, **options: Any) -> Answer:
        if engine.submitted:
            raise InvalidRequest("prompt", "it is the second")
        return generate(*arguments, **options)

    monkeypatch.setattr(engine, "generate", generate_one)
    with running(engine) as server:
        refused(server.complete([[1] * 10, [2] * 10], max_tokens=20), 400, "prompt")
        assert engine.aborted == ["1.0"]


def test_a_dead_engine_is_a_503() -> None:
    engine = FakeEngine()
    with running(engine) as server:
        server.call(lambda: engine.die("the core was killed"))
        for answer in (server.complete(), server.chat(stream=True), server.post("/v1/embeddings", {"input": "a"})):
            assert refused(answer, 503) == "the core was killed"


@pytest.mark.parametrize(
    ("kind", "arguments", "code"),
    [(QueueFull, ("full", 7), 429), (EngineDead, ("dead",), 503), (WeightsError, ("no weights",), 409)],
)
def test_a_more_specific_error_of_the_engine_has_the_status_of_its_kind(
    server: Running, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], arguments: tuple[Any, ...], code: int
) -> None:
    error = type("MoreSpecific", (kind,), {})(*arguments)
    monkeypatch.setattr(server.engine, "admit", Mock(side_effect=error))
    assert refused(server.complete(), code) == arguments[0]


def test_a_bug_is_a_500_that_tells_the_client_nothing(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.app.service.tokenizer, "encode_batch", Mock(side_effect=RuntimeError("secret detail")))
    assert refused(server.complete(), 500) == "internal error"
    until(lambda: "secret detail" in caplog.text)  # it is in the log


def test_a_client_id_is_cleaned_before_it_is_echoed(server: Running) -> None:
    def echoed(value: bytes) -> str:
        # On a connection of its own: the server may just have closed one, after the bug of the test above.
        return httpx.get(f"{server.url}/version", headers={b"x-request-id": value}).headers["x-request-id"]

    for given, shown in cases(__file__, "ids of clients"):
        assert echoed(given) == shown
    assert len(echoed(b"\xff\xff")) == 32  # nothing is left, so it is ours


def test_an_unknown_word_is_refused_with_the_words_that_are_expected() -> None:
    class Part(msgspec.Struct):
        note: msgspec.Raw = msgspec.Raw()
        kind: Literal["text", "file"] | None = None
        size: int | Literal["auto", "low"] = "auto"

    class Whole(msgspec.Struct):
        parts: list[Part] | str = ""
        by_name: dict[str, tuple[Part, ...]] = {}
        levels: tuple[int, Literal[1, 2]] = (0, 1)

    for sent, expected in table(__file__, "words"):
        with pytest.raises(HttpError) as refusal:
            body_of_http.decode(Whole, msgspec.json.encode(sent))
        assert str(refusal.value) == expected


def test_as_many_texts_as_are_allowed_are_served_whatever_is_in_them(server: Running) -> None:
    assert server.complete(['"\\",' * 10] * 1024, max_tokens=1).json()["usage"]["prompt_tokens"] == 40 * 1024


def test_unknown_fields_are_ignored_and_named_in_a_header(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    plain = server.complete(max_tokens=3, temperature=0)
    assert "x-penstock-ignored" not in plain.headers
    for send in (server.complete, server.chat):
        for stream in (False, True):
            answer = send(max_tokens=3, temperature=0, stream=stream, temprature=1, __class__=1)
            assert answer.status_code == 200
            assert answer.headers["x-penstock-ignored"] == "temprature, __class__"
    assert caplog.text.count("temprature") == 1  # in the log once, however often it comes
    answer = server.complete(max_tokens=3, temprature=1, n=0)
    assert answer.status_code == 400 and answer.headers["x-penstock-ignored"] == "temprature"
    for path, body in cases(__file__, "bodies of other routes"):
        assert server.post(path, {**body, "new_field": 1}).headers["x-penstock-ignored"] == "new_field", path


def test_ignored_names_break_no_header_and_fill_no_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("x" * 5000, "a\r\nset-cookie: b", "é\u2028", "", " ", ",", '"'):
        answer = server.complete(max_tokens=1, **{name: 1})
        assert answer.status_code == 200 and "set-cookie" not in answer.headers
        assert len(answer.headers["x-penstock-ignored"]) <= 100
    answer = server.complete(max_tokens=1, **{f"field_{place}": 1 for place in range(200)})
    assert answer.status_code == 200 and len(answer.headers["x-penstock-ignored"]) <= 1100
    for start in range(0, 1000, 200):
        server.complete(max_tokens=1, **{f"other_{place}": 1 for place in range(start, start + 200)})
    assert len([each for each in caplog.records if "is ignored" in each.message]) <= 256
