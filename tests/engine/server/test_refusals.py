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
from penstock.engine.http import body as body_of_http
from penstock.engine.http import token_form
from penstock.engine.http.errors import MAX_MESSAGE_CHARS, HttpError
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server import prompts
from penstock.engine.text import prompt
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.refusals import cases, table
from tests.support.running_server import Running, running, until


def post(server: Running, path: str, body: bytes, content_type: str = "application/json") -> httpx.Response:
    return server.http.post(path, content=body, headers={"content-type": content_type})


def refused(answer: httpx.Response, code: int = 400, param: str | None = None) -> str:
    """The message, once the answer has proved to be a bounded refusal in the error format."""
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


def bodies_with_a_wrong_field() -> Iterator[tuple[str, dict[str, Any], str]]:
    for field, value, param in table(__file__, "prompts"):
        yield "/v1/completions", {"prompt": "abc", field: value}, param
    for fields, param in table(__file__, "conversations", MESSAGE=MESSAGE):
        yield "/v1/chat/completions", {"messages": [MESSAGE], **fields}, param
    yield from table(__file__, "endpoints", MESSAGE=MESSAGE)


@pytest.mark.parametrize(("path", "body", "param"), [*bodies_with_a_wrong_field()])
def test_a_wrong_field_is_refused_by_its_place(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    answer = server.post(path, body)
    refused(answer)
    assert answer.json()["error"]["param"] == param


# Bodies that are not what JSON, or a JSON object, should be.


@pytest.mark.parametrize("body", table(__file__, "bodies"))
def test_a_body_that_is_not_a_proper_json_object_is_refused(server: Running, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"):
        refused(post(server, path, body))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (r"\ud800", r"\ud800 at byte 11"),
        (r"ab\udc00cd", r"\udc00 at byte 13"),
        (r"\ud83d\ude00\ud83d\u0041", r"\ud83d at byte 23"),
        (r"\uD800\n and more text", r"\uD800 at byte 11"),
    ],
)
def test_half_a_surrogate_pair_is_named_with_its_place(server: Running, text: str, named: str) -> None:
    message = refused(post(server, "/v1/completions", b'{"prompt":"%s"}' % text.encode()))
    assert message == f"the body is not valid JSON: {named} is a surrogate without its other half"


@pytest.mark.parametrize("cut", [rb"", rb"\ud83d", rb"\ud83d\ude", rb"\\ud800", rb"\ud83d\ude00"])
def test_a_body_that_ends_early_is_called_truncated(server: Running, cut: bytes) -> None:
    assert "truncated" in refused(post(server, "/v1/completions", b'{"prompt":"ab' + cut))


def test_a_body_of_very_many_fields_is_refused(server: Running) -> None:
    fields = b",".join(b'"%x":0' % number for number in range(100_000))
    assert "100000 fields; at most 256" in refused(post(server, "/v1/completions", b"{" + fields + b"}"))


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


# Size before work.


@pytest.mark.parametrize(("path", "body"), cases(__file__, "millions", pytest=pytest))
def test_millions_of_values_are_refused_without_building_them(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes
) -> None:
    monkeypatch.setattr(prompts, "decode", Mock(side_effect=AssertionError("decoded")))
    refused(post(server, path, body), 400, next(iter(json.loads(body[:12].split(b":")[0] + b":0}"))))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "x" * 5000}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"x": "x" * 5000}}}]},
    ],
    ids=["a part", "a call"],
)
def test_a_long_chat_is_rendered_aside_wherever_its_length_is(
    server: Running, monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    rendered_in: list[threading.Thread] = []

    def chat_prompt(*arguments: Any, **options: Any) -> str:
        rendered_in.append(threading.current_thread())
        return prompt.chat_prompt(*arguments, **options)

    monkeypatch.setattr(prompts, "chat_prompt", chat_prompt)
    loop = server.call(threading.current_thread)
    for messages in ([MESSAGE, message], [MESSAGE]):
        server.post("/tokenize", {"messages": messages})
    assert rendered_in[0] is not loop and rendered_in[1] is loop


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.app.service.tokenizer, "encode_batch", Mock(side_effect=AssertionError("tokenized")))
    message = refused(server.complete("x" * 200_000), 400, "prompt")
    assert "200000 characters" in message


def test_prompts_times_choices_are_bounded(server: Running) -> None:
    before = len(server.engine.submitted)
    refused(server.complete(["a"] * 100, n=100), 400, "n")
    assert len(server.engine.submitted) == before


