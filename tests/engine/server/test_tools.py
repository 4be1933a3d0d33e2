"""Tools and reasoning over HTTP, as OpenAI's own client sees them. Constrained answers: the fields of OpenAI and vLLM, where
objections point, and real answers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.export import save_tokenizer

from penstock.engine.grammar.rules import grammar_source
from penstock.engine.sampling_params import MAX_GRAMMAR_CHARS, SamplingParams, StructuredOutputs
from penstock.engine.server.prompts import to_ids
from penstock.engine.text.template import ChatTemplate
from tests.support.chat_samples import QWEN3
from tests.support.fake_engine import FakeEngine, byte_tokenizer, line_template
from tests.support.oracle_engine import oracle_engine
from tests.support.refusals import cases
from tests.support.running_server import MODEL, Running, events, running
from tests.support.three_apis import SCHEMA, tool

(ONE_OF_THREE,) = cases(__file__, "a schema of three numbers")
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": ONE_OF_THREE}}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Over the real core, which finds its tokenizer where its model is."""
    folder: Path = tmp_path_factory.mktemp("bytes")
    save_tokenizer(byte_tokenizer(), folder)
    (folder / "config.json").write_text("{}")
    with running(oracle_engine(300, model=str(folder), max_model_len=2000, kv_cache_bytes=2**22)) as started:
        yield started


@pytest.mark.parametrize(("fields", "outputs"), cases(__file__, "grammars", **globals()))
def test_both_routes_pass_on_the_grammar(server: Running, fields: dict[str, Any], outputs: StructuredOutputs) -> None:
    for send in (server.complete, server.chat):
        assert send(max_tokens=2, **fields).status_code == 200
        _, params, options = server.engine.submitted[-1]
        assert params.structured_outputs == outputs
        assert options["grammar"] == grammar_source(outputs)


