"""The connection's guards against raw sockets: codings, unread answers, clients that leave.

tests/test_edges.py asks for the limits of sizes, times and connections, of the router too.

Work that takes long does not run in the event loop, so that other requests are answered meanwhile."""

import contextlib
import gc
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import Raw

from penstock.engine.server import answer_writer, completions, prompts
from penstock.engine.server.agents import item_writer
from penstock.engine.server.agents.response_store import StoredResponse
from penstock.engine.server.call import Call
from penstock.engine.server.embeddings import _vector
from penstock.engine.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from penstock.engine.server.requests import EmbeddingRequest
from penstock.engine.text.prompt import INLINE_CHARS
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import TokenLogprobs
from tests.support.fake_engine import INFO, FakeEngine, byte_tokenizer
from tests.support.raw_http import post, read_all
from tests.support.refusals import cases
from tests.support.running_server import MODEL, Running, running, started, until

LONG = msgspec.structs.replace(INFO, max_model_len=200_000)
HI = [{"role": "user", "content": "Hi"}]


def completion(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "abc", **fields}).encode()


def assert_serves(server: Running) -> None:
    assert server.complete(max_tokens=3).json()["choices"][0]["text"] == "abc"


server = started(max_body_bytes=100_000)


def test_streams_that_are_not_read_are_cut_off_and_their_requests_freed() -> None:
    engine = FakeEngine(info=LONG)
    with running(engine, write_timeout_s=0.2) as server, contextlib.ExitStack() as stack:
        body = completion(max_tokens=100_000, stream=True, prompt="x" * 500)
        for _ in range(3):
            stack.enter_context(server.connect(receive_buffer=1024)).sendall(post(body, close=False))
        until(lambda: len(engine.submitted) == 3)
        until(lambda: len(engine.answers) == 0, timeout_s=90)
        assert len(engine.aborted) == 3
        assert_serves(server)


def unread_bytes(connection: Any) -> int:
    return int(connection.transport.get_write_buffer_size())


def test_a_late_reader_gets_the_whole_stream_of_which_few_bytes_are_held() -> None:
    engine = FakeEngine(info=LONG)
    with running(engine, write_timeout_s=60.0) as server, server.connect(receive_buffer=1024) as sock:
        sock.sendall(post(completion(max_tokens=50_000, stream=True)))
        until(lambda: any(map(unread_bytes, server.call(lambda: list(server.listener.connections)))))
        until(lambda: len(engine.answers) == 0, timeout_s=90)  # the engine is done, the client has read nothing
        (connection,) = server.call(lambda: list(server.listener.connections))
        assert server.call(lambda: unread_bytes(connection)) < 256 * 1024
        answer = read_all(sock)
    assert b"data: [DONE]" in answer[-64:] and answer.rstrip().endswith(b"0")
    chunks = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b'data: {"')]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ("abc" * 17_000)[:50_000]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields"), cases(__file__, "long requests", HI=HI))
def test_a_client_that_leaves_has_its_request_aborted_without_a_warning(
    path: str, fields: dict[str, Any], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(delay_s=0.01)
    ids = ["1.0", "1.1"] if "n" in fields else ["1.0"]
    with running(engine) as server:
        sock = server.connect()
        body = json.dumps({"model": MODEL, "stream": stream, **fields}).encode()
        sock.sendall(post(body, close=False).replace(b"/v1/completions", path.encode(), 1))
        until(lambda: len(engine.answers) == len(ids))
        sock.close()
        until(lambda: len(engine.answers) == 0)  # long before its 900 tokens are there, or nothing would be aborted
        assert sorted(engine.aborted) == ids
        until(lambda: server.app.service.metrics.requests[path, 499] == 1)
        metrics = server.http.get("/metrics").text
        aborted = re.findall(r'^vllm:request_success_total\{.*finished_reason="abort".*\} (\d+)', metrics, re.MULTILINE)
        assert aborted == [str(len(ids))]
        server.http.close()
        until(lambda: not server.call(lambda: list(server.listener.connections)))
    assert [record for record in caplog.records if record.name != "penstock.engine.access"] == []


def test_a_client_may_leave_at_any_byte() -> None:
    engine = FakeEngine(delay_s=0.002)
    choose = random.Random(7)
    with running(engine) as server:
        for _ in range(60):
            body = completion(max_tokens=choose.randint(1, 60), stream=choose.random() < 0.5, n=2)
            whole = post(body, close=False)
            with server.connect() as sock:
                sock.sendall(whole[: choose.randint(0, len(whole) * 2)])
                if choose.random() < 0.5:
                    time.sleep(choose.random() * 0.02)
                if choose.random() < 0.3:  # a reset instead of an orderly end
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        until(lambda: server.call(lambda: server.app.service.num_open_requests) == 0)
        until(lambda: len(engine.answers) == 0)
        assert_serves(server)


def test_a_stream_ends_in_a_proper_last_chunk_and_its_connection_is_kept_alone(server: Running) -> None:
    used = []
    gc.collect()
    for _ in range(9):
        assert server.complete("abc", max_tokens=2, stream=True).text.endswith("data: [DONE]\n\n")
        used += server.call(lambda: list(server.listener.connections))
    assert len(used) == 9 and len(set(used)) == 1
    assert sum(type(each) is Call for each in gc.get_objects()) <= 2, "a request does not wait for the collector"


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
