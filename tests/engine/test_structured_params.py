"""Errors of SamplingParams about structured outputs before anything is compiled."""

import json
from typing import Any

import msgspec
import pytest

from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_GRAMMAR_DEPTH,
    SamplingParams,
    StructuredOutputs,
)
from tests.support.refusals import cases, table


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("fields", cases(__file__, "one form", nested=nested, MAX_GRAMMAR_DEPTH=MAX_GRAMMAR_DEPTH))
def test_one_form_is_accepted_and_survives_the_wire(fields: dict[str, Any]) -> None:
    wanted = StructuredOutputs(**fields)
    SamplingParams(structured_outputs=wanted).check(100)
    assert msgspec.json.decode(msgspec.json.encode(wanted), type=StructuredOutputs) == wanted
    assert wanted.kind == list(fields)[-1]


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    table(
        __file__,
        "structured outputs",
        MAX_CHOICES=MAX_CHOICES,
        MAX_GRAMMAR_CHARS=MAX_GRAMMAR_CHARS,
        MAX_GRAMMAR_DEPTH=MAX_GRAMMAR_DEPTH,
        nested=nested,
    ),
)
def test_any_other_is_refused_with_the_field_and_the_limit(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        SamplingParams(structured_outputs=StructuredOutputs(**fields)).check(100)
    assert caught.value.field == field


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="whitespace"):
        msgspec.json.decode(json.dumps({"regex": "a", "whitespace": 1}), type=StructuredOutputs)
