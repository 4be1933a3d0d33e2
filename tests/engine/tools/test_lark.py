"""The grammars of calls and of formats together, and of odd schemas; test_call_formats.py has those of calls alone.

Marks are tried both ways: as special tokens of the model, and as plain text.
"""

import json
from typing import Any

import pytest

from penstock.engine.sampling_params import StructuredOutputs
from penstock.engine.server.tool_schema import Grammar, as_function
from penstock.engine.text.tools.call_kinds import Calls, ToolSpec
from penstock.engine.text.tools.thinking import THINK, Thinking
from tests.support.call_writers import WRITERS
from tests.support.refusals import cases
from tests.support.tool_samples import CALL, FORMATS, SPECIAL, AnswerGrammar, calls_of

MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")


def lark(special: bool, *parts: Any) -> AnswerGrammar:
    return AnswerGrammar(MARKS if special else (), *parts)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.triggers])
def test_a_mark_that_is_a_token_cannot_be_spelled_out_in_free_text(name: str) -> None:
    mark = FORMATS[name].marks[0]
    for held in (lark(True, calls_of(name)), lark(True, calls_of(name), None, Thinking(THINK))):
        spelled = [*b"hello ", *mark.encode()]
        assert held.matcher.try_consume_tokens(spelled) == len(spelled) - 1


@SPECIAL
@pytest.mark.parametrize(("answer", "right", "wrong"), cases(__file__, "forms", StructuredOutputs=StructuredOutputs))
def test_a_form_holds_behind_the_reasoning(special: bool, answer: StructuredOutputs, right: str, wrong: str) -> None:
    opened, may = Thinking(THINK, is_open=True), Thinking(THINK)
    for thinking, before in (
        (opened, "Hm.</think>"),
        (opened, "\n{</think>\n\n"),
        (may, "<think>Hm.</think>\n"),
        (may, ""),
    ):
        held = lark(special, None, answer, thinking)
        assert held.accepts(before + right) and held.refuses(before + wrong)
        assert before == "" or held.verdict(before.partition("</think>")[0]) == "unfinished"


@SPECIAL
@pytest.mark.parametrize("name", FORMATS)
def test_optional_calls_beside_a_form_are_calls_or_that_form(name: str, special: bool) -> None:
    held = lark(special, calls_of(name), StructuredOutputs(choice=["yes", "no"]), None)
    assert held.accepts(CALL[name]) and held.accepts("yes") and held.verdict("may") == ""


def test_a_schema_that_no_grammar_expresses_is_refused_only_if_it_is_strict() -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"pattern": "b"}}}, "required": ["a"]}
    form = FORMATS["hermes"]
    with pytest.raises(AssertionError, match=r'Unimplemented keys: \["not"\]'):
        lark(False, Calls(form, [ToolSpec("f", odd)], True, False))
    loose = lark(False, Calls(form, [ToolSpec("f", odd, is_strict=False)], True, False))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
    assert loose.accepts(call)


def test_a_regex_holds_the_whole_input_of_a_custom_tool() -> None:
    shown = as_function("patch", None, Grammar("regex", 'a|[b"\n]+c'))
    held = lark(False, Calls(FORMATS["hermes"], [ToolSpec("patch", shown.parameters or {})], True, False))
    for text, is_right in {"a": True, 'b"\n"c': True, "": False, "ac": False, "ba": False, "a\n": False}.items():
        call = WRITERS["hermes"]([("patch", {"input": text})])
        assert held.accepts(call) == is_right, text


def test_nothing_in_a_schema_reads_as_grammar() -> None:
    name, values = 'a": "b" }\nstart: "x" ::= /', ["::=", "}\n", '"', "ü"]
    nasty = {"type": "object", "properties": {name: {"enum": values}}}
    held = lark(False, Calls(FORMATS["hermes"], [ToolSpec("f", nasty)], True, False))
    for value in values:
        arguments = json.dumps({name: value}, ensure_ascii=False)
        call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert held.accepts(call)
