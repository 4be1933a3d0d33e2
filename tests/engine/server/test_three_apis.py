"""Chats, Responses and Messages give the same answer: whole and streamed, in every format of tool calls, however the engine cuts it.

three_apis.json has the options of a request as the clients of each API write them, and the cases: what the model writes, and the
answer. Each reader below turns an API's answer, or its events, into one `Seen`. An error names the field as the client of that API
wrote it, and is the same for a stream.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from penstock.engine.text.template import ChatTemplate
from tests.support.call_writers import FORMS, WRITERS
from tests.support.chat_samples import QWEN3
from tests.support.fake_engine import INFO, FakeEngine, byte_tokenizer
from tests.support.refusals import hardest
from tests.support.running_server import MODEL, Running, events, running

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": 'Zürich <"\n>', "days": 3}),
    ("weather", {"city": "Ulm"}),
]
SIZES = (1, 7, 10_000)  # tokens (bytes) that one step of the engine brings


class Seen(NamedTuple):
    reasoning: str
    text: str
    calls: list[tuple[str, Any]]
    finish: str
    usage: tuple[int, int, int]  # tokens read, of them cached, and written


def chat_usage(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


def whole_chat(reply: dict[str, Any]) -> Seen:
    (choice,) = reply["choices"]
    message = choice["message"]
    calls = [
        (call["custom"]["name"], call["custom"]["input"])
        if call["type"] == "custom"
        else (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    assert message["content"] != "", "an empty text is null"
    reasoning, text = message.get("reasoning_content", ""), message["content"] or ""
    return Seen(reasoning, text, calls, choice["finish_reason"], chat_usage(reply["usage"]))


def streamed_chat(found: list[dict[str, Any]]) -> Seen:
    deltas = [choice["delta"] for event in found for choice in event["choices"]]
    parts: list[list[str]] = []
    for call in [call for delta in deltas for call in delta.get("tool_calls", ())]:
        kind, field = ("custom", "input") if "custom" in call else ("function", "arguments")
        if "id" in call:
            assert (call["index"], call["type"], call[kind][field]) == (len(parts), kind, "")
            parts.append([call[kind]["name"], "", kind])
        else:
            assert "name" not in call[kind] and call[kind][field] and kind == parts[call["index"]][2]
        parts[call["index"]][1] += call[kind][field]
    reasons = [choice["finish_reason"] for event in found for choice in event["choices"] if choice["finish_reason"]]
    reasoning, text = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content"))
    calls = [(name, text if kind == "custom" else json.loads(text)) for name, text, kind in parts]
    return Seen(reasoning, text, calls, "".join(reasons), chat_usage(found[-1]["usage"]))


# Type of an item → type of its text's events, and the field of the text.
TEXTS = {
    "reasoning": ("reasoning_text", "text"),
    "message": ("output_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


def whole_response(reply: dict[str, Any]) -> Seen:
    items = reply["output"]
    reasoning, text = (
        "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
        for kind in ("reasoning", "message")
    )
    calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
    calls += [(item["name"], item["input"]) for item in items if item["type"] == "custom_tool_call"]
    is_cut = {"reason": "max_output_tokens"} if reply["status"] == "incomplete" else None
    assert reply["incomplete_details"] == is_cut
    usage = reply["usage"]
    read, cached = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    finish = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}[reply["status"]]
    return Seen(reasoning, text, calls, finish, (read, cached, usage["output_tokens"]))


def streamed_response(found: list[dict[str, Any]]) -> Seen:
    """Read the deltas; the response in the last event must say the same."""
    reply = found[-1]["response"]
    ends = ["response.created", "response.in_progress", f"response.{reply['status']}"]
    assert [event["type"] for event in (*found[:2], found[-1])] == ends
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    for index, item in enumerate(reply["output"]):
        about = [event for event in found if event.get("output_index") == index]
        kind, field = TEXTS[item["type"]]
        text = item[field] if field in item else "".join(part["text"] for part in item["content"])
        part = ["content_part"] if "content" in item else []
        wanted = [f"{each}.added" for each in ("output_item", *part)]
        wanted += [f"{kind}.delta"] * (len(about) - 2 * len(wanted) - 1)
        wanted += [f"{each}.done" for each in (kind, *part, "output_item")]
        assert [event["type"].removeprefix("response.") for event in about] == wanted
        deltas, done = about[1 + len(part) : -2 - len(part)], about[-2 - len(part)]
        assert "".join(event["delta"] for event in deltas) == done[field] == text
        assert about[0]["item"] == {**item, "status": "in_progress", "content" if part else field: [] if part else ""}
        assert about[-1]["item"] == item
    return whole_response(reply)


def whole_message(reply: dict[str, Any]) -> Seen:
    blocks = reply["content"]
    reasoning, text = (
        "".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("thinking", "text")
    )
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    finish = {"tool_use": "tool_calls", "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}[
        reply["stop_reason"]
    ]
    return Seen(reasoning, text, calls, finish, message_usage(reply["usage"]))


def message_usage(usage: dict[str, int]) -> tuple[int, int, int]:
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached, usage["output_tokens"]


def streamed_message(found: list[dict[str, Any]]) -> Seen:
    blocks: list[dict[str, Any]] = []
    for event in found:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            for kind, field in (("text_delta", "text"), ("thinking_delta", "thinking")):
                if delta["type"] == kind:
                    blocks[event["index"]][field] += delta[field]
            blocks[event["index"]]["json"] += delta.get("partial_json", "")
    stops = [event["index"] for event in found if event["type"] == "content_block_stop"]
    assert stops == [*range(len(blocks))]
    content = [{**block, "input": json.loads(block["json"] or "{}")} for block in blocks]
    (last,) = [event for event in found if event["type"] == "message_delta"]
    return whole_message({"content": content, "usage": last["usage"], **last["delta"]})


class Api(NamedTuple):
    path: str
    fields: dict[str, Any]  # of every request
    stream: dict[str, Any]
    tool: dict[str, Any]
    whole: Callable[[dict[str, Any]], Seen]
    streamed: Callable[[list[dict[str, Any]]], Seen]

    def ask(self, server: Running, **more: Any) -> httpx.Response:
        return server.post(self.path, {"model": MODEL, **self.fields, **more})


def function(name: str = "weather", parameters: Any = SCHEMA) -> dict[str, Any]:
    return {"name": name, "description": "Weather.", "parameters": parameters}


HI = [{"role": "user", "content": "Hi, how is the weather?"}]
APIS = {
    "chat": Api(
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": 700},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"type": "function", "function": function()},
        whole_chat,
        streamed_chat,
    ),
    "responses": Api(
        "/v1/responses",
        {"input": HI, "max_output_tokens": 700},
        {"stream": True},
        {"type": "function", **function()},
        whole_response,
        streamed_response,
    ),
    "messages": Api(
        "/v1/messages",
        {"messages": HI, "max_tokens": 700},
        {"stream": True},
        {"name": "weather", "description": "Weather.", "input_schema": SCHEMA},
        whole_message,
        streamed_message,
    ),
}


CUSTOM = {
    "responses": APIS["responses"]._replace(tool={"type": "custom", "name": "patch"}),
    "chat": APIS["chat"]._replace(tool={"type": "custom", "custom": {"name": "patch"}}),
}
PATCH = 'Zürich \\n <"\n\t>\U0001f600'  # the input of a custom tool


# JSON in marks, a list, parameters in tags, and Gemma's pairs; tests/engine/tools reads calls of every kind.
@pytest.mark.parametrize(
    "name", hardest([name for name in WRITERS if " " not in name], *("hermes", "mistral", "qwen3_coder", "gemma4"))
)
def test_every_api_says_the_same_whole_and_streamed(name: str) -> None:
    calls = CALLS if FORMS[name].has_many else CALLS[:1]
    lead, write = "<think>\nHm, <tool>?\n</think>\n\nWell, <\n\n", WRITERS[name]
    tokenizer = byte_tokenizer(*FORMS[name].tokens)
    template = ChatTemplate(QWEN3, {"bos_token": ""})
    engine = FakeEngine(tokenizer=tokenizer, info=msgspec.structs.replace(INFO, max_model_len=4000))
    with running(engine, tokenizer, template, tool_call_parser=name) as server:
        for text, wanted, sizes, apis in (
            ("<think>Hm.</think>\nHello.", [], SIZES[:1], APIS),
            (lead + write(calls), calls, SIZES, APIS),
            (lead + write([("patch", {"input": PATCH})]), [("patch", PATCH)], SIZES, CUSTOM),
        ):
            server.engine.reply = text
            seen: list[tuple[Any, Seen]] = []
            for size in sizes:
                server.engine.step_tokens = size
                for api in apis.values():
                    whole = api.ask(server, tools=[api.tool])
                    assert whole.status_code == 200, whole.text
                    seen.append(((api.path, size, "whole"), api.whole(whole.json())))
                    streamed = events(api.ask(server, tools=[api.tool], **api.stream))
                    seen.append(((api.path, size, "streamed"), api.streamed(streamed)))
            first = seen[0][1]
            assert (first.calls, first.finish) == (wanted, "tool_calls" if wanted else "stop")
            assert first.reasoning.startswith("Hm") and first.text and first.usage[2] > 10
            for which, each in seen:
                assert each == first, which


@pytest.mark.parametrize("name", APIS)
def test_an_answer_ends_with_the_context_and_a_prompt_beyond_it_is_refused_with_both_numbers(name: str) -> None:
    api, field = APIS[name], next(iter(APIS[name].fields))
    with running(FakeEngine(info=msgspec.structs.replace(INFO, max_model_len=60))) as server:
        whole = api.whole(api.ask(server).json())
        assert whole.finish == "length" and whole.usage[0] + whole.usage[2] == 60
        assert api.streamed(events(api.ask(server, **api.stream))) == whole
        for number in (59, 60):
            text = [{"role": "user", "content": "x" * (number - whole.usage[0] + len(HI[0]["content"]))}]
            answer = api.ask(server, **{field: text})
            if number == 59:
                assert api.whole(answer.json()).usage[::2] == (59, 1)
            else:
                message = answer.json()["error"]["message"]
                assert answer.status_code == 400, message
                assert f"{field}: 60 tokens; the context holds 60 with the answer, so at most 59" in message
        (choice,) = server.complete([1] * 55, max_tokens=20, return_token_ids=True).json()["choices"]
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 5


TABLE = json.loads(Path(__file__).with_name("three_apis.json").read_text())
FORMAT = TABLE["options"]["a format"]["messages"]["output_config"]["format"]["schema"]


def assert_text(text: str, wanted: dict[str, list[str]]) -> None:
    assert all(each in text for each in wanted.get("has", ())), text
    assert not any(each in text for each in wanted.get("lacks", ())), text


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (what, name)
        for what, case in TABLE["cases"].items()
        for name in APIS
        if all(name in TABLE["options"][option] for option in case["options"])
    ],
)
def test_an_answer_is_read_and_a_request_is_held_to_its_options(
    servers: dict[str, Running], what: str, name: str
) -> None:
    case, api = TABLE["cases"][what], APIS[name]
    server = servers[case["server"]]
    server.engine.reply = case["reply"]
    fields: dict[str, Any] = {}
    for option in case["options"]:
        fields |= TABLE["options"][option][name]
    whole = api.ask(server, **fields)
    assert whole.status_code == 200, whole.text
    pieces = events(api.ask(server, **fields, **api.stream))
    seen = api.whole(whole.json())
    reasoning, text, calls, finish = case["seen"]
    assert seen[:4] == (reasoning, text, [(function, given) for function, given in calls], finish)
    assert api.streamed(pieces) == seen
    prompt, params, options = server.engine.submitted[-1]
    outputs = params.structured_outputs
    assert_text(bytes(token for token in prompt if token < 256).decode(), case.get("prompt", {}))
    if case.get("is_json"):
        assert outputs is not None and outputs.json == FORMAT and options["grammar"] is not None
    elif case.get("grammar"):
        assert options["grammar"] is not None
        assert_text(options["grammar"], case["grammar"])
    elif "grammar" in case:
        assert outputs is None and options["grammar"] is None


def test_a_call_that_a_token_cuts_off_ends_like_one_that_the_length_cuts_off(servers: dict[str, Running]) -> None:
    case, server = TABLE["cases"]["a stop string in a required call"], servers["qwen"]
    server.engine.reply = case["reply"]
    for name, cut in (("chat", "max_tokens"), ("responses", "max_output_tokens")):
        asked: dict[str, Any] = TABLE["options"]["tools"][name] | TABLE["options"]["must call"][name]
        ends = []
        for limit in ({"stop_token_ids": [ord("U")]}, {cut: case["reply"].index("Ulm")}):
            reply = APIS[name].ask(server, **asked, **limit).json()
            (choice,) = reply.get("choices", [None])
            (call,) = [call["function"] for call in choice["message"]["tool_calls"]] if choice else reply["output"]
            end = choice["finish_reason"] if choice else (reply["status"], call["status"], reply["incomplete_details"])
            ends.append((call["name"], call["arguments"], end))
        assert ends[0] == ends[1] and ends[0][:2] == ("weather", '{"city": "'), name


# Fields that clients send back inside messages and tools, from other servers or for them.
CLIENT_FIELDS: dict[str, Any] = {
    "id": "msg_1",
    "metadata": {"turn": 1},
    "phase": "commentary",
    "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
    "provider_specific_fields": {"refusal": None},
    "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}],
    "extra_content": {"google": {"thought_signature": "x"}},
    "cache_control": {"type": "ephemeral"},
    "prefix": False,
}


def conversations(extra: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the same conversation for each API, with these fields in all of its parts."""
    text = {**extra, "type": "text", "text": "Ulm?"}
    past = {**extra, "id": "c", "type": "function", "function": {**extra, "name": "weather", "arguments": "{}"}}
    used = {**extra, "type": "tool_use", "id": "c", "name": "weather", "input": {}}
    result = {**extra, "type": "tool_result", "tool_use_id": "c", "content": [{**text, "text": "7"}]}
    call_item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    result_item = {"type": "function_call_output", "call_id": "c", "output": "7"}
    return {
        "chat": {
            "messages": [
                {**extra, "role": "user", "content": [text]},
                {**extra, "role": "assistant", "tool_calls": [past]},
                {**extra, "role": "tool", "tool_call_id": "c", "content": "7"},
            ],
            "tools": [{**extra, "type": "function", "function": {**extra, **function()}}],
        },
        "responses": {
            "input": [{**extra, "role": "user", "content": [text]}, {**extra, **call_item}, {**extra, **result_item}],
            "tools": [{**extra, **APIS["responses"].tool}],
        },
        "messages": {
            "system": [{**text, "text": "Hi."}],
            "messages": [
                {**extra, "role": "user", "content": [text]},
                {**extra, "role": "assistant", "content": [used]},
                {**extra, "role": "user", "content": [result]},
            ],
            "tools": [{**extra, **APIS["messages"].tool}],
        },
    }


