"""Chats, Responses and Messages give the same answer: whole and streamed, in every format of tool calls, however the engine cuts it.

three_apis.json has the options of a request as the clients of each API write them, and the cases: what the model writes, and the
answer. refused_by_agents.json has requests that are refused. tests/support/three_apis.py reads the answers.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine.text.template import ChatTemplate
from tests.support.call_writers import FORMS, WRITERS
from tests.support.chat_samples import QWEN3
from tests.support.fake_engine import INFO, FakeEngine, byte_tokenizer
from tests.support.refusals import hardest
from tests.support.running_server import MODEL, Running, events, running
from tests.support.three_apis import APIS, HI, SCHEMA, Seen, refuse

WITH_DAYS = SCHEMA | {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
CALLS: list[tuple[str, Any]] = [("weather", {"city": 'Zürich <"\n>', "days": 3}), ("weather", {"city": "Ulm"})]
SIZES = (1, 7, 10_000)  # tokens (bytes) that one step of the engine brings
CUSTOM = {
    "chat": {"type": "custom", "custom": {"name": "patch"}},
    "responses": {"type": "custom", "name": "patch"},
}
PATCH = 'Zürich \\n <"\n\t>\U0001f600'  # the input of a custom tool


# JSON in marks, a list, parameters in tags, and Gemma's pairs; tests/engine/tools reads calls of every kind.
@pytest.mark.parametrize(
    "name", hardest([name for name in WRITERS if " " not in name], *("hermes", "mistral", "qwen3_coder", "gemma4"))
)
def test_every_api_gives_the_same_answer_whole_and_streamed(name: str) -> None:
    calls = CALLS if FORMS[name].has_many else CALLS[:1]
    lead, write = "<think>\nHm, <tool>?\n</think>\n\nWell, <\n\n", WRITERS[name]
    tokenizer = byte_tokenizer(*FORMS[name].tokens)
    template = ChatTemplate(QWEN3, {"bos_token": ""})
    engine = FakeEngine(tokenizer=tokenizer, info=msgspec.structs.replace(INFO, max_model_len=4000))
    functions = {api: APIS[api].tool("weather", WITH_DAYS) for api in APIS}
    with running(engine, tokenizer, template, tool_call_parser=name) as server:
        for text, expected, sizes, tools in (
            ("<think>Hm.</think>\nHello.", [], SIZES[:1], functions),
            (lead + write(calls), calls, SIZES, functions),
            (lead + write([("patch", {"input": PATCH})]), [("patch", PATCH)], SIZES, CUSTOM),
        ):
            server.engine.reply = text
            seen: list[tuple[Any, Seen]] = []
            for size in sizes:
                server.engine.step_tokens = size
                for api, tool in tools.items():
                    whole = APIS[api].ask(server, tools=[tool])
                    assert whole.status_code == 200, whole.text
                    seen.append(((api, size, "whole"), APIS[api].whole(whole.json())))
                    streamed = events(APIS[api].ask(server, tools=[tool], **APIS[api].stream))
                    seen.append(((api, size, "streamed"), APIS[api].streamed(streamed)))
            first = seen[0][1]
            assert (first.calls, first.finish) == (expected, "tool_calls" if expected else "stop")
            assert first.reasoning.startswith("Hm") and first.text and first.usage[2] > 10
            for which, each in seen:
                assert each == first, which


@pytest.mark.parametrize("name", APIS)
def test_an_answer_ends_with_the_context_and_a_longer_prompt_is_refused(name: str) -> None:
    api = APIS[name]
    with running(FakeEngine(info=msgspec.structs.replace(INFO, max_model_len=60))) as server:
        whole = api.whole(api.ask(server).json())
        assert whole.finish == "length" and whole.usage[0] + whole.usage[2] == 60
        assert api.streamed(events(api.ask(server, **api.stream))) == whole
        for number in (59, 60):
            text = [{"role": "user", "content": "x" * (number - whole.usage[0] + len(HI[0]["content"]))}]
            answer = api.ask(server, **{api.prompt: text})
            if number == 59:
                assert api.whole(answer.json()).usage[::2] == (59, 1)
            else:
                message = answer.json()["error"]["message"]
                assert answer.status_code == 400, message
                assert f"{api.prompt}: 60 tokens; the context holds 60 with the answer, so at most 59" in message
        (choice,) = server.complete([1] * 55, max_tokens=20, return_token_ids=True).json()["choices"]
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 5


@pytest.mark.parametrize("name", APIS)
def test_a_failure_is_a_status_or_the_last_event_of_a_stream(
    qwen: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen.engine, "fail_next", "out of blocks")
    whole = APIS[name].ask(qwen)
    *_, last = events(APIS[name].ask(qwen, **APIS[name].stream))
    monkeypatch.setattr(qwen.engine, "is_refusal", True)
    assert APIS[name].ask(qwen).status_code == 400
    assert whole.status_code == 500 and whole.json()["error"]["message"] == "out of blocks"
    if name == "responses":
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": "server_error", "message": "out of blocks"}
    else:
        assert last["error"]["message"] == "out of blocks" and last.get("type", "error") == "error"


TABLE = json.loads(Path(__file__).with_name("three_apis.json").read_text())
FORMAT = TABLE["options"]["a format"]["messages"]["output_config"]["format"]["schema"]


def assert_text(text: str, expected: dict[str, list[str]]) -> None:
    assert text == expected.get("is", text)
    assert all(each in text for each in expected.get("has", ())), text
    assert not any(each in text for each in expected.get("lacks", ())), text


@pytest.mark.parametrize(
    ("title", "name"),
    [
        (title, name)
        for title, case in TABLE["cases"].items()
        for name in case.get("apis", APIS)
        if all(name in TABLE["options"][option] for option in case["options"])
    ],
)
def test_a_request_is_held_to_its_options_and_answered(servers: dict[str, Running], title: str, name: str) -> None:
    case, api = TABLE["cases"][title], APIS[name]
    server = servers[case["server"]]
    server.engine.reply = case["reply"]
    fields: dict[str, Any] = {}
    for option in case["options"]:
        fields |= TABLE["options"][option][name]
    whole = api.ask(server, **fields)
    assert (whole.status_code, whole.headers.get("x-penstock-ignored")) == (200, case.get("ignored")), whole.text
    seen = api.whole(whole.json(parse_constant=refuse))
    reasoning, text, calls, finish = case["seen"]
    assert seen[:4] == (reasoning, text, [tuple(call) for call in calls], finish)
    assert api.streamed(events(api.ask(server, **fields, **api.stream))) == seen
    prompt, params, options = server.engine.submitted[-1]
    assert seen.usage[0] == len(prompt)
    if "stop" in case and name != "responses":
        assert seen.stop == case["stop"]
    if name != "messages":
        assert json.loads(json.dumps(seen.logprobs)) == case.get("logprobs", [])
    outputs = params.structured_outputs
    assert_text(bytes(token for token in prompt if token < 256).decode(), case.get("prompt", {}))
    if case.get("is_json"):
        assert outputs is not None and outputs.json == FORMAT and options["grammar"] is not None
    elif case.get("grammar"):
        assert options["grammar"] is not None
        assert_text(options["grammar"], case["grammar"])
    elif "grammar" in case:
        assert outputs is None and options["grammar"] is None


# Fields that clients send back inside messages and tools, from other servers or for them.
CLIENT_FIELDS: dict[str, Any] = TABLE["fields of clients"]
# The fields of clients that an API declares itself.
DECLARED: dict[str, list[str]] = TABLE["declared fields of clients"]


def with_field(part: Any, field: str, path: str) -> tuple[Any, set[str]]:
    """Return a part of a request with this field in all of its objects that lack it, and the names of the new fields."""
    if isinstance(part, list):
        pairs = [with_field(each, field, f"{path}[]") for each in part]
        return [each for each, _ in pairs], {name for _, names in pairs for name in names}
    if not isinstance(part, dict) or path.endswith((".parameters", ".input_schema", ".input")):
        return part, set()
    names = set() if field in part else {f"{path}.{field}"}
    changed = {field: CLIENT_FIELDS[field]}
    for key, value in part.items():
        changed[key], inner = with_field(value, field, f"{path}.{key}")
        names |= inner
    return changed, names


@pytest.mark.parametrize("name", APIS)
def test_fields_of_other_servers_inside_a_request_are_ignored_and_named(qwen: Running, name: str) -> None:
    parts = TABLE["options"]["parts of every kind"][name]
    plain = APIS[name].ask(qwen, **parts)
    assert plain.status_code == 200 and "x-penstock-ignored" not in plain.headers, plain.text
    prompt = qwen.prompt
    for field in CLIENT_FIELDS:
        body, names = {}, set[str]()
        for key, part in parts.items():
            body[key], inner = with_field(part, field, key)
            names |= inner
        answers = [APIS[name].ask(qwen, **body)]
        if name == "chat":
            answers.append(qwen.post("/tokenize", {"model": MODEL, **body}))
        for answer in answers:
            assert answer.status_code == 200, answer.text
            assert {*answer.headers["x-penstock-ignored"].split(", ")} == names - {*DECLARED[name]}, field
        assert qwen.prompt == prompt


def test_too_many_parts_are_refused_before_all_are_compared(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.server.other_fields.MAX_OBJECTS", 100)
    for number, status in ((49, 200), (101, 400)):
        parts = [{"type": "text", "text": "x", "colour": 1}] * number
        answer = server.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "messages[0].content[99]"


# Title of a mistake, API, fields of the request, the name of the wrong one as that API's client wrote it, and the reason.
REFUSED = json.loads(Path(__file__).with_name("refused_by_agents.json").read_text())
MISTAKES = [(title, name, *row) for title, apis in REFUSED["same mistake"].items() for name, row in apis.items()]
MISTAKES += [("", name, *row) for name in ("responses", "messages") for row in REFUSED[name]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda row: " ".join((*row[:2], row[3])))
def test_an_error_names_the_clients_field(servers: dict[str, Running], mistake: tuple[Any, ...], stream: bool) -> None:
    title, name, fields, param, *words = mistake
    server = servers["qwen" if title else "plain"]
    answer = APIS[name].ask(server, **fields, **(APIS[name].stream if stream else {}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error["message"]
    assert error["message"].startswith("".join((f"{param}: ", *words)) if title else "")
