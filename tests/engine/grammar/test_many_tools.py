"""A hundred tools of the size that MCP servers have: their grammars stay within the compiler's limits."""

from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from penstock.engine.grammar.compiler import LIMITS
from penstock.engine.grammar.tool_calls import grammar
from penstock.engine.sampling_params import MAX_GRAMMAR_CHARS
from penstock.engine.text.tools.formats import Calls, ToolSpec
from tests.support.call_writers import FORMS
from tests.support.grammar_rig import vocabulary

NUM_TOOLS = 100
ABOUT = "What the server does with it, in a sentence or two, as the descriptions of real servers have them. " * 3


def parameters(number: int) -> dict[str, Any]:
    file = {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"enum": ["100644", "100755"]}}
    properties: dict[str, Any] = {
        "owner": {"type": "string"},
        "repo": {"type": "string"},
        "title": {"type": "string", "minLength": 1, "maxLength": 256},
        "body": {"type": "string", "default": ""},
        "state": {"type": "string", "enum": ["open", "closed", "all"]},
        "labels": {"type": "array", "items": {"type": "string"}},
        "page": {"type": "integer", "minimum": 1},
        "perPage": {"type": "integer", "minimum": 1, "maximum": 100},
        "since": {"type": "string", "format": "date-time"},
        "draft": {"type": "boolean", "default": False},
        "files": {"type": "array", "items": {"type": "object", "properties": file, "required": ["path"]}},
        "filter": {"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}]},
        f"cursor_{number}": {"type": ["string", "null"], "format": "cursor"},
    }
    described = {name: {**schema, "description": ABOUT} for name, schema in properties.items()}
    return {"type": "object", "properties": described, "required": ["owner", "repo"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("must", "is_strict"),
    [
        (False, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, False), (True, False), (True, True))),
    ],
    ids=["auto-strict", "auto-optional", "required-optional", "required-strict"],
)
@pytest.mark.parametrize("name", FORMS)
def test_a_hundred_tools_of_a_realistic_size_compile(name: str, must: bool, is_strict: bool) -> None:
    tools = [ToolSpec(f"mcp_server_{number}_call", parameters(number), is_strict) for number in range(NUM_TOOLS)]
    source = grammar({}, Calls(FORMS[name], tools, must, many=True))
    assert len(source) <= MAX_GRAMMAR_CHARS
    compiled = LLMatcher(vocabulary().backend, source, log_level=0, limits=LLParserLimits(**LIMITS))
    assert not compiled.is_error(), compiled.get_error()[:300]
