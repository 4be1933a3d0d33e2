"""A hundred tools of the size that MCP servers have: their grammars stay within the compiler's limits."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from penstock.engine.grammar.compiler import LIMITS
from penstock.engine.grammar.tool_calls import grammar
from penstock.engine.sampling_params import MAX_GRAMMAR_CHARS
from penstock.engine.text.tools.call_kinds import Calls, ToolSpec
from tests.support.call_writers import FORMS
from tests.support.grammar_rig import vocabulary
from tests.support.refusals import hardest

NUM_TOOLS = 100
PROPERTIES: dict[str, Any] = json.loads(Path(__file__).with_name("many_tools.json").read_text())
ABOUT = "What the server does with it, in a sentence or two, as the descriptions of real servers have them. " * 3


def parameters(number: int) -> dict[str, Any]:
    properties = {**PROPERTIES, f"cursor_{number}": {"type": ["string", "null"], "format": "cursor"}}
    described = {name: {**schema, "description": ABOUT} for name, schema in properties.items()}
    return {"type": "object", "properties": described, "required": ["owner", "repo"], "additionalProperties": False}


@pytest.mark.parametrize("is_strict", hardest([False, True], True))
@pytest.mark.parametrize("must", hardest([False, True], False))
@pytest.mark.parametrize("name", hardest(FORMS, "hermes", "qwen3_coder", "gemma4", "deepseek_v3", "llama3_json"))
def test_a_hundred_tools_of_a_realistic_size_compile(name: str, must: bool, is_strict: bool) -> None:
    tools = [ToolSpec(f"mcp_server_{number}_call", parameters(number), is_strict) for number in range(NUM_TOOLS)]
    source = grammar({}, Calls(FORMS[name], tools, must, many=True))
    assert len(source) <= MAX_GRAMMAR_CHARS
    compiled = LLMatcher(vocabulary().backend, source, log_level=0, limits=LLParserLimits(**LIMITS))
    assert not compiled.is_error(), compiled.get_error()[:300]