PARTS = {  # where `conversations` puts them
    "chat": (
        *("messages[]", "messages[].content[]", "messages[].tool_calls[]", "messages[].tool_calls[].function"),
        *("tools[]", "tools[].function"),
    ),
    "responses": ("input[]", "input[].content[]", "tools[]"),
    "messages": ("system[]", "messages[]", "messages[].content[]", "messages[].content[].content[]", "tools[]"),
}
DECLARED = {"messages[].tool_calls[].id", "input[].id"}


@pytest.mark.parametrize("name", APIS)
def test_fields_of_other_servers_inside_messages_and_tools_are_ignored_and_named(qwen: Running, name: str) -> None:
    plain = APIS[name].ask(qwen, **conversations({})[name])
    assert plain.status_code == 200 and "x-penstock-ignored" not in plain.headers, plain.text
    prompt = qwen.prompt
    for field, value in CLIENT_FIELDS.items():
        body = conversations({field: value})[name]
        named = {f"{part}.{field}" for part in PARTS[name]} - DECLARED
        if name == "messages" and field == "cache_control":
            named = {"messages[].cache_control"}
        paths = [(APIS[name].path, body)] + ([("/tokenize", body)] if name == "chat" else [])
        for path, fields in paths:
            answer = qwen.post(path, {"model": MODEL, **({} if path == "/tokenize" else APIS[name].fields), **fields})
            assert answer.status_code == 200, answer.text
            assert {*answer.headers["x-penstock-ignored"].split(", ")} == named, (path, field)
        assert qwen.prompt == prompt


