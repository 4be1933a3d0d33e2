"""/v1/messages, as Anthropic's own package sends and reads them; what it sends is written out where it may be missing."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock, Mock

import httpx
import pytest

from penstock.engine.front.answer import Update
from penstock.engine.server.answer_writer import write
from tests.support.running_server import MODEL, Running
from tests.support.three_apis import APIS, SCHEMA

HI = [{"role": "user", "content": "Hi"}]
TOOL = APIS["messages"].tool("weather", SCHEMA)
CALLED = '<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


def post(qwen: Running, **fields: Any) -> httpx.Response:
    return qwen.post("/v1/messages", {"model": MODEL, "max_tokens": 500, "messages": HI, **fields})


# With the package, whose import takes three seconds.


@pytest.fixture(scope="module")
def anthropic() -> Any:
    return pytest.importorskip("anthropic", reason="the package anthropic is not installed")


@pytest.fixture
def client(anthropic: Any, qwen: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=qwen.url, max_retries=0, api_key="unused") as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_packages_tool_runner_sends_the_whole_conversation_with_every_turn(
    qwen: Running, anthropic: Any, client: Any, stream: bool
) -> None:
    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """Weather."""
        qwen.engine.reply = "It is warm."
        return f"7 degrees in {city}"

    qwen.engine.reply = CALLED
    fields = {"model": MODEL, "messages": HI, "tools": [weather], "system": "Be brief."}
    first, last = client.beta.messages.tool_runner(max_tokens=500, stream=stream, **fields)
    first, last = (each.get_final_message() if stream else each for each in (first, last))
    thought, text, call = first.content
    assert (thought.thinking, thought.signature, text.text) == ("Hm.", "unsigned", "Look.")
    assert (call.name, call.input, first.stop_reason) == ("weather", {"city": "Ulm"}, "tool_use")
    assert last.content[0].text == "It is warm."
    for text in ("Be brief.", "<|im_start|>user\nHi", '{"city": "Ulm"}', "<tool_response>\n7 degrees in Ulm"):
        assert text in qwen.prompt


@pytest.mark.slow
def test_the_package_counts_tokens_and_reads_errors(
    qwen: Running, anthropic: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"model": MODEL, "messages": HI, "tools": [TOOL]}
    usage = client.messages.create(max_tokens=500, **fields).usage
    num_prompt = usage.input_tokens + usage.cache_read_input_tokens
    assert client.messages.count_tokens(**fields).input_tokens == num_prompt == len(qwen.engine.submitted[-1][0])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=9, messages=HI)
    monkeypatch.setattr(qwen.engine, "fail_next", "out of blocks")
    stream = client.messages.create(max_tokens=9, stream=True, **fields)
    with pytest.raises(anthropic.APIError, match="out of blocks"):
        list(stream)


@pytest.mark.slow
def test_the_package_reads_the_list_of_models(qwen: Running, client: Any) -> None:
    (model,) = client.models.list()  # asks for further pages while there are some
    assert model == client.models.retrieve(MODEL)
    assert (model.id, model.type, model.display_name, model.lifecycle) == (MODEL, "model", MODEL, "active")
    assert abs(model.created_at.timestamp() - qwen.app.service.started) < 1


# Without it.


async def test_half_a_character_sends_no_piece() -> None:
    """A router is answered with the first piece; an empty one would come before there is an answer."""
    answer = MagicMock(prompt_logprobs=None)
    answer.__aiter__.return_value = [[Update(0, token_ids=[195])]]
    call = SimpleNamespace(reports=False, answers=[answer])
    service = SimpleNamespace(seen=lambda _answer, updates: updates)
    writer = SimpleNamespace(take=Mock(), end=AsyncMock(), taken=lambda: b"")
    assert not [piece async for piece in write(cast(Any, service), cast(Any, call), cast(Any, writer))]


@pytest.mark.parametrize("content", ["", []])
def test_an_empty_turn_begins_nothing(qwen: Running, content: Any) -> None:
    assert post(qwen).status_code == 200
    without = qwen.prompt
    last = {"role": "assistant", "content": content}
    assert post(qwen, messages=[*HI, last]).status_code == 200
    assert qwen.prompt == without
    assert post(qwen, messages=[*HI, last, *HI]).status_code == 200


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_thread_is_refused_so_that_clients_send_all_messages(qwen: Running, thread: Any) -> None:
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