@pytest.mark.parametrize(
    ("asked", "field"), [({"prompt_logprobs": 3}, "prompt_logprobs"), ({"echo": True, "logprobs": 3}, "logprobs")]
)
def test_log_probabilities_of_prompts_are_bounded(
    server: Running, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr(prompts, "MAX_PROMPT_LOGPROBS", 3 * 4 * 2 * 4)
    assert server.complete(["abcd"] * 3, n=2, max_tokens=1, **asked).status_code == 200
    message = refused(server.complete(["abcde", "abcd", "abcd"], n=2, max_tokens=1, **asked), 400, field)
    assert "13 positions × 2 × 4" in message and "96" in message


def test_log_probabilities_of_a_chat_s_prompt_are_counted_once(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [MESSAGE], "n": 2, "max_tokens": 1, "prompt_logprobs": 1}
    count = 2 * server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
    monkeypatch.setattr(prompts, "MAX_PROMPT_LOGPROBS", count)
    assert server.post("/v1/chat/completions", body).status_code == 200
    monkeypatch.setattr(prompts, "MAX_PROMPT_LOGPROBS", count - 1)
    refused(server.post("/v1/chat/completions", body), 400, "prompt_logprobs")


def test_a_large_value_in_a_small_field_is_refused_by_size(server: Running) -> None:
    refused(server.complete(stop=["x" * 100] * 4000), 400, "stop")
    refused(server.complete(logit_bias={str(i): 0.123456789 for i in range(20_000)}), 400, "logit_bias")


# Models, routes, methods.


def test_an_unknown_model_is_a_404_that_names_those_there_are(server: Running) -> None:
    assert "'gpt-4'" in refused(server.complete(model="gpt-4"), 404, "model")
    refused(server.chat(model="x" * 100_000), 404, "model")
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
    answer = server.http.get("/v1/completions")
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert server.http.request("BREW", "/health").status_code in (400, 405)


# What the engine refuses.


def test_a_full_queue_is_a_429_with_a_time_and_before_tokenizing() -> None:
    engine = FakeEngine(max_open=2)
    engine.hold = True
    with running(engine) as server:
        for ask in (server.complete, server.chat):
            answer = ask(n=3)
            refused(answer, 429)
            assert answer.headers["retry-after"] == "7"
        tokenizer = server.app.service.tokenizer
        tokenizer.encode_batch = None  # type: ignore[assignment]  # would be a 500 if it were called
        refused(server.complete(n=3), 429)
        refused(server.post("/v1/embeddings", {"input": ["a", "b", "c"]}), 429)
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
            asked = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body)
            until(lambda: server.call(lambda: server.app.service._num_preparing) == 1)
            refused(server.complete(), 429)
            go_on.set()
            assert asked.result().status_code == 200
        assert server.complete("x" * 5000, truncate_prompt_tokens=5).status_code == 200


def test_a_refused_prompt_takes_back_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(delay_s=0.01)
    generate = engine.generate

    def generate_one(*given: Any, **options: Any) -> Answer:
        if engine.submitted:
            raise InvalidRequest("prompt", "it is the second")
        return generate(*given, **options)

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


def test_a_bug_is_a_500_that_tells_the_client_nothing(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.app.service.tokenizer, "encode_batch", Mock(side_effect=RuntimeError("secret detail")))
    assert refused(server.complete(), 500) == "internal error"
    until(lambda: "secret detail" in caplog.text)  # it is in the log


# Ids of requests.


def test_a_client_id_is_cleaned_before_it_is_echoed(server: Running) -> None:
    def echoed(value: bytes) -> str:
        return server.http.get("/version", headers={b"x-request-id": value}).headers["x-request-id"]

    assert echoed(b"job-7/a.b:c") == "job-7/a.b:c"
    assert echoed(b"a b\tc<script>\xff") == "abcscript"
    assert len(echoed(b"x" * 5000)) == 128
    assert len(echoed(b"\xff\xff")) == 32  # nothing is left, so it is ours


def test_a_word_that_is_none_is_refused_with_those_that_are() -> None:
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


def test_a_list_of_ids_that_is_too_long_is_refused_with_its_length(server: Running) -> None:
    for ids, length in (([1] * 4000, 4000), ([1] * 1001, 1001), ([[1], [1] * 4001], 2001)):
        message = refused(server.complete(ids), 400, "prompt")
        assert f"{length} tokens; the context holds 1000 with the answer, so at most 999" in message
    message = refused(server.post("/v1/embeddings", {"input": [1] * 1001}), 400, "input")
    assert "1001 tokens; the context holds 1000, so at most 1000 can be given" in message
    message = refused(server.post("/detokenize", {"tokens": [1] * 1001}), 400, "tokens")
    assert "1001 tokens" in message


def test_too_many_texts_are_refused_before_any_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "decode", Mock(side_effect=AssertionError("decoded")))
    for text in (b'"",', b'"\\\\",', b'"\\"",'):
        raw = msgspec.Raw(b"[" + (text * 3000).rstrip(b",") + b"]")
        with pytest.raises(InvalidRequest, match="more than 1024 inputs"):
            prompts.decode_inputs("prompt", raw, 1024, INFO)
    monkeypatch.undo()
    quoted = msgspec.Raw(msgspec.json.encode(['"' * 50] * 1024))
    assert len(prompts.decode_inputs("prompt", quoted, 1024, INFO)) == 1024


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


def test_ignored_names_cannot_break_the_header_or_fill_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("x" * 5000, "a\r\nset-cookie: b", "é\u2028", "", " ", ",", '"'):
        answer = server.complete(max_tokens=1, **{name: 1})
        assert answer.status_code == 200 and "set-cookie" not in answer.headers
        assert len(answer.headers["x-penstock-ignored"]) <= 100
    answer = server.complete(max_tokens=1, **{f"field_{place}": 1 for place in range(200)})
    assert answer.status_code == 200 and len(answer.headers["x-penstock-ignored"]) <= 1100
    for start in range(0, 1000, 200):
        server.complete(max_tokens=1, **{f"other_{place}": 1 for place in range(start, start + 200)})
    assert len([each for each in caplog.records if "is ignored" in each.message]) <= 256
