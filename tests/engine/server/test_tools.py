"""Tools and reasoning over HTTP, as OpenAI's own client sees them."""

import json
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from penstock.engine.server.conversation import MAX_PAST_CALLS
from penstock.engine.server.prompts import to_ids
from penstock.engine.server.tool_choice import MAX_SCHEMA_BYTES, MAX_TOOLS
from penstock.engine.text.template import ChatTemplate
from tests.support.chat_samples import QWEN3
from tests.support.fake_engine import FakeEngine, line_template
from tests.support.refusals import cases, table
from tests.support.running_server import MODEL, Running, running

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]
MESSAGES = [{"role": "user", "content": "Ulm?"}]
SAID = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def grammar_of(server: Running) -> str | None:
    """The text of the last request's grammar, as the core gets it."""
    text: str | None = server.engine.submitted[-1][2]["grammar"]
    return text


# Calls.


def test_the_model_is_shown_the_tools_and_the_history_of_calls(qwen: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    qwen.engine.reply = SAID
    with qwen.openai() as openai_client:
        asked = {"model": MODEL, "tools": TOOLS}
        answer = openai_client.chat.completions.create(**asked, messages=MESSAGES).choices[0].message
        assert '"description": "Weather."' in qwen.prompt and '"strict"' not in qwen.prompt
        monkeypatch.setattr("penstock.engine.server.tool_choice.grammar", pytest.fail)  # it is there already
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in answer.tool_calls]
        openai_client.chat.completions.create(**asked, messages=[*MESSAGES, answer, *results])
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}' in qwen.prompt
    assert qwen.prompt.count("<tool_response>") == 2


def test_the_reasoning_of_a_message_has_two_names(qwen: Running) -> None:
    prompts = []
    for field in ("reasoning_content", "reasoning"):
        answer = qwen.chat(messages=[*MESSAGES, {**past("a"), field: "Hm, Ulm."}, result("a")], tools=TOOLS)
        assert answer.status_code == 200 and "x-penstock-ignored" not in answer.headers
        prompts.append(qwen.prompt)
    assert prompts[0] == prompts[1] and "<think>\nHm, Ulm.\n</think>" in prompts[0]


def test_choices_of_one_request_are_read_apart(qwen: Running) -> None:
    qwen.engine.reply = SAID
    with qwen.openai() as openai_client:
        answer = openai_client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, n=3)
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [2, 2, 2]
    ids = {call.id for choice in answer.choices for call in choice.message.tool_calls}
    assert len(ids) == 6 and all(re.fullmatch("call_[a-f0-9]{24}", call_id) for call_id in ids)


def test_a_call_cut_off_by_the_length_says_length(qwen: Running) -> None:
    qwen.engine.reply = SAID
    fields = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": SAID.index("Ulm")}
    choice = qwen.chat(**fields).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "'}


def test_log_probabilities_and_ids_of_a_stream_with_calls_are_all_there(qwen: Running) -> None:
    qwen.engine.reply = SAID
    fields = {"messages": MESSAGES, "tools": TOOLS, "logprobs": True, "return_token_ids": True, "stream": True}
    lines = [line[6:] for line in qwen.chat(**fields).text.split("\n\n") if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    num_tokens = len(SAID) + 1
    assert sum(len(choice.get("token_ids", ())) for choice in choices) == num_tokens
    assert sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in choices) == num_tokens
    pieces = [call["function"]["arguments"] for each in choices for call in each["delta"].get("tool_calls", ())]
    assert [piece for piece in pieces if piece] == [*'{"city": "Ulm"}{}'], "one byte a step"
    assert choices[0]["delta"]["role"] == "assistant" and all("role" not in each["delta"] for each in choices[1:])


