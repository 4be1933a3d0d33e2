"""/v1/responses, as OpenAI's own package sends and reads them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.server.agents.response_store import ResponseStore, StoredResponse
from penstock.engine.server.custom_tools import InputDecoder
from tests.support.refusals import cases
from tests.support.running_server import MODEL, Running, events, running
from tests.support.three_apis import APIS, SCHEMA

TOOL = APIS["responses"].tool("weather", SCHEMA) | {"strict": True}
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


def test_a_response_has_its_text_its_usage_and_the_requests_fields(server: Running, client: Any) -> None:
    response = client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, user="me"
    )
    assert (response.output_text, response.status, response.model) == ("Hello.", "completed", MODEL)
    assert (response.temperature, response.top_p, response.metadata, response.user) == (0.5, 1.0, {"a": "b"}, "me")
    assert server.prompt == "system: Be brief.\nuser: Hi\n>"
    assert server.params.temperature == 0.5
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (28, 7, 35)
    with client.responses.stream(model=MODEL, input="Hi") as stream:  # the package's own gathering
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "Hello."
        assert stream.get_final_response().output_text == "Hello."


def test_the_package_reads_items_and_sends_them_back(qwen: Running) -> None:
    qwen.engine.reply = CALLED
    fields = {"model": MODEL, "tools": [TOOL, PATCH], "reasoning": {"effort": "high", "summary": "auto"}}
    with qwen.openai() as client:
        for stream in (False, True):
            response = client.responses.create(input="Ulm?", stream=stream, **fields)
            if stream:
                *_, end = response
                response = end.response
            thought, text, call, patch = response.output
            assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
            assert (text.type, response.output_text) == ("message", "Look.")
            assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Ulm"})
            assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", '- "a"\n+ b')
            assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        qwen.engine.reply = "7 degrees."
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "7"},
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Done"},
        ]
        history = [{"role": "user", "content": "Ulm?"}, *response.output, *results]
        assert client.responses.create(input=history, **fields).output_text == "7 degrees."
        prompt = qwen.prompt
        client.responses.create(input=results, previous_response_id=response.id, **fields)
    assert qwen.prompt == prompt
    for text in ('{"city": "Ulm"}', r'{"input": "- \"a\"\n+ b"}', "<tool_response>\n7\n", "<tool_response>\nDone\n"):
        assert text in prompt


@pytest.mark.parametrize("step_tokens", [1, 7, 10_000])
def test_the_log_probabilities_of_a_text_are_those_of_its_tokens_alone(qwen: Running, step_tokens: int) -> None:
    qwen.engine.reply = f"<think>\nt</think>\n\ntt<ü\n{CALLED.partition('Look.')[2]} tt"
    qwen.engine.step_tokens = step_tokens
    api, fields = APIS["responses"], {"tools": [TOOL, PATCH], "top_logprobs": 2}
    try:
        reply = api.ask(qwen, **fields).json()
        assert api.streamed(events(api.ask(qwen, stream=True, **fields))) == api.whole(reply)
    finally:
        qwen.engine.step_tokens = 1
    parts = [item["content"][0] for item in reply["output"] if item["type"] == "message"]
    assert [part["text"] for part in parts] == ["tt<ü", " tt"] and reply["top_logprobs"] == 2
    for part in parts:
        assert bytes(byte for token in part["logprobs"] for byte in token["bytes"]).decode() == part["text"]
        assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 2 for token in part["logprobs"])


@pytest.mark.parametrize(("arguments", "text"), cases(__file__, "inputs of custom tools"))
def test_the_input_of_a_custom_tool_is_the_same_however_its_json_is_cut(arguments: str, text: str) -> None:
    halves = ([arguments[:at], arguments[at:]] for at in range(len(arguments)))
    for pieces in (arguments, *halves):
        decoder = InputDecoder()
        deltas = [*map(decoder.feed, pieces), decoder.feed("", is_last=True)]
        assert "".join(deltas) == "".join(decoder.parts) == text


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


@pytest.mark.parametrize(("most", "limit"), [(1000, "at most 1024 are"), (1, "more than 1 responses in a row")])
def test_previous_responses_are_limited_in_number_and_like_a_body(
    most: int, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.server.agents.items_api.MAX_CHAIN", most)
    with running(max_body_bytes=1024) as server:
        previous_id = None
        for text, expected in (("x" * 400, 200), ("x" * 400, 200), ("x", 400)):
            body = {"model": MODEL, "input": text, "max_output_tokens": 1, "previous_response_id": previous_id}
            answer = server.post("/v1/responses", body)
            assert answer.status_code == expected, answer.text
            previous_id = answer.json().get("id")
    assert answer.json()["error"]["param"] == "previous_response_id" and limit in answer.text


def test_store_false_keeps_nothing(client: Any, openai: Any) -> None:
    response = client.responses.create(model=MODEL, input="Hi", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_response_stored_with_one_key_is_not_served_with_another(openai: Any) -> None:
    with running(api_keys=("sk-a", "sk-b")) as server, server.openai("sk-a") as mine, server.openai("sk-b") as other:
        response = mine.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
        assert mine.responses.retrieve(response.id).id == response.id
        for ask in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(response.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(model=MODEL, input="Hi", previous_response_id=response.id)


def test_a_response_larger_than_the_store_says_that_it_is_not_stored(server: Running, client: Any) -> None:
    service = server.app.service
    server.call(lambda: setattr(service, "responses", ResponseStore(max_bytes=10)))
    try:
        assert client.responses.create(model=MODEL, input="Hi").store is False
    finally:
        server.call(lambda: setattr(service, "responses", ResponseStore()))


def test_a_response_has_every_field_that_open_responses_requires(server: Running) -> None:
    asked = {"model": MODEL, "input": "Hi", "prompt_cache_key": "k", "safety_identifier": "s", "presence_penalty": 0.5}
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA}
    asked["text"] = {"format": form}
    plain, given = (server.post("/v1/responses", body).json() for body in ({"model": MODEL, "input": "Hi"}, asked))
    assert plain.keys() >= {*cases(__file__, "fields that Open Responses requires")}
    assert (plain["prompt_cache_key"], plain["service_tier"], plain["presence_penalty"]) == (None, "default", 0)
    assert (given["prompt_cache_key"], given["safety_identifier"], given["presence_penalty"]) == ("k", "s", 0.5)
    assert given["text"]["format"]["type"] == "json_schema"


def test_a_request_of_codex_is_answered_and_names_the_tools_left_out(qwen: Running) -> None:
    qwen.engine.reply = "Hello."
    body = json.loads(Path(__file__).with_name("codex_request.json").read_text())
    answer = qwen.post("/v1/responses", body)
    assert answer.status_code == 200 and "response.completed" in answer.text
    assert answer.headers["x-penstock-ignored"] == "client_metadata, tools:web_search, tools:namespace"
    assert "You are a coding agent.\n\nSandbox: none." in qwen.prompt
    assert '"weather"' in qwen.prompt and "web_search" not in qwen.prompt
    assert r'Edits.\n\nThe input has to match this Lark grammar:\nstart: \"*** Begin Patch\""' in qwen.prompt


@pytest.mark.parametrize("cut", [{"max_output_tokens": 55}, {"stop_token_ids": [ord("U")]}])
@pytest.mark.parametrize(("tool", "field"), [(TOOL, "city"), (PATCH, "input")])
def test_a_cut_call_ends_no_conversation(qwen: Running, cut: dict[str, Any], tool: dict[str, Any], field: str) -> None:
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
    assert not store.put("huge", stored(31)) and kept(store, *"acd", "huge") == ["a", "c", "d"], "larger than the store"
    assert store.put("large", stored(20)) and kept(store, *"acd", "large") == ["d", "large"]
