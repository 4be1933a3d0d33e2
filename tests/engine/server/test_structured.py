"""Constrained answers over HTTP: the fields of OpenAI and vLLM, where objections point, and real answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.export import save_tokenizer

from penstock.engine.grammar.rules import grammar_source
from penstock.engine.sampling_params import MAX_GRAMMAR_CHARS, SamplingParams, StructuredOutputs
from penstock.engine.text.template import ChatTemplate
from tests.support.chat_samples import QWEN3
from tests.support.fake_engine import byte_tokenizer
from tests.support.oracle_engine import oracle_engine
from tests.support.refusals import cases
from tests.support.running_server import Running, events, running

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Over the real core, which finds its tokenizer where its model is."""
    folder: Path = tmp_path_factory.mktemp("bytes")
    save_tokenizer(byte_tokenizer(), folder)
    (folder / "config.json").write_text("{}")
    with running(oracle_engine(300, model=str(folder), max_model_len=2000, kv_cache_bytes=2**22)) as started:
        yield started


@pytest.mark.parametrize(
    ("fields", "outputs"),
    cases(__file__, "grammars", StructuredOutputs=StructuredOutputs, FORMAT=FORMAT, SCHEMA=SCHEMA),
)
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
