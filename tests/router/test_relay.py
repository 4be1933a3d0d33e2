"""Requests through the router to a real server and back."""

import json

import pytest

from tests.router.fleet import mock_replicas, running_router


@pytest.fixture(scope="module")
def replicas():
    with mock_replicas(2) as started:
        yield started


@pytest.fixture(scope="module")
def router(replicas):
    with running_router(*(each.url for each in replicas)) as started:
        yield started


def test_an_answer_is_the_replicas_own(router, replicas):
    through = router.complete("abc", max_tokens=8).json()
    direct = router.http.post(
        replicas[0].url + "/v1/completions", json={"prompt": "abc", "max_tokens": 8, "temperature": 0}
    ).json()
    assert through["choices"] == direct["choices"]


def test_a_stream_arrives_event_by_event(router):
    body = {"prompt": "abc", "max_tokens": 20, "temperature": 0, "stream": True}
    with router.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert text == router.complete("abc", max_tokens=20).json()["choices"][0]["text"]