def test_a_one_of_may_be_taken_for_any_of_in_one_request_or_in_all(server: Running) -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    parameters = {"type": "object", "properties": {"x": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    call = {"tools": [tool], "tool_choice": "required", "messages": [{"role": "user", "content": "?"}]}
    refused = server.chat(**form)
    assert refused.status_code == 400 and "--coerce-one-of" in refused.json()["error"]["message"]
    with running(template=ChatTemplate(QWEN3)) as strict:
        assert strict.chat(**call).status_code == 400
    for send in (server.complete, server.chat):
        assert send(structured_outputs={"json": schema, "coerce_one_of": True}).status_code == 200
        assert send(structured_outputs={"json": schema}).status_code == 400
    with running(template=ChatTemplate(QWEN3), coerce_one_of=True) as loose:
        assert loose.chat(**form).status_code == loose.chat(**call).status_code == 200
        assert loose.complete(structured_outputs={"json": schema}).status_code == 200
        assert loose.complete(structured_outputs={"regex": "a"}).status_code == 200


def test_a_format_is_as_large_and_as_free_after_reasoning_as_without_it() -> None:
    outputs: list[dict[str, Any]] = [{"choice": ["a ::= b"]}, {"choice": ["x" * (MAX_GRAMMAR_CHARS - 99)]}]
    with running(template=ChatTemplate(QWEN3)) as server:
        for form in outputs:
            for send in (server.complete, server.chat):
                answer = send(structured_outputs=form, max_tokens=2)
                assert answer.status_code == 200, answer.text


def test_a_grammar_with_a_dead_end_is_the_requests_fault_and_not_the_servers(oracle: Running) -> None:
    """A router counts answers of 5xx against the replica that gives them."""
    answer = oracle.complete(structured_outputs={"grammar": "start: <eos>"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and "no token of the vocabulary can follow" in error["message"]


def test_every_choice_keeps_to_the_form_whole_and_streamed(oracle: Running) -> None:
    asked = {"response_format": FORMAT, "max_tokens": 100, "temperature": 1.5, "n": 5, "seed": 7}
    choices = oracle.chat(**asked).json()["choices"]
    assert len(choices) == 5
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["message"]["content"])["a"] in (1, 2, 3)
    pieces: dict[int, str] = {}
    for event in events(oracle.chat(**asked, stream=True)):
        for choice in event["choices"]:
            pieces[choice["index"]] = pieces.get(choice["index"], "") + (choice["delta"].get("content") or "")
    assert [pieces[choice["index"]] for choice in choices] == [choice["message"]["content"] for choice in choices]


def test_log_probabilities_cover_every_token_of_a_constrained_answer(oracle: Running) -> None:
    answer = oracle.chat(response_format=FORMAT, max_tokens=50, logprobs=True, top_logprobs=2).json()["choices"][0]
    shown = "".join(entry["token"] for entry in answer["logprobs"]["content"])
    assert shown.startswith(answer["message"]["content"])


def test_a_request_of_many_prompts_checks_its_fields_once(oracle: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of thousands of ids, checked and sorted for each of a thousand prompts, would hold the loop for seconds."""
    checked: list[SamplingParams] = []
    check = SamplingParams.check

    def counted(params: SamplingParams, *limits: int) -> None:
        checked.append(params)
        check(params, *limits)

    monkeypatch.setattr(SamplingParams, "check", counted)
    lists = {"stop_token_ids": list(range(100)), "allowed_token_ids": list(range(100, 120))}
    answer = oracle.complete([[number] for number in range(100)], max_tokens=5, temperature=1, **lists).json()
    assert len(checked) <= 2  # once as a request, once by the engine
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(texts) == 100 and len(set(texts)) > 10, "each has a seed of its own"


TOOLS = [tool(name="weather", parameters=SCHEMA), tool(name="clock")]
MESSAGES = [{"role": "user", "content": "Ulm?"}]
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "7"}


def grammar_of(server: Running) -> str | None:
    """Return the grammar of the last request, as the core gets it."""
    text: str | None = server.engine.submitted[-1][2]["grammar"]
    return text


def test_a_grammar_is_built_once_for_the_same_tools(qwen: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [tool(name="once")]
    assert qwen.chat(messages=MESSAGES, tools=tools).status_code == 200
    monkeypatch.setattr("penstock.engine.server.tool_choice.grammar", pytest.fail)
    assert qwen.chat(messages=MESSAGES, tools=tools).status_code == 200
    assert "once" in (grammar_of(qwen) or "")


def test_openais_package_reads_the_calls_of_each_choice_and_sends_them_back(qwen: Running) -> None:
    qwen.engine.reply = TWO_CALLS
    with qwen.openai() as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, n=3)
        messages = [choice.message for choice in answer.choices]
        assert [len(message.tool_calls) for message in messages] == [2, 2, 2]
        assert len({call.id for message in messages for call in message.tool_calls}) == 6
        results = [result(call.id) for call in messages[0].tool_calls]
        client.chat.completions.create(model=MODEL, tools=TOOLS, messages=[*MESSAGES, messages[0], *results])
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}' in qwen.prompt
    assert qwen.prompt.count("<tool_response>") == 2


def test_log_probabilities_and_ids_of_a_stream_with_calls_are_all_there(qwen: Running) -> None:
    qwen.engine.reply = TWO_CALLS
    fields = {"messages": MESSAGES, "tools": TOOLS, "logprobs": True, "return_token_ids": True, "stream": True}
    choices = [event["choices"][0] for event in events(qwen.chat(**fields))]
    num_tokens = len(TWO_CALLS) + 1
    assert sum(len(choice.get("token_ids", ())) for choice in choices) == num_tokens
    assert sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in choices) == num_tokens
    pieces = [call["function"]["arguments"] for each in choices for call in each["delta"].get("tool_calls", ())]
    assert [piece for piece in pieces if piece] == [*'{"city": "Ulm"}{}'], "one byte a step"


def test_ids_of_calls_are_as_short_as_the_templates_of_mistral_need(servers: dict[str, Running]) -> None:
    servers["mistral"].engine.reply = "[TOOL_CALLS]clock[ARGS]{}"
    (call,) = servers["mistral"].chat(messages=MESSAGES, tools=TOOLS).json()["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch("[a-z0-9]{9}", call["id"]), "the templates refuse longer ones"


INVALID = {"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}


@pytest.mark.parametrize("schema", [*dict(cases(__file__, "odd schemas")).values(), INVALID])
def test_tools_that_no_grammar_holds_are_served_unless_a_grammar_is_asked_for(
    qwen: Running, schema: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tools = [*TOOLS, tool(name="odd", parameters=schema)]
    qwen.engine.reply = TWO_CALLS
    for _ in range(2):
        message = qwen.chat(messages=MESSAGES, tools=tools).json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == 2 and grammar_of(qwen) is None
    assert caplog.text.count("not constrained by a grammar: ") == 1
    qwen.chat(messages=MESSAGES, tools=tools, response_format={"type": "json_object"})
    assert "answer: %json" in (grammar_of(qwen) or ""), "the format is held all the same"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": INVALID}}
    variants: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "required"}, "tools"),
        ({"response_format": form}, "response_format.json_schema.schema"),
        ({"tools": [*TOOLS, tool(name="odd", parameters=schema, strict=True)]}, "tools"),
    ]
    for fields, param in variants:
        answer = qwen.chat(**{"messages": MESSAGES, "tools": tools, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("moment", ["its prompt is tokenized", "its grammar is validated"])
def test_a_chat_is_answered_if_the_server_begins_to_drain_while(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(template=ChatTemplate(QWEN3)) as server:
        service = server.app.service

        async def tokenize(*arguments: Any) -> list[bytes]:
            service.is_draining = moment == "its prompt is tokenized"
            return await to_ids(*arguments)

        async def validate(_source: str) -> str:
            service.is_draining = True
            return "too big"

        monkeypatch.setattr("penstock.engine.server.chat.to_ids", tokenize)
        monkeypatch.setattr(service.tools._validator, "refusal", validate)
        assert server.chat(messages=MESSAGES, tools=TOOLS).status_code == 200
        assert server.chat(messages=MESSAGES, tools=TOOLS).status_code == 503


def test_a_grammar_that_only_the_core_refuses_is_a_400(qwen: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(grammar: str | None) -> str | None:
        return grammar and "too big"

    monkeypatch.setattr(qwen.engine, "_refusal", refuse)
    answer = qwen.chat(messages=MESSAGES, tools=[tool(name="fourth")])
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "tools: too big")


def test_the_operator_names_the_marks_or_turns_reasoning_off() -> None:
    said = "[THINK]Hm.[/THINK]<think>x</think>"
    for parser, reasoning, content in cases(__file__, "parsers", said=said):
        with running(template=ChatTemplate(QWEN3), reasoning_parser=parser) as server:
            server.engine.reply = said
            message = server.chat(messages=MESSAGES).json()["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_an_unknown_format_of_calls_is_a_400_that_names_the_way_out() -> None:
    source = "{% for t in tools or [] %}{{ t }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    unknown = ChatTemplate(source)
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
