"""Errors of engines that have another form than OpenAI's."""

from collections.abc import Iterator

import httpx
import pytest

from penstock.router.answer import in_openais_form
from penstock.router.http.heads import AnswerHead
from tests.support.refusals import table
from tests.support.router_fleet import RunningRouter, running_router
from tests.support.router_stub import Stub, whole


@pytest.fixture(scope="module")
def router(backend: Stub) -> Iterator[RunningRouter]:
    with running_router(backend.url) as started:
        yield started


@pytest.mark.parametrize(("body", "message"), table(__file__, "foreign errors"))
def test_what_is_wrong_stands_where_openais_clients_look(
    router: RunningRouter, backend: Stub, body: bytes, message: str
) -> None:
    backend.answer = lambda seen, sock: whole(body, b"400 Bad Request", b"content-type: text/html", b"x-trace: 7")
    answer = router.complete()
    assert answer.status_code == 400 and answer.headers["x-trace"] == "7"
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["message"].startswith(message) and error["code"] == 400


def test_an_error_in_openais_form_passes_byte_by_byte(router: RunningRouter, backend: Stub) -> None:
    body = b'{ "error":{"message":"no","odd":1} }'
    backend.answer = lambda seen, sock: whole(body, b"422 Oh", b"content-type: application/problem+json")
    answer = router.complete()
    assert (answer.status_code, answer.content) == (422, body)
    assert answer.headers["content-type"] == "application/problem+json"


def test_an_error_in_chunks_is_read_and_a_long_one_passes(router: RunningRouter, backend: Stub) -> None:
    head = b"HTTP/1.1 400 Bad\r\ntransfer-encoding: chunked\r\n\r\n"
    backend.answer = lambda seen, sock: head + b'9\r\n{"detail"\r\n7\r\n:"why"}\r\n0\r\n\r\n'
    assert router.complete().json()["error"]["message"] == "why"
    long = b"x" * 300_000
    backend.answer = lambda seen, sock: whole(long, b"400 Bad")
    assert router.complete().content == long
    backend.answer = lambda seen, sock: whole()
    assert router.complete().status_code == 200


def test_a_busy_replicas_own_answer_is_put_into_form_too(router: RunningRouter, backend: Stub) -> None:
    backend.answer = lambda seen, sock: whole(b'{"message": "full"}', b"429 Busy", b"retry-after: 3")
    answer: httpx.Response = router.complete()
    assert answer.status_code == 429 and answer.json()["error"]["message"] == "full"
    assert answer.headers["retry-after"] == "3"


def test_what_is_compressed_is_not_read() -> None:
    head = AnswerHead(400, b"Content-Encoding: gzip\r\n", None)
    assert in_openais_form(head, b"\x1f\x8b") is None
