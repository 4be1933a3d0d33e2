"""/v1/responses and /v1/conversations, as OpenAI's own package sends and reads them."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from penstock.engine.server import prompts
from penstock.engine.server.server_config import Keeping
from penstock.engine.text.prompt import INLINE_CHARS, chat_prompt
from penstock.engine.text.template import ChatTemplate
from penstock.engine.text.tokenizer import Tokenizer
from tests.support.chat_samples import QWEN3
from tests.support.fake_engine import FakeEngine, byte_tokenizer
from tests.support.running_server import MODEL, Running, running, until

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "Weather.", "parameters": SCHEMA, "strict": True}
CALLED = '<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def qwen() -> Iterator[Running]:
    with running(template=ChatTemplate(QWEN3, {"bos_token": ""})) as started:
        yield started


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    server.engine.reply = "Hello."
    with client_of(server) as made:
        yield made


def client_of(server: Running, key: str = "unused") -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def prompt_of(server: Running) -> str:
    return byte_tokenizer().decode(server.engine.submitted[-1][0], skip_special_tokens=False)


def refusal(server: Running, path: str = "/v1/responses", **fields: Any) -> tuple[int, str]:
    answer = server.post(path, {"model": MODEL, "input": "Hi", **fields})
    return answer.status_code, answer.json()["error"]["param"]


# One answer.


def test_a_response_has_its_text_and_usage_and_says_what_was_asked(server: Running, client: Any) -> None:
    response = client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, user="me"
    )
    assert (response.output_text, response.status, response.model) == ("Hello.", "completed", MODEL)
    assert (response.temperature, response.top_p, response.metadata, response.user) == (0.5, 1.0, {"a": "b"}, "me")
    assert prompt_of(server) == "system: Be brief.\nuser: Hi\n>"
    assert server.engine.submitted[-1][1].temperature == 0.5
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (28, 7, 35)
    assert usage.input_tokens_details.cached_tokens == 16 * (28 // 16) or usage.input_tokens_details.cached_tokens == 0


def test_items_become_the_messages_of_a_chat(server: Running, client: Any) -> None:
    items = [
        {"role": "developer", "content": "Do."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes", "annotations": []}]},
        {"role": "user", "content": "Why?"},
    ]
    client.responses.create(model=MODEL, input=items)
    assert prompt_of(server) == "system: Do.\nuser: Hi\nassistant: Yes\nuser: Why?\n>"
    count = client.responses.input_tokens.count(model=MODEL, input=items)
    assert count.input_tokens == len(server.engine.submitted[-1][0])


def test_the_events_of_a_stream_come_in_order_and_add_up_to_the_response(client: Any) -> None:
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == events[-1].response.output_text
    with client.responses.stream(model=MODEL, input="Hi") as stream:  # the package's own gathering
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "Hello."


def test_an_answer_that_reaches_its_length_is_incomplete(client: Any) -> None:
    response = client.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
    assert (response.status, response.output_text) == ("incomplete", "Hel")
    assert response.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(model=MODEL, input="Hi", max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"


def test_log_probabilities_come_with_the_text_whole_and_streamed(client: Any) -> None:
    asked = {"model": MODEL, "input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    (item,) = client.responses.create(**asked).output
    assert [token.token for token in item.content[0].logprobs][:6] == list("Hello.")
    assert len(item.content[0].logprobs[0].top_logprobs) == 2
    events = list(client.responses.create(**asked, stream=True))
    shown = [token.token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    assert shown[:6] == list("Hello.")
    assert len(events[-1].response.output[0].content[0].logprobs) == len(item.content[0].logprobs)


def test_a_failure_in_a_stream_is_an_event_and_otherwise_a_status(server: Running, client: Any) -> None:
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


def test_a_client_that_leaves_has_its_request_aborted(server: Running) -> None:
    server.engine.hold = True
    try:
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/responses", {"model": MODEL, "input": "Hi"}, timeout=0.3)
        until(lambda: server.engine.num_open == 0)
    finally:
        server.engine.hold = False


# Tools, reasoning, formats.


def test_reasoning_text_and_calls_are_items_and_can_be_sent_back(qwen: Running) -> None:
    qwen.engine.reply = CALLED
    with client_of(qwen) as client:
        asked = {"model": MODEL, "tools": [TOOL], "reasoning": {"effort": "high", "summary": "auto"}}
        response = client.responses.create(input="Ulm?", **asked)
        thought, text, call = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
        assert (text.type, response.output_text) == ("message", "Look.")
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Ulm"})
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        events = list(client.responses.create(input="Ulm?", stream=True, **asked))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert {"reasoning_text.delta", "reasoning_text.done", "function_call_arguments.done"} <= set(kinds)
        pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert json.loads("".join(pieces)) == {"city": "Ulm"}
        starts = [event.item.type for event in events if event.type == "response.output_item.added"]
        assert starts == ["reasoning", "message", "function_call"]
        qwen.engine.reply = "7 degrees."
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        history: Any = [{"role": "user", "content": "Ulm?"}, *response.output, result]
        assert client.responses.create(input=history, **asked).output_text == "7 degrees."
    assert '{"city": "Ulm"}' in prompt_of(qwen) and "<tool_response>\n7\n</tool_response>" in prompt_of(qwen)


def test_effort_none_asks_the_template_not_to_think(qwen: Running) -> None:
    qwen.engine.reply = "Hello."
    with client_of(qwen) as client:
        client.responses.create(model=MODEL, input="Hi", reasoning={"effort": "none"})
        assert prompt_of(qwen).endswith("<think>\n\n</think>\n\n")
        client.responses.create(model=MODEL, input="Hi", reasoning={"effort": "low"})
        assert not prompt_of(qwen).endswith("</think>\n\n")


def test_a_choice_of_tools_is_held_to(qwen: Running) -> None:
    qwen.engine.reply = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    clock = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
    with client_of(qwen) as client:
        for choice in ("required", {"type": "function", "name": "weather"}):
            client.responses.create(model=MODEL, input="Hi", tools=[TOOL, clock], tool_choice=choice)
            outputs = qwen.engine.submitted[-1][1].structured_outputs
            assert outputs is not None and outputs.grammar is not None
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]}
        client.responses.create(model=MODEL, input="Hi", tools=[TOOL, clock], tool_choice=allowed)
        assert "clock" in prompt_of(qwen) and "weather" not in prompt_of(qwen)


def test_a_text_format_is_a_grammar(server: Running, client: Any) -> None:
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA}
    response = client.responses.create(model=MODEL, input="Hi", text={"format": form})
    outputs = server.engine.submitted[-1][1].structured_outputs
    assert outputs is not None and outputs.json == SCHEMA
    assert response.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "no", "output": "x"}]}, "input[0].tool_call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b", "parameters": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"previous_response_id": "resp_no"}, "previous_response_id"),
        ({"previous_response_id": "resp_no", "conversation": "conv_no"}, "previous_response_id"),
        ({"background": True, "stream": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_under_its_own_name(
    server: Running, fields: dict[str, Any], param: str
) -> None:
    assert refusal(server, **fields) == (400, param)


# What is kept.


def test_a_response_goes_on_from_the_one_before_it(server: Running, client: Any) -> None:
    first = client.responses.create(model=MODEL, input="One", instructions="Not carried over.")
    second = client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    third = client.responses.create(model=MODEL, input="Three", previous_response_id=second.id)
    assert prompt_of(server) == "user: One\nassistant: Hello.\nuser: Two\nassistant: Hello.\nuser: Three\n>"
    assert third.previous_response_id == second.id
    assert client.responses.retrieve(second.id).output_text == "Hello."
    (given,) = client.responses.input_items.list(second.id).data
    assert given.content[0].text == "Two"
    reference = {"type": "item_reference", "id": first.output[0].id}
    client.responses.create(model=MODEL, input=[reference, {"role": "user", "content": "So?"}])
    assert prompt_of(server) == "assistant: Hello.\nuser: So?\n>"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=MODEL, input="Four", previous_response_id=third.id)


def test_store_false_keeps_nothing(client: Any) -> None:
    response = client.responses.create(model=MODEL, input="Hi", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_conversation_grows_by_its_responses_and_by_hand(server: Running, client: Any) -> None:
    conversation = client.conversations.create(items=[{"role": "user", "content": "One"}], metadata={"a": "b"})
    client.responses.create(model=MODEL, input="Two", conversation=conversation.id, store=False)
    client.responses.create(model=MODEL, input="Three", conversation={"id": conversation.id})
    assert prompt_of(server) == "user: One\nuser: Two\nassistant: Hello.\nuser: Three\n>"
    items = client.conversations.items.list(conversation.id, order="asc", limit=2)
    assert [item.content[0].text for item in items.data] == ["One", "Two"] and items.has_more
    assert len(list(client.conversations.items.list(conversation.id, limit=2))) == 5  # page by page
    (added,) = client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "Four"}]).data
    assert client.conversations.items.retrieve(added.id, conversation_id=conversation.id).content[0].text == "Four"
    client.conversations.items.delete(added.id, conversation_id=conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(added.id, conversation_id=conversation.id)
    assert client.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="Five", conversation=conversation.id)


def test_a_response_in_the_background_outlives_its_client_and_can_be_cancelled(server: Running, client: Any) -> None:
    server.engine.hold = True
    try:
        done, cancelled = (client.responses.create(model=MODEL, input="Hi", background=True) for _ in range(2))
        assert {done.status, client.responses.retrieve(done.id).status} == {"in_progress"}
        until(lambda: server.app.service.num_open_requests == 2)  # a drain waits for them
        assert client.responses.cancel(cancelled.id).status == "cancelled"
    finally:
        server.engine.hold = False
    until(lambda: client.responses.retrieve(done.id).status == "completed")
    assert client.responses.retrieve(done.id).output_text == "Hello."
    assert client.responses.retrieve(cancelled.id).status == "cancelled"
    assert client.responses.cancel(done.id).status == "completed"
    plain = client.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(plain.id)
    until(lambda: server.app.service.num_open_requests == 0)


def test_truncation_drops_the_oldest_turns_until_the_rest_fits(server: Running, client: Any) -> None:
    turns = [{"role": "user", "content": f"{place} " + "x" * 200} for place in range(9)]
    assert refusal(server, input=turns)[0] == 400
    client.responses.create(model=MODEL, input=turns, truncation="auto", instructions="S", max_output_tokens=50)
    prompt = prompt_of(server)
    assert prompt.startswith("system: S\nuser: 5 ") and len(prompt) <= 950
    client.responses.create(model=MODEL, input=turns[:2], truncation="auto")
    assert prompt_of(server).startswith("user: 0 ")


def test_what_one_key_keeps_is_not_there_for_another() -> None:
    with (
        running(api_keys=("sk-a", "sk-b")) as server,
        client_of(server, "sk-a") as mine,
        client_of(server, "sk-b") as other,
    ):
        response = mine.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
        assert mine.responses.retrieve(response.id).id == response.id
        for ask in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                ask(response.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(model=MODEL, input="Hi", previous_response_id=response.id)


def test_a_store_in_a_file_outlives_the_server_and_one_that_breaks_fails_alone(tmp_path: Any) -> None:
    keeping = Keeping(response_store=str(tmp_path / "kept"))
    engine = FakeEngine()
    engine.reply = "Hello."
    with running(engine, keeping=keeping) as server, client_of(server) as client:
        first = client.responses.create(model=MODEL, input="One")
    engine = FakeEngine()
    engine.reply = "Hello."
    with running(engine, keeping=keeping) as server, client_of(server) as client:
        client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
        assert prompt_of(server).startswith("user: One\nassistant: Hello.\n")
        store = server.app.service.store
        store.close()
        for path in tmp_path.iterdir():
            path.write_bytes(b"rubbish" * 1000)
        response = client.responses.create(model=MODEL, input="Three")
        assert (response.output_text, response.store) == ("Hello.", False)
        with pytest.raises(openai.InternalServerError, match="store of responses has failed"):
            client.responses.retrieve(first.id)
        assert server.chat().status_code == 200


def test_a_conversation_takes_items_and_no_references(server: Running) -> None:
    answer = server.post("/v1/conversations", {"items": [{"type": "item_reference", "id": "msg_1"}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "items[0].type")


def test_requests_are_counted_by_route_and_not_by_id(server: Running, client: Any) -> None:
    client.responses.retrieve(client.responses.create(model=MODEL, input="Hi").id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve("msg_x", conversation_id="conv_x")
    until(lambda: "/items/{item_id}" in server.http.get("/metrics").text)
    counted = server.http.get("/metrics").text
    assert '/v1/responses/{response_id}"' in counted and "conv_x" not in counted


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
        item = {"type": "message", "role": "user", "content": "x" * length}
        conversation = server.post("/v1/conversations", {"items": [item]}).json()["id"]
        server.post("/v1/responses", {"model": MODEL, "input": "Hi", "conversation": conversation})
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
        response = client_of(qwen).responses.create(model=MODEL, input="Hi")
        assert response.usage.output_tokens_details.reasoning_tokens == length + 2
    loop_thread = qwen.call(threading.get_ident)
    assert [thread == loop_thread for thread in threads] == [True, False]


@pytest.mark.parametrize("cut", [{"max_output_tokens": 55}, {"stop": ["Ulm"]}])
def test_a_call_that_was_cut_off_does_not_spoil_what_comes_after_it(qwen: Running, cut: dict[str, Any]) -> None:
    qwen.engine.reply = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    conversation = qwen.post("/v1/conversations", {}).json()["id"]
    asked = {"model": MODEL, "input": "Ulm?", "tools": [TOOL]}
    first = qwen.post("/v1/responses", {**asked, "tool_choice": "required", **cut}).json()
    (call,) = first["output"]
    assert (call["type"], call["status"]) == ("function_call", "incomplete") and "Ulm" not in call["arguments"]
    qwen.post("/v1/responses", {**asked, "tool_choice": "required", "conversation": conversation, **cut})
    qwen.engine.reply = "It rains."
    for before in ({"previous_response_id": first["id"]}, {"conversation": conversation}):
        answer = qwen.post("/v1/responses", {**asked, "input": "Go on.", **before})
        assert answer.status_code == 200, answer.text
        assert "Ulm?" in prompt_of(qwen) and '"arguments"' not in prompt_of(qwen).partition("Ulm?")[2]


def test_a_response_of_a_conversation_is_gone_on_with_by_the_conversation(server: Running) -> None:
    conversation = server.post("/v1/conversations", {}).json()["id"]
    first = server.post("/v1/responses", {"model": MODEL, "input": "Hi", "conversation": conversation}).json()
    answer = server.post("/v1/responses", {"model": MODEL, "input": "On", "previous_response_id": first["id"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
    assert conversation in answer.json()["error"]["message"]


@pytest.mark.parametrize("limit", ["²", "9" * 5000, "0", "101", "x"])
def test_a_limit_that_is_none_is_refused(server: Running, limit: str) -> None:
    first = server.post("/v1/responses", {"model": MODEL, "input": "Hi"}).json()
    answer = server.http.get(f"/v1/responses/{first['id']}/input_items", params={"limit": limit})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_what_runs_in_the_background_is_not_deleted_but_cancelled(server: Running) -> None:
    server.engine.reply = None
    asked = {"model": MODEL, "input": "Hi", "background": True, "max_output_tokens": 100_000}
    server.engine.delay_s = 0.01
    try:
        first = server.post("/v1/responses", {**asked, "max_output_tokens": 900}).json()
        answer = server.http.delete(f"/v1/responses/{first['id']}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (409, "response_id")
        assert server.post(f"/v1/responses/{first['id']}/cancel", {}).json()["status"] == "cancelled"
        assert server.http.delete(f"/v1/responses/{first['id']}").status_code == 200
    finally:
        server.engine.delay_s = 0.0
