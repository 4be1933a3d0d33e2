"""/v1/responses, as OpenAI's own package sends and reads them."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.server import prompts
from penstock.engine.server.agents.response_store import ResponseStore, StoredResponse
from penstock.engine.server.custom_tools import InputDecoder
from penstock.engine.text.prompt import INLINE_CHARS, chat_prompt
from penstock.engine.text.tokenizer import Tokenizer
from tests.support.refusals import cases
from tests.support.running_server import MODEL, Running, running

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "Weather.", "parameters": SCHEMA, "strict": True}
PATCH = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}}
CALLED = (
    '<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "patch", "arguments": {"input": "- \\"a\\"\\n+ b"}}\n</tool_call>'
)

NOBODY = (None, b"")  # the owner where no keys are


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    server.engine.reply = "Hello."
    with server.openai() as made:
        yield made


# One answer.


def test_a_response_has_its_text_and_usage_and_says_what_was_asked(server: Running, client: Any) -> None:
    response = client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, user="me"
    )
    assert (response.output_text, response.status, response.model) == ("Hello.", "completed", MODEL)
    assert (response.temperature, response.top_p, response.metadata, response.user) == (0.5, 1.0, {"a": "b"}, "me")
    assert server.prompt == "system: Be brief.\nuser: Hi\n>"
    assert server.params.temperature == 0.5
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (28, 7, 35)
    assert usage.input_tokens_details.cached_tokens == 16 * (28 // 16) or usage.input_tokens_details.cached_tokens == 0
    with client.responses.stream(model=MODEL, input="Hi") as stream:  # the package's own gathering
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "Hello."
        assert stream.get_final_response().output_text == "Hello."


def test_items_become_the_messages_of_a_chat(server: Running, client: Any) -> None:
    items = [
        {"role": "developer", "content": "Do."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes", "annotations": []}]},
        {"role": "user", "content": "Why?"},
    ]
    client.responses.create(model=MODEL, input=items)
    assert server.prompt == "system: Do.\nuser: Hi\nassistant: Yes\nuser: Why?\n>"


def test_a_failure_in_a_stream_is_an_event_and_otherwise_a_status(server: Running, client: Any, openai: Any) -> None:
    server.engine.delay_s = 0.01
    try:
        server.engine.fail_next = "out of blocks"
        with pytest.raises(openai.InternalServerError, match="out of blocks"):
            client.responses.create(model=MODEL, input="Hi")
        *_, last = client.responses.create(model=MODEL, input="Hi", stream=True)
    finally:
        server.engine.fail_next, server.engine.delay_s = None, 0.0
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error" and "out of blocks" in last.response.error.message


# Tools, reasoning, formats.


def test_reasoning_text_and_calls_are_items_and_can_be_sent_back(qwen: Running) -> None:
    qwen.engine.reply = CALLED
    with qwen.openai() as client:
        asked = {"model": MODEL, "tools": [TOOL, PATCH], "reasoning": {"effort": "high", "summary": "auto"}}
        response = client.responses.create(input="Ulm?", **asked)
        thought, text, call, patch = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
        assert (text.type, response.output_text) == ("message", "Look.")
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Ulm"})
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", '- "a"\n+ b')
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        events = list(client.responses.create(input="Ulm?", stream=True, **asked))
        pieces = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert "".join(pieces) == patch.input
        starts = [event.item.type for event in events if event.type == "response.output_item.added"]
        assert starts == ["reasoning", "message", "function_call", "custom_tool_call"]
        qwen.engine.reply = "7 degrees."
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "7"},
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Done"},
        ]
        history = [{"role": "user", "content": "Ulm?"}, *response.output, *results]
        assert client.responses.create(input=history, **asked).output_text == "7 degrees."
        prompt = qwen.prompt
        client.responses.create(input=results, previous_response_id=response.id, **asked)
    assert qwen.prompt == prompt
    for text in ('{"city": "Ulm"}', r'{"input": "- \"a\"\n+ b"}', "<tool_response>\n7\n", "<tool_response>\nDone\n"):
        assert text in prompt


@pytest.mark.parametrize("step_tokens", [1, 7, 10_000])
def test_the_log_probabilities_of_a_text_are_those_of_its_tokens_alone(qwen: Running, step_tokens: int) -> None:
    qwen.engine.reply = f"<think>\nt</think>\n\ntt<ü\n{CALLED.partition('Look.')[2]} tt"
    qwen.engine.step_tokens = step_tokens
    asked: Any = {"model": MODEL, "input": "Ulm?", "tools": [TOOL, PATCH], "top_logprobs": 2}
    asked["include"] = ["message.output_text.logprobs"]
    try:
        with qwen.openai() as client:
            response = client.responses.create(**asked)
            events = list(client.responses.create(stream=True, **asked))
    finally:
        qwen.engine.step_tokens = 1
    parts = [item.content[0] for item in response.output if item.type == "message"]
    assert [part.text for part in parts] == ["tt<ü", " tt"] and response.top_logprobs == 2
    for part in parts:
        assert bytes(byte for token in part.logprobs for byte in token.bytes).decode() == part.text
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in part.logprobs)
    for kind in ("delta", "done"):
        of_kind = [event for event in events if event.type == f"response.output_text.{kind}"]
        shown = [(token.token, token.logprob) for event in of_kind for token in event.logprobs]
        assert shown == [(token.token, token.logprob) for part in parts for token in part.logprobs]


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [({"include": ["message.output_text.logprobs"]}, 0), ({"top_logprobs": 1}, 1), ({"top_logprobs": 0}, None)],
)
def test_either_field_asks_for_log_probabilities(client: Any, fields: dict[str, Any], num_top: int | None) -> None:
    tokens = client.responses.create(model=MODEL, input="Hi", **fields).output[0].content[0].logprobs
    assert [len(token.top_logprobs) for token in tokens] == ([] if num_top is None else [num_top] * len("Hello."))


@pytest.mark.parametrize(("arguments", "text"), cases(__file__, "inputs of custom tools"))
def test_the_input_of_a_custom_tool_is_the_same_however_its_json_is_cut(arguments: str, text: str) -> None:
    halves = ([arguments[:at], arguments[at:]] for at in range(len(arguments)))
    for pieces in (arguments, *halves):
        decoder = InputDecoder()
        deltas = [*map(decoder.feed, pieces), decoder.feed("", is_last=True)]
        assert "".join(deltas) == "".join(decoder.parts) == text


# What is kept.


def test_a_response_goes_on_from_the_one_before_it(server: Running, client: Any, openai: Any) -> None:
    first = client.responses.create(model=MODEL, input="One", instructions="Not carried over.")
    second = client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    third = client.responses.create(model=MODEL, input="Three", previous_response_id=second.id)
    assert server.prompt == "user: One\nassistant: Hello.\nuser: Two\nassistant: Hello.\nuser: Three\n>"
    assert third.previous_response_id == second.id
    assert client.responses.retrieve(second.id).output_text == "Hello."
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=MODEL, input="Four", previous_response_id=third.id)


def test_the_tokens_of_a_prompt_are_counted_as_the_response_has_them(qwen: Running) -> None:
    asked = {"model": MODEL, "instructions": "Be brief.", "tools": [TOOL, PATCH], "reasoning": {"effort": "low"}}
    with qwen.openai() as client:
        first = client.responses.create(input="One", **asked)
        assert client.responses.input_tokens.count(input="One", **asked).input_tokens == first.usage.input_tokens
        more = {"input": [{"role": "user", "content": "x" * 2000}], "previous_response_id": first.id}
        counted = client.responses.input_tokens.count(**asked, **more)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens > first.usage.input_tokens + 2000, "more than the context holds"


def test_a_conversation_is_not_compacted_and_the_client_is_told_why(client: Any, openai: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="send fewer items"):
        client.responses.compact(model=MODEL, input="One")


def test_fields_outside_of_the_prompt_are_not_stored(server: Running) -> None:
    part = {"type": "output_text", "text": "Hi", "annotations": ["mark"], "logprobs": ["mark"]}
    item = {"role": "assistant", "content": [part | {"prompt_cache_breakpoint": "mark"}]}
    response = server.post("/v1/responses", {"model": MODEL, "input": [item]}).json()
    stored = server.call(lambda: server.app.service.responses.get(NOBODY, response["id"]))
    assert stored is not None and b'"Hi"' in stored.items and b"mark" not in stored.items


def test_the_items_of_all_previous_responses_are_limited_like_a_body() -> None:
    with running(max_body_bytes=1024) as server:
        previous_id = None
        for text, expected in (("x" * 400, 200), ("x" * 400, 200), ("x", 400)):
            body = {"model": MODEL, "input": text, "max_output_tokens": 1, "previous_response_id": previous_id}
            answer = server.post("/v1/responses", body)
            assert answer.status_code == expected, answer.text
            previous_id = answer.json().get("id")
    assert answer.json()["error"]["param"] == "previous_response_id" and "at most 1024" in answer.text


def test_store_false_keeps_nothing(client: Any, openai: Any) -> None:
    response = client.responses.create(model=MODEL, input="Hi", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_what_one_key_keeps_is_not_there_for_another(openai: Any) -> None:
    with running(api_keys=("sk-a", "sk-b")) as server, server.openai("sk-a") as mine, server.openai("sk-b") as other:
        response = mine.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
        assert mine.responses.retrieve(response.id).id == response.id
        for ask in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(response.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(model=MODEL, input="Hi", previous_response_id=response.id)


def test_a_response_that_the_store_has_no_room_for_says_that_it_is_not_kept(server: Running, client: Any) -> None:
    service = server.app.service
    server.call(lambda: setattr(service, "responses", ResponseStore(max_bytes=10)))
    try:
        assert client.responses.create(model=MODEL, input="Hi").store is False
    finally:
        server.call(lambda: setattr(service, "responses", ResponseStore()))


# Fields and tools that are unknown here.

# What the schema of Open Responses requires of a response.
REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier"),
    *("prompt_cache_key",),
}


def test_a_response_has_every_field_that_open_responses_requires(server: Running) -> None:
    asked = {"model": MODEL, "input": "Hi", "prompt_cache_key": "k", "safety_identifier": "s", "presence_penalty": 0.5}
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA}
    asked["text"] = {"format": form}
    plain, given = (server.post("/v1/responses", body).json() for body in ({"model": MODEL, "input": "Hi"}, asked))
    assert plain.keys() >= REQUIRED
    assert (plain["prompt_cache_key"], plain["service_tier"], plain["presence_penalty"]) == (None, "default", 0)
    assert (given["prompt_cache_key"], given["safety_identifier"], given["presence_penalty"]) == ("k", "s", 0.5)
    assert given["text"]["format"]["type"] == "json_schema"


def test_what_codex_sends_is_answered_and_what_was_left_out_is_named(qwen: Running) -> None:
    qwen.engine.reply = "Hello."
    body = json.loads(Path(__file__).with_name("codex_request.json").read_text())
    answer = qwen.post("/v1/responses", body)
    assert answer.status_code == 200 and "response.completed" in answer.text
    assert answer.headers["x-penstock-ignored"] == "client_metadata, tools:web_search, tools:namespace"
    assert "You are a coding agent.\n\nSandbox: none." in qwen.prompt
    assert '"weather"' in qwen.prompt and "web_search" not in qwen.prompt
    assert r'Edits.\n\nThe input has to match this Lark grammar:\nstart: \"*** Begin Patch\""' in qwen.prompt


def test_parts_of_the_calls_of_skipped_tools_are_skipped_as_well_and_named(server: Running) -> None:
    include = ["web_search_call.action.sources", "file_search_call.results", "message.output_text.logprobs"]
    body = {"model": MODEL, "input": "Hi", "tools": [{"type": "web_search"}], "include": [*include, include[0]]}
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200 and answer.json()["output"][0]["content"][0]["logprobs"]
    named = ["tools:web_search", *(f"include:{part}" for part in include[:2])]
    assert answer.headers["x-penstock-ignored"] == ", ".join(named)


# Work that would hold up the event loop is done aside.


def test_a_long_conversation_is_rendered_aside_however_short_what_comes_is(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def watched(*args: Any, **options: Any) -> str:
        threads.append(threading.get_ident())
        return chat_prompt(*args, **options)

    monkeypatch.setattr(prompts, "chat_prompt", watched)
    loop_thread = server.call(threading.get_ident)
    for length in (10, INLINE_CHARS):
        items = json.dumps([{"type": "message", "role": "user", "content": "x" * length}]).encode()
        stored = StoredResponse(NOBODY, b"{}", items, None)
        server.call(partial(server.app.service.responses.put, "resp_past", stored))
        server.post("/v1/responses", {"model": MODEL, "input": "Hi", "previous_response_id": "resp_past"})
    assert [thread == loop_thread for thread in threads] == [True, False]


def test_the_tokens_of_long_reasoning_are_counted_aside(qwen: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, *options: Any) -> Any:
        if text.startswith("Hm"):
            threads.append(threading.get_ident())
        return encode(self, text, *options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    monkeypatch.setattr("penstock.engine.server.agents.item_writer.INLINE_CHARS", 100, raising=False)
    for length in (10, 200):
        qwen.engine.reply = f"<think>\nHm{'m' * length}\n</think>\n\nYes."
        with qwen.openai() as client:
            response = client.responses.create(model=MODEL, input="Hi")
        assert response.usage.output_tokens_details.reasoning_tokens == length + 2
    loop_thread = qwen.call(threading.get_ident)
    assert [thread == loop_thread for thread in threads] == [True, False]


@pytest.mark.parametrize("cut", [{"max_output_tokens": 55}, {"stop_token_ids": [ord("U")]}])
@pytest.mark.parametrize(("tool", "field"), [(TOOL, "city"), (PATCH, "input")])
def test_a_call_that_was_cut_off_does_not_spoil_what_comes_after_it(
    qwen: Running, cut: dict[str, Any], tool: dict[str, Any], field: str
) -> None:
    qwen.engine.reply = f'<tool_call>\n{{"name": "{tool["name"]}", "arguments": {{"{field}": "Ulm"}}}}\n</tool_call>'
    asked = {"model": MODEL, "input": "Ulm?", "tools": [tool]}
    first = qwen.post("/v1/responses", {**asked, "tool_choice": "required", **cut}).json()
    (call,) = first["output"]
    assert call["status"] == "incomplete" and "Ulm" not in (call["input"] if tool is PATCH else call["arguments"])
    qwen.engine.reply = "It rains."
    answer = qwen.post("/v1/responses", {**asked, "input": "Go on.", "previous_response_id": first["id"]})
    assert answer.status_code == 200, answer.text
    assert "Ulm?" in qwen.prompt and '"arguments"' not in qwen.prompt.partition("Ulm?")[2]


def stored(size_bytes: int = 10) -> StoredResponse:
    return StoredResponse(NOBODY, b"r" * (size_bytes - 2), b"[]", None)


def kept(store: ResponseStore, *names: str) -> list[str]:
    store.check()
    return [name for name in names if store.get(NOBODY, name) is not None]


def test_the_least_recently_used_response_is_evicted_first() -> None:
    for store in (ResponseStore(max_responses=3), ResponseStore(max_bytes=30)):
        for name in "abc":
            assert store.put(name, stored())
        assert store.get(NOBODY, "a") is not None
        assert store.put("d", stored())
        assert kept(store, *"abcd") == ["a", "c", "d"]


def test_a_large_response_evicts_several_and_one_larger_than_the_store_none() -> None:
    store = ResponseStore(max_bytes=30)
    for name in "abc":
        store.put(name, stored())
    assert not store.put("huge", stored(31))
    assert kept(store, *"abc", "huge") == ["a", "b", "c"]
    assert store.put("large", stored(20))
    assert kept(store, *"abc", "large") == ["c", "large"]