def test_an_object_of_very_many_parts_is_refused_before_all_are_compared(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.server.lenient.MAX_OBJECTS", 100)
    for number, status in ((49, 200), (101, 400)):
        parts = [{"type": "text", "text": "x", "colour": 1}] * number
        answer = server.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "messages[0].content[99]"


# Fields of a request, and the name of the wrong one as that API's client wrote it; the same mistake by API, some with words.
REFUSED = json.loads(Path(__file__).with_name("refused_by_agents.json").read_text())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("what", "name"), [(what, name) for what, apis in REFUSED["same mistake"].items() for name in apis]
)
def test_an_error_names_the_field_as_the_client_wrote_it(
    servers: dict[str, Running], what: str, name: str, stream: bool
) -> None:
    fields, param, *words = REFUSED["same mistake"][what][name]
    answer = APIS[name].ask(servers["qwen"], **fields, **(APIS[name].stream if stream else {}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error["message"]
    assert error["message"].startswith(f"{param}: " + "".join(words))


@pytest.mark.parametrize(
    ("name", "fields", "param"), [(name, *row) for name in ("responses", "messages") for row in REFUSED[name]]
)
def test_what_cannot_be_served_is_refused_under_its_own_name(
    servers: dict[str, Running], name: str, fields: dict[str, Any], param: str
) -> None:
    answer = APIS[name].ask(servers["plain"], **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
