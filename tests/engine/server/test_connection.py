"""The connection's guards against raw sockets: codings, unread answers, clients that leave.

tests/test_edges.py asks for the limits of sizes, times and connections, of the router too.
"""

import contextlib
import json
import random
import re
import socket
import time
from typing import Any

import msgspec
import pytest

from tests.support.fake_engine import INFO, FakeEngine
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


# Clients that do not read, and clients that leave.


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


def test_a_stream_ends_in_a_proper_last_chunk_and_the_connection_is_kept(server: Running) -> None:
    used = []
    for _ in range(3):
        assert server.complete("abc", max_tokens=2, stream=True).text.endswith("data: [DONE]\n\n")
        used += server.call(lambda: list(server.listener.connections))
    assert len(used) == 3 and len(set(used)) == 1