def test_special_tokens_are_shown_to_the_reader_alone(servers: dict[str, Running]) -> None:
    server = servers["mistral"]
    server.engine.reply = "a<eos>[TOOL_CALLS]!"
    fields = {"ignore_eos": True, "max_tokens": 4}
    assert server.chat(messages=MESSAGES, **fields).json()["choices"][0]["message"]["content"] == "a!"
    message = server.chat(messages=MESSAGES, tools=TOOLS, **fields).json()["choices"][0]["message"]
    assert message["content"] == "a[TOOL_CALLS]!"  # no call begins like this
    server.engine.reply = "[TOOL_CALLS]clock[ARGS]{}"
    (call,) = server.chat(messages=MESSAGES, tools=TOOLS).json()["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch("[a-z0-9]{9}", call["id"]), "Mistral's templates refuse longer ones"


# Grammars.


def test_an_optional_call_is_held_unless_the_operator_says_otherwise(qwen: Running) -> None:
    qwen.chat(messages=MESSAGES, tools=TOOLS)
    assert "FREE" in (grammar_of(qwen) or "")
    with running(template=ChatTemplate(QWEN3), constrain_auto_tools=False) as free:
        free.engine.reply = '<tool_call>{"name": "clock", "arguments": {bad}}</tool_call>'
        choice = free.chat(messages=MESSAGES, tools=TOOLS).json()["choices"][0]
        assert grammar_of(free) is None
        assert choice["message"]["content"] == free.engine.reply and choice["finish_reason"] == "stop"
        free.chat(messages=MESSAGES, tools=TOOLS, tool_choice="required")
        assert grammar_of(free) is not None


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_calls_may_be_limited_to_some_of_the_tools(qwen: Running, mode: str) -> None:
    """The model is shown all of them, so that the prompt stays the same."""
    qwen.engine.reply = SAID
    qwen.chat(messages=MESSAGES, tools=TOOLS)
    prompt = qwen.prompt
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    message = qwen.chat(messages=MESSAGES, tools=TOOLS, tool_choice=choice).json()["choices"][0]["message"]
    grammar = grammar_of(qwen) or ""
    assert qwen.prompt == prompt and "clock" in grammar and "weather" not in grammar
    assert ("FREE" in grammar) == (mode == "auto")
    if mode == "auto":
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["clock"]


def test_a_custom_tool_s_calls_are_shown_as_calls_of_its_function_and_held_to_its_regex(qwen: Running) -> None:
    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]{4}"}}
    year = {"type": "custom", "custom": {"name": "year", "description": "Dates.", "format": regex}}
    call = {"id": "a", "type": "custom", "custom": {"name": "year", "input": "1999"}}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, result("a")]
    qwen.engine.reply = '<tool_call>\n{"name": "year", "arguments": {"input": "2024"}}\n</tool_call>'
    named = {"type": "custom", "custom": {"name": "year"}}
    for choice in (named, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}):
        answer = qwen.chat(messages=history, tools=[*TOOLS, year], tool_choice=choice)
        (made,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert (made["type"], made["custom"]) == ("custom", {"name": "year", "input": "2024"})
        grammar = grammar_of(qwen) or ""
        assert "[0-9]{4}" in grammar and "weather" not in grammar
    assert '{"name": "year", "arguments": {"input": "1999"}}' in qwen.prompt and "Dates." in qwen.prompt


ODD = dict(cases(__file__, "odd schemas"))


@pytest.mark.parametrize("kind", ODD)
def test_optional_calls_of_a_tool_that_no_grammar_expresses_are_held_to_nothing(qwen: Running, kind: str) -> None:
    tools = [*TOOLS, tool(name="odd", parameters=ODD[kind])]
    assert qwen.chat(messages=MESSAGES, tools=tools).status_code == 200
    assert grammar_of(qwen) is None
    qwen.chat(messages=MESSAGES, tools=tools, response_format={"type": "json_object"})
    assert "answer: %json" in (grammar_of(qwen) or ""), "the format is held all the same"
    answer = qwen.chat(messages=MESSAGES, tools=tools, tool_choice="required")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


@pytest.mark.parametrize("moment", ["its prompt is tokenized", "its grammar is validated"])
def test_a_chat_is_answered_if_the_server_begins_to_drain_while(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(template=ChatTemplate(QWEN3)) as server:
        service = server.app.service

        async def tokenize(*given: Any) -> list[bytes]:
            service.is_draining = moment == "its prompt is tokenized"
            return await to_ids(*given)

        async def validate(_source: str) -> str:
            service.is_draining = True
            return "too big"

        monkeypatch.setattr("penstock.engine.server.chat.to_ids", tokenize)
        monkeypatch.setattr(service.tools._validator, "refusal", validate)
        assert server.chat(messages=MESSAGES, tools=TOOLS).status_code == 200
        assert server.chat(messages=MESSAGES, tools=TOOLS).status_code == 503


def test_optional_tools_are_served_whatever_their_grammar(qwen: Running, caplog: pytest.LogCaptureFixture) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "("}}}
    refused = {"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}
    for _ in range(2):
        assert qwen.chat(messages=MESSAGES, tools=[tool(name="other", parameters=refused)]).status_code == 200
        assert grammar_of(qwen) is None
    assert caplog.text.count("not constrained by a grammar: regex parse error") == 1
    qwen.engine.reply = SAID
    tools = [*TOOLS, tool(name="more", parameters=refused)]
    message = qwen.chat(messages=MESSAGES, tools=tools).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 2  # calls are read all the same
    # A grammar that the client asked for is still refused.
    variants: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "required"}, "tools"),
        ({"response_format": form}, "response_format.json_schema.schema"),
        ({"tools": [tool(name="third", parameters=refused, strict=True)]}, "tools"),
    ]
    for fields, param in variants:
        answer = qwen.chat(**{"messages": MESSAGES, "tools": [tool(name="third", parameters=refused)], **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_grammar_that_only_the_core_refuses_is_a_400(qwen: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(grammar: str | None) -> str | None:
        return grammar and "too big"

    monkeypatch.setattr(qwen.engine, "_refusal", refuse)
    answer = qwen.chat(messages=MESSAGES, tools=[tool(name="fourth")])
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "tools: too big")


def test_other_requests_are_answered_while_a_grammar_is_validated(
    qwen: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, go_on = threading.Event(), threading.Event()

    def validate(_source: str, result: Future[str]) -> None:
        has_begun.set()
        assert go_on.wait(60)
        result.set_result("")

    monkeypatch.setattr("penstock.engine.grammar.validator._validate", validate)
    with ThreadPoolExecutor(1) as threads:
        body = {"messages": MESSAGES, "tools": [tool(name="slow")]}
        answer = threads.submit(httpx.post, f"{qwen.url}/v1/chat/completions", json=body, timeout=60)
        assert has_begun.wait(60)
        assert qwen.chat(messages=MESSAGES).status_code == 200
        go_on.set()
        assert answer.result().status_code == 200
    assert "slow" in (grammar_of(qwen) or "")


def test_a_grammar_that_is_not_validated_in_time_holds_no_call(qwen: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("penstock.engine.grammar.validator._validate", lambda *_given: go_on.wait(60))
    monkeypatch.setattr("penstock.engine.grammar.validator.COMPILE_LIMIT_S", 0.05)
    for name in ("late", "later", "latest"):  # more than are validated at once
        assert qwen.chat(messages=MESSAGES, tools=[tool(name=name)]).status_code == 200
        assert grammar_of(qwen) is None
    go_on.set()


# Reasoning.


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_begun_message_says_whether_reasoning_goes_on(qwen: Running, as_parts: bool) -> None:
    thought = "<think>\nA thought that is much longer than the last sixteen tokens of the prompt"
    form = {"continue_final_message": True, "structured_outputs": {"choice": ["yes", "no"]}}
    for begun, reply, reasoning, content in (
        (thought, " goes on.</think>\n\nYes.", "goes on.", "Yes."),
        (f"{thought}.\n</think>\n\nThe answer is longer than sixteen tokens too, and it is", " yes.", None, " yes."),
    ):
        qwen.engine.reply = reply
        last = {"role": "assistant", "content": [{"type": "text", "text": begun}] if as_parts else begun}
        message = qwen.chat(messages=[*MESSAGES, last], continue_final_message=True).json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
        qwen.chat(messages=[*MESSAGES, last], **form)
        assert ("thoughts" in (grammar_of(qwen) or "")) == (reasoning is not None)


def test_the_operator_names_the_marks_or_turns_reasoning_off() -> None:
    said = "[THINK]Hm.[/THINK]<think>x</think>"
    for parser, reasoning, content in cases(__file__, "parsers", said=said):
        with running(template=ChatTemplate(QWEN3), reasoning_parser=parser) as server:
            server.engine.reply = said
            message = server.chat(messages=MESSAGES).json()["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


# Models that were not made for tools.


def test_tokenizing_a_chat_counts_what_the_chat_would_be_shown(qwen: Running) -> None:
    for choice in ("auto", "none"):
        asked = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
        ids = qwen.post("/tokenize", asked).json()["tokens"]
        assert qwen.chat(**asked).json()["usage"]["prompt_tokens"] == len(ids)
        assert qwen.engine.submitted[-1][0] == ids


def test_an_unknown_format_of_calls_is_a_400_that_names_the_way_out() -> None:
    unknown = ChatTemplate(
        "{% for t in tools or [] %}{{ t }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with running(template=unknown) as server:
        answer = server.chat(messages=MESSAGES, tools=TOOLS)
        assert answer.status_code == 400 and "--tool-call-parser" in answer.json()["error"]["message"]
        assert server.chat(messages=MESSAGES, tools=TOOLS, tool_choice="none").status_code == 200
    with running(template=unknown, tool_call_parser="llama3_json") as server:
        server.engine.reply = '{"name": "weather", "parameters": {"city": "Ulm"}}'
        assert server.chat(messages=MESSAGES, tools=TOOLS).json()["choices"][0]["finish_reason"] == "tool_calls"
    with running(FakeEngine(), template=line_template(), tool_call_parser="none") as server:
        answer = server.chat(messages=MESSAGES, tools=TOOLS)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


# Refusals.


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def past(*ids: str, role: str = "assistant", arguments: str = "{}", name: str = "f") -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": name, "arguments": arguments}} for i in ids]
    return {"role": role, "content": None, "tool_calls": calls}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "7"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    table(
        __file__,
        "calls",
        tool=tool,
        past=past,
        TOOLS=TOOLS,
        MAX_TOOLS=MAX_TOOLS,
        MAX_SCHEMA_BYTES=MAX_SCHEMA_BYTES,
        MAX_PAST_CALLS=MAX_PAST_CALLS,
    ),
)
def test_what_cannot_be_served_is_a_400_that_names_the_field(
    qwen: Running, fields: dict[str, Any], param: str, words: str
) -> None:
    before = len(qwen.engine.submitted)
    answer = qwen.chat(**fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert len(qwen.engine.submitted) == before
