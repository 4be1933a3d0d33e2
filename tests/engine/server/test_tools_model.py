"""Tool calls by the model that is served when none is named. It was never taught any, so the grammar does it all."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.default_model import default_model
from tests.support.running_server import MODEL

SCHEMAS = json.loads(Path(__file__).with_name("tool_schemas.json").read_text())
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
MESSAGES = [{"role": "user", "content": "What is the weather in Ulm?"}]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with default_model() as server, server.openai() as made:
        yield made


def check(calls: list[tuple[str, str]]) -> None:
    """Every call names a function and keeps to its schema."""
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.slow
def test_required_calls_parse_and_validate_at_a_high_temperature(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.5,
        seed=1,
        n=8,
        max_tokens=200,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        check([(call.function.name, call.function.arguments)])
