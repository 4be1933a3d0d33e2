"""Work that takes long does not run in the event loop, so that other requests are answered meanwhile."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from msgspec import Raw

from penstock.engine.server import answer_writer, completions, prompts
from penstock.engine.server.agents import item_writer
from penstock.engine.server.agents.response_store import StoredResponse
from penstock.engine.server.embeddings import _vector
from penstock.engine.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from penstock.engine.server.requests import EmbeddingRequest
from penstock.engine.text.prompt import INLINE_CHARS
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import TokenLogprobs
from tests.support.fake_engine import byte_tokenizer
from tests.support.refusals import cases
from tests.support.running_server import MODEL, Running

HI = [{"role": "user", "content": "Hi"}]


def calls_in_loop(server: Running, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[bool]:
    """Return a list that gets an entry for each call of a function: whether it runs in the event loop's thread."""
    function, loop_thread = getattr(owner, name), server.call(threading.get_ident)
    calls: list[bool] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        calls.append(threading.get_ident() == loop_thread)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, watched)
    return calls


@pytest.mark.parametrize("fields", [{"echo": True}, {"max_tokens": 5}], ids=["the prompt's", "the answer's"])
def test_many_log_probabilities_of_a_stream_are_formatted_in_a_thread(
    server: Running, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    calls = calls_in_loop(server, monkeypatch, completions, "completion_logprobs")
    monkeypatch.setattr(answer_writer, "LONG_ANSWER", 0 if "max_tokens" in fields else 3)
    server.complete("abcdef", stream=True, logprobs=1, **({"max_tokens": 1} | fields))
    assert calls and not any(calls)


@pytest.mark.parametrize("message", cases(__file__, "long messages", pytest=pytest, LONG="x" * 5000))
def test_threads_render_long_chats(server: Running, monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]) -> None:
    calls = calls_in_loop(server, monkeypatch, prompts, "chat_prompt")
    for messages in ([*HI, message], HI):
        server.post("/tokenize", {"messages": messages})
    assert calls == [False, True]


def test_a_message_after_a_long_chat_is_rendered_in_a_thread(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_in_loop(server, monkeypatch, prompts, "chat_prompt")
    for length in (10, INLINE_CHARS):
        items = json.dumps([{"type": "message", "role": "user", "content": "x" * length}]).encode()
        past = StoredResponse((None, b""), b"{}", items, None)
        server.call(partial(server.app.service.responses.put, "resp_past", past))
        server.post("/v1/responses", {"model": MODEL, "input": "Hi", "previous_response_id": "resp_past"})
    assert calls == [True, False]


def test_the_tokens_of_long_reasoning_are_counted_in_a_thread(qwen: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_writer, "INLINE_CHARS", 100)
    for length in (10, 200):
        qwen.engine.reply = f"<think>\nH{'m' * length}\n</think>\n\nYes."
        with monkeypatch.context() as patch:
            calls = calls_in_loop(qwen, patch, Tokenizer, "encode")
            usage = qwen.post("/v1/responses", {"model": MODEL, "input": "Hi"}).json()["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == length + 1
        assert calls[-1] is (length == 10)


def test_each_position_and_each_vector_is_encoded_by_itself() -> None:
    """So encoding a reply of a hundred megabytes never keeps the GIL from the event loop for long."""
    tokenizer, tokens = byte_tokenizer(), [TokenLogprobs((97, 98), (-0.5, -1.0), 1)]
    encoded = [
        chat_logprobs(tokenizer, tokens, None)["content"][0],
        completion_logprobs(tokenizer, tokens, 0, None, None)[0]["top_logprobs"][0],
        prompt_logprobs(tokenizer, tokens)[1],
        *(_vector(bytes(8), EmbeddingRequest(input=Raw(), encoding_format=form)) for form in ("float", "base64")),
    ]
    assert [type(each) for each in encoded] == [Raw] * 5


@pytest.fixture
def validation(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Yield an event that is set when a grammar's validation begins, and one that lets it go on."""
    has_begun, go_on = threading.Event(), threading.Event()

    def validate(_source: str, result: Future[str]) -> None:
        has_begun.set()
        assert go_on.wait(60)
        if not result.done():
            result.set_result("")

    monkeypatch.setattr("penstock.engine.grammar.validator._validate", validate)
    yield has_begun, go_on
    go_on.set()


def with_tool(name: str) -> dict[str, Any]:
    return {"messages": HI, "tools": [{"type": "function", "function": {"name": name}}]}


def test_no_request_waits_for_a_validation(qwen: Running, validation: tuple[threading.Event, threading.Event]) -> None:
    has_begun, go_on = validation
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(httpx.post, f"{qwen.url}/v1/chat/completions", json=with_tool("slow"), timeout=60)
        assert has_begun.wait(60)
        assert qwen.chat(messages=HI).status_code == 200
        go_on.set()
        assert answer.result().status_code == 200
    assert "slow" in (qwen.engine.submitted[-1][2]["grammar"] or "")


@pytest.mark.usefixtures("validation")
def test_a_grammar_that_is_not_validated_in_time_holds_no_call(qwen: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.grammar.validator.COMPILE_LIMIT_S", 0.05)
    for name in ("late", "later", "latest"):  # more than are validated at once
        assert qwen.chat(**with_tool(name)).status_code == 200
        assert qwen.engine.submitted[-1][2]["grammar"] is None
