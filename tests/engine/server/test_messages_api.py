"""/v1/messages, as Anthropic's own package sends and reads them; what it sends is written out where it may be missing."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import httpx
import pytest

from penstock.engine.front.answer import Update
from penstock.engine.server.answer_writer import write
from tests.support.running_server import MODEL, Running, events

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Weather.", "input_schema": SCHEMA}
CALLED = '<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


def post(qwen: Running, **fields: Any) -> httpx.Response:
    return qwen.post("/v1/messages", {"model": MODEL, "max_tokens": 500, "messages": HI, **fields})


# With the package, whose import takes three seconds.


@pytest.mark.slow
def test_the_package_reads_answers_and_errors_and_sends_calls_and_their_results_back(qwen: Running) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    qwen.engine.reply = CALLED
    with anthropic.Anthropic(base_url=qwen.url, max_retries=0, api_key="unused") as client:
        asked = {"model": MODEL, "max_tokens": 500, "tools": [TOOL], "system": "Be brief."}
        for message in (client.messages.create(messages=HI, **asked), streamed(client, messages=HI, **asked)):
            thought, text, call = message.content
            assert (thought.thinking, thought.signature, text.text) == ("Hm.", "unsigned", "Look.")
            assert (call.name, call.input) == ("weather", {"city": "Ulm"})
            assert (message.stop_reason, message.model) == ("tool_use", MODEL)
        num_prompt = len(qwen.engine.submitted[-1][0])
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == num_prompt
        del asked["max_tokens"]
        assert client.messages.count_tokens(messages=HI, **asked).input_tokens == num_prompt
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "7"}]}
        turn = {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}
        history = [*HI, {"role": "assistant", "content": message.content}, turn]
        client.messages.create(messages=history, max_tokens=500, **asked)
        assert '{"city": "Ulm"}' in qwen.prompt
        assert "<tool_response>\n7\n</tool_response>" in qwen.prompt and "And?" in qwen.prompt
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", max_tokens=9, messages=HI)
        qwen.engine.fail_next = "out of blocks"
        try:
            with pytest.raises(anthropic.APIError, match="out of blocks"):
                streamed(client, model=MODEL, max_tokens=9, messages=HI)
        finally:
            qwen.engine.fail_next = None


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_packages_tool_runner_sends_the_whole_conversation_with_every_turn(qwen: Running, stream: bool) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """Weather."""
        qwen.engine.reply = "It is warm."
        return f"7 degrees in {city}"

    qwen.engine.reply = CALLED
    with anthropic.Anthropic(base_url=qwen.url, max_retries=0, api_key="unused") as client:
        asked = {"model": MODEL, "max_tokens": 500, "messages": HI, "tools": [weather], "stream": stream}
        *_, last = client.beta.messages.tool_runner(**asked)
        last = last.get_final_message() if stream else last
    assert last.content[0].text == "It is warm."
    for text in ("<|im_start|>user\nHi", '{"city": "Ulm"}', "7 degrees in Ulm"):
        assert text in qwen.prompt


@pytest.mark.slow
def test_the_package_reads_the_list_of_models(qwen: Running) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    with anthropic.Anthropic(base_url=qwen.url, max_retries=0, api_key="unused") as client:
        (model,) = client.models.list()  # asks for further pages while there are some
        assert model == client.models.retrieve(MODEL)
    assert (model.id, model.type, model.display_name, model.lifecycle) == (MODEL, "model", MODEL, "active")
    assert abs(model.created_at.timestamp() - qwen.app.service.started) < 1


def streamed(client: Any, **asked: Any) -> Any:
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


# Without it.


def test_the_events_come_in_order(qwen: Running) -> None:
    found = events(post(qwen, stream=True))
    kinds = [event["type"] for event in found]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in found[3:-3]) == "Hello."
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 7
    assert found[0]["message"]["usage"]["output_tokens"] <= 1 and found[0]["message"]["content"] == []


def test_a_stop_sequence_is_named(qwen: Running) -> None:
    answer = post(qwen, stop_sequences=["lo"]).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "lo")
    assert answer["content"][0]["text"] == "Hel"


def test_an_answer_goes_on_from_the_assistants_last_words(qwen: Running) -> None:
    assert post(qwen, messages=[*HI, {"role": "assistant", "content": "Well"}]).status_code == 200
    assert qwen.prompt.endswith("Well")


def test_what_is_held_back_sends_no_piece() -> None:
    """A router is answered with the first piece; one without anything in it would come before there is an answer."""
    call = SimpleNamespace(reports=False, answers=[Arriving()])
    service = SimpleNamespace(seen=lambda _answer, updates: updates)
    writer = SimpleNamespace(take=Mock(), end=AsyncMock(), taken=lambda: b"")

    async def pieces() -> list[bytes]:
        return [piece async for piece in write(cast(Any, service), cast(Any, call), cast(Any, writer))]

    assert asyncio.run(pieces()) == []


class Arriving:
    prompt_logprobs = None

    async def __aiter__(self) -> AsyncIterator[list[Update]]:
        yield [Update(0, token_ids=[195])]  # half a character


@pytest.mark.parametrize("content", ["", []])
def test_an_empty_turn_begins_nothing(qwen: Running, content: Any) -> None:
    body = {"model": MODEL, "max_tokens": 4, "messages": HI}
    assert qwen.http.post("/v1/messages", json=body).status_code == 200
    without = qwen.prompt
    last = {"role": "assistant", "content": content}
    assert qwen.http.post("/v1/messages", json=body | {"messages": [*HI, last]}).status_code == 200
    assert qwen.prompt == without
    assert qwen.http.post("/v1/messages", json=body | {"messages": [*HI, last, *HI]}).status_code == 200


def test_a_number_beyond_a_float_does_not_lose_its_call(qwen: Running) -> None:
    calls = [
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": {each}}}}}\n</tool_call>' for each in ("1e999", 1)
    ]
    qwen.engine.reply = "\n".join(calls)
    asked = {"tools": [{**TOOL, "input_schema": {"type": "object"}}]}
    answer = post(qwen, **asked)
    assert answer.text.count('"tool_use"') == 3 and '{"city": 1e999}' in answer.text  # the third is why it stopped
    starts = [each for each in events(post(qwen, **asked, stream=True)) if each["type"] == "content_block_start"]
    assert [each["index"] for each in starts] == [*range(len(starts))] and len(starts) >= 2


def test_a_call_whose_arguments_are_no_json_is_none(qwen: Running) -> None:
    qwen.engine.reply = '<tool_call>\n{"name": "weather", "arguments": {"city": NaN}}\n</tool_call>'
    assert "tool_use" not in [block["type"] for block in post(qwen, tools=[TOOL]).json()["content"]]


def test_a_call_that_is_cut_off_is_none_and_keeps_its_place_in_the_stream(qwen: Running) -> None:
    qwen.engine.reply = CALLED
    answer = post(qwen, tools=[TOOL], max_tokens=CALLED.index("Ulm")).json()
    assert [each["type"] for each in answer["content"]] == ["thinking", "text"]
    assert answer["stop_reason"] == "max_tokens"
    found = events(post(qwen, tools=[TOOL], stop_sequences=["Ulm"], stream=True))
    starts = [each["index"] for each in found if each["type"] == "content_block_start"]
    stops = [each["index"] for each in found if each["type"] == "content_block_stop"]
    assert starts == stops == [*range(len(starts))]


def test_tools_that_run_at_anthropic_and_unknown_fields_are_left_out_and_named(qwen: Running) -> None:
    qwen.engine.reply = "Hello."
    tools = [{"type": "web_search_20250305", "name": "web_search"}, TOOL, {"type": "web_fetch_20260318", "name": "f"}]
    answer = post(qwen, tools=tools, speed="fast")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-penstock-ignored"] == "speed, tools:web_search_20250305, tools:web_fetch_20260318"


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_thread_is_refused_in_the_form_after_which_clients_send_all_messages(qwen: Running, thread: Any) -> None:
    answer = post(qwen, thread=thread)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "thread")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}


BILLING = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch={};"


def test_two_conversations_of_claude_code_share_their_prefix(qwen: Running) -> None:
    """Its first system block differs for each conversation, and so would every block of the prompt's cache."""
    rules = {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}
    prompts = []
    for version, text in (("44.1c2", "Fix it."), ("44.9fe", "Add a test.")):
        system = [{"type": "text", "text": BILLING.format(version, text[:3])}, rules]
        messages = [{"role": "user", "content": text}]
        assert post(qwen, system=system, messages=messages, tools=[TOOL]).status_code == 200
        prompts.append(qwen.prompt)
        counted = {"model": MODEL, "system": system, "messages": messages, "tools": [TOOL]}
        assert qwen.post("/v1/messages/count_tokens", counted).json()["input_tokens"] == len(prompts[-1])
    shared = prompts[0].partition("Fix it.")[0]
    assert "You are an agent." in shared and '"weather"' in shared
    assert prompts[1].startswith(f"{shared}Add a test.")


@pytest.mark.parametrize(
    "system",
    [BILLING, [{"type": "text", "text": f"{BILLING}\nBe brief."}], [{"type": "text", "text": f"See {BILLING}"}]],
)
def test_no_other_system_text_is_left_out(qwen: Running, system: Any) -> None:
    assert post(qwen, system=system).status_code == 200
    assert (system if isinstance(system, str) else system[0]["text"]) in qwen.prompt
