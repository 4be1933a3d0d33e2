"""gpt-oss's messages over HTTP: reasoning, text and calls apart, whole and streamed."""

from collections.abc import Iterator

import pytest

from penstock.engine.text.template import ChatTemplate
from penstock.engine.text.tools.harmony import TOKENS
from tests.engine.server.test_tools import MESSAGES, TOOLS, client, gathered
from tests.support.chat_samples import HARMONY
from tests.support.fake_engine import byte_tokenizer
from tests.support.running_server import MODEL, Running, running

THOUGHT = "<|channel|>analysis<|message|>Ulm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tokenizer=byte_tokenizer(*TOKENS), template=ChatTemplate(HARMONY, {})) as started:
        yield started


def test_reasoning_and_calls_come_apart_whole_and_streamed(server: Running) -> None:
    server.engine.reply = THOUGHT + CALL
    asked = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    with client(server) as openai_client:
        choice = openai_client.chat.completions.create(**asked).choices[0]
        streamed = gathered(openai_client.chat.completions.create(**asked, stream=True))
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Ulm"}')
    assert choice.message.reasoning_content == "Ulm." and choice.message.content is None
    assert choice.finish_reason == streamed["reason"] == "tool_calls"
    assert streamed["calls"] == [("weather", '{"city": "Ulm"}')] and streamed["reasoning"] == "Ulm."


def test_reasoning_is_told_from_text_where_there_are_no_tools(server: Running) -> None:
    server.engine.reply = THOUGHT + "<|channel|>final<|message|>It rains."
    with client(server) as openai_client:
        asked = {"model": MODEL, "messages": MESSAGES}
        message = openai_client.chat.completions.create(**asked).choices[0].message
        streamed = gathered(openai_client.chat.completions.create(**asked, stream=True))
    assert (message.reasoning_content, message.content) == ("Ulm.", "It rains.")
    assert (streamed["reasoning"], streamed["content"], streamed["reason"]) == ("Ulm.", "It rains.", "stop")


def test_a_call_that_must_be_is_held_to_a_grammar_and_history_is_the_templates(server: Running) -> None:
    server.engine.reply = THOUGHT + CALL
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    with client(server) as openai_client:
        asked = {"model": MODEL, "messages": history, "tools": TOOLS, "tool_choice": "required"}
        message = openai_client.chat.completions.create(**asked).choices[0].message
    assert message.tool_calls[0].function.name == "weather"
    ids, params, *_ = server.engine.submitted[-1]
    assert params.structured_outputs is not None
    grammar = params.structured_outputs.grammar or ""
    assert "functions.weather" in grammar and "final" not in grammar
    prompt = byte_tokenizer(*TOKENS).decode(ids, skip_special_tokens=False)
    assert prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>'
        "<|start|>tool<|message|>rain<|end|><|start|>assistant"
    )
