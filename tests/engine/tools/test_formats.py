"""The format of calls that a model was trained on is detected in its chat template, and so are its marks of reasoning. The grammars
of calls and of formats together, and of odd schemas; test_call_formats.py has those of calls alone.

Marks are tried both ways: as special tokens of the model, and as plain text.

gpt-oss's messages: read whole and in any pieces, and the grammars that hold a model to them."""

import dataclasses
import itertools
import json
import random
from typing import Any

import pytest

from penstock.engine.grammar.tool_calls import messages_grammar
from penstock.engine.sampling_params import StructuredOutputs
from penstock.engine.server.custom_tools import Grammar, as_function
from penstock.engine.text.tools import formats, thinking
from penstock.engine.text.tools.call_kinds import Calls, ToolSpec
from penstock.engine.text.tools.formats import detect, named
from penstock.engine.text.tools.harmony import ENDS, FORM, TOKENS, HarmonyReader, after_prompt
from penstock.engine.text.tools.reader import Arguments, CallStart
from penstock.engine.text.tools.scan import MAX_FRAME_CHARS
from penstock.engine.text.tools.thinking import THINK, Thinking
from tests.support import chat_samples
from tests.support.call_writers import FORMS, WRITERS
from tests.support.refusals import cases
from tests.support.tool_samples import CALL, CLOCK, FORMATS, SPECIAL, WEATHER, AnswerGrammar, calls_of
from tests.support.tool_samples import read_with as read


@pytest.mark.parametrize(("source", "has_tools", "name"), cases(__file__, "templates", **vars(chat_samples)))
def test_the_format_is_found_in_the_template(source: str, has_tools: bool, name: str | None) -> None:
    form = detect(source, has_tools, False)
    assert (form and form.name) == name


def test_mistral_s_newer_form_is_written_where_its_mark_is_known() -> None:
    for source, has_args, writes_args in cases(__file__, "templates of Mistral"):
        for form in (detect(source, True, has_args), named("mistral", source, has_args)):
            assert form is not None and form.name == "mistral"
            assert ("[ARGS]" in form.before_arguments) is writes_args


def test_every_name_is_a_format_and_every_format_has_a_name() -> None:
    assert {named(name, "", False).name for name in formats.NAMES} == set(formats.NAMES)
    assert {*FORMS, "harmony"} >= {*formats.NAMES}
    assert set(formats.ALIASES.values()) <= {*formats.NAMES}


def test_an_entry_of_the_table_has_fields_of_its_kind_and_a_note_alone() -> None:
    for row in formats._ROWS:
        fields = {each.name for each in dataclasses.fields(formats._KINDS[row["kind"]])}
        assert row.keys() <= {*fields, "kind", "note"}, row["name"]


def test_the_marks_of_reasoning_are_found_in_the_template() -> None:
    for source, marks in cases(__file__, "templates with reasoning", **vars(chat_samples), thinking=thinking):
        assert thinking.detect(source) is marks


@pytest.mark.parametrize(("prompt", "is_open", "is_over"), cases(__file__, "ends of prompts"))
def test_the_end_of_the_prompt_says_where_the_answer_begins(prompt: str, is_open: bool, is_over: bool) -> None:
    assert thinking.thinking_after(thinking.THINK, prompt) == thinking.Thinking(thinking.THINK, is_open, is_over)


@pytest.mark.parametrize(("before", "begun", "is_open", "is_over"), cases(__file__, "begun messages"))
def test_a_continued_message_is_read_from_its_beginning(before: str, begun: str, is_open: bool, is_over: bool) -> None:
    for marks in (thinking.THINK, thinking.IMPLIED):
        assert thinking.thinking_after(marks, before + begun, begun) == thinking.Thinking(marks, is_open, is_over)


@pytest.mark.parametrize("regex", [".+", r"[^\n]{3,40}", ".{1,100}"])
def test_an_answer_of_any_text_begins_behind_the_reasoning(regex: str) -> None:
    """Where a mark is text, a wide pattern would take it, and the answer behind it could be empty."""
    held = AnswerGrammar((), None, StructuredOutputs(regex=regex), thinking.Thinking(thinking.THINK))
    assert held.verdict("<think>hm</think>") == "unfinished"
    for text in ("<think>hm</think>\n\nParis", "Paris", "<thin"):
        assert held.accepts(text), text
    choice = AnswerGrammar((), None, StructuredOutputs(choice=["yes"]), thinking.Thinking(thinking.THINK))
    assert choice.accepts("<think>hm</think>\n yes") and choice.accepts("yes") and choice.verdict(" yes") == ""


MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")


def lark(special: bool, *parts: Any) -> AnswerGrammar:
    return AnswerGrammar(MARKS if special else (), *parts)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.triggers])
def test_a_mark_that_is_a_token_cannot_be_spelled_out_in_free_text(name: str) -> None:
    mark = FORMATS[name].marks[0]
    for held in (lark(True, calls_of(name)), lark(True, calls_of(name), None, Thinking(THINK))):
        spelled = [*b"hello ", *mark.encode()]
        assert held.matcher.try_consume_tokens(spelled) == len(spelled) - 1


@pytest.mark.parametrize("mark", [THINK.close, *ENDS])
def test_a_mark_that_is_a_token_cannot_be_spelled_out_in_reasoning(mark: str) -> None:
    """The parsers would end the reasoning there."""
    form, opened = StructuredOutputs(choice=["yes"]), after_prompt("<|start|>assistant<|channel|>analysis<|message|>")
    if mark == THINK.close:
        held = lark(True, None, form, Thinking(THINK, is_open=True))
    else:
        held = AnswerGrammar(TOKENS, None, form, opened, build=messages_grammar)
    spelled = [*b"hello ", *mark.encode()]
    assert held.matcher.deep_copy().try_consume_tokens(spelled) == len(spelled) - 1


@SPECIAL
@pytest.mark.parametrize(("answer", "right", "wrong"), cases(__file__, "forms", StructuredOutputs=StructuredOutputs))
def test_a_form_holds_behind_the_reasoning(special: bool, answer: StructuredOutputs, right: str, wrong: str) -> None:
    for reasoning, before in cases(__file__, "reasoning before a form", **globals()):
        held = lark(special, None, answer, reasoning)
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


THOUGHT = "<|channel|>analysis<|message|>The weather < of Ulm.<|end|><|start|>assistant"
TO_TOOL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}'
TO_FIRST = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Ulm"}'
FINAL = "<|channel|>final<|message|>It rains."
CALLED = [("weather", '{"city": "Ulm"}')]


def calls(must: bool = False) -> Calls:
    return Calls(FORM, [WEATHER, CLOCK], must, many=False)


ANSWERS = dict(
    cases(__file__, "answers of gpt-oss", THOUGHT=THOUGHT, FINAL=FINAL, CALL=TO_TOOL, CALLED=CALLED, TO_FIRST=TO_FIRST)
)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("is_certain", [False, True])
def test_an_answer_is_the_same_however_it_is_cut(name: str, is_certain: bool) -> None:
    if is_certain and name in ("half of the arguments", "no arguments"):
        return
    text, expected = ANSWERS[name]
    rng = random.Random(1)
    start = after_prompt("… 2 + 2?<|end|><|start|>assistant")
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text)), min(len(text), rng.randint(0, 12)))) if text else []
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        reader = HarmonyReader(calls(), start, is_certain=is_certain)
        assert read(reader, pieces) == expected
        assert reader.has_called == bool(expected[2])
    assert read(HarmonyReader(calls(), start, is_certain=is_certain), list(text)) == expected


@pytest.mark.parametrize("length", [900, *range(1000, 1040), 1100])
def test_a_header_that_is_too_long_is_text_however_it_is_cut(length: int) -> None:
    text = f"<|channel|>analysis{' ' * length}<|message|>Ulm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    whole, *others = (
        read(HarmonyReader(None, after_prompt("<|start|>assistant"), is_certain=False), pieces)
        for pieces in ([text], list(text), [text[:1050], text[1050:]], [text[:1020], text[1020:1041], text[1041:]])
    )
    assert all(each == whole for each in others)
    assert (whole[0] == "Ulm.") == (length + len("<|channel|>analysis") <= MAX_FRAME_CHARS)


def test_arguments_stream_where_a_grammar_holds_the_model() -> None:
    reader = HarmonyReader(calls(must=True), after_prompt("<|start|>assistant"), is_certain=True)
    head, arguments = TO_TOOL.split("<|message|>")
    assert reader.feed(head) == [] and reader.feed("<|message|>") == [CallStart(0, "weather")]
    assert reader.feed('{"city"') == [Arguments(0, '{"city"')]
    assert not reader.has_called
    assert reader.feed(arguments[7:]) == [Arguments(0, arguments[7:])]
    assert reader.finish() == [] and reader.has_called


@pytest.mark.parametrize(("prompt", "text", "expected"), cases(__file__, "begun by the prompt"))
def test_a_begun_message_goes_on(prompt: str, text: str, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    assert read(HarmonyReader(None, after_prompt(prompt), is_certain=False), [text]) == expected


def held(special: bool, *parts: Any) -> AnswerGrammar:
    return AnswerGrammar(TOKENS if special else (), *parts, build=messages_grammar)


@SPECIAL
@pytest.mark.parametrize(
    ("channel", "parts", "right", "wrong"), cases(__file__, "begun messages of gpt-oss", **globals())
)
def test_a_begun_message_goes_on_before_what_a_grammar_asks_for(
    special: bool, channel: str, parts: tuple[Any, ...], right: str, wrong: str
) -> None:
    form = held(special, *parts, after_prompt(f"<|start|>assistant<|channel|>{channel}<|message|>It"))
    assert form.accepts(right) and form.refuses(wrong)


@SPECIAL
def test_a_required_call_is_the_only_end(special: bool) -> None:
    must = held(special, calls(must=True))
    for text in (TO_TOOL, THOUGHT + TO_TOOL, THOUGHT + TO_FIRST, TO_FIRST):
        assert must.accepts(text)
    assert must.verdict(THOUGHT) == "unfinished"
    assert must.verdict(THOUGHT + FINAL) == THOUGHT + "<|channel|>"
    for right, wrong in (("functions.weather", "functions.wether"), ("functions.weather", "weather"), ('"Ulm"', "7")):
        assert must.refuses(TO_TOOL.replace(right, wrong))


@SPECIAL
def test_an_answer_has_its_form_in_the_final_channel_behind_reasoning(special: bool) -> None:
    answer = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    final = '<|channel|>final<|message|>{"a": 1}'
    for tools in (None, calls()):
        form = held(special, tools, answer)
        assert form.accepts(final) and form.accepts(THOUGHT + final) and form.refuses(THOUGHT + FINAL)
    assert form.accepts(THOUGHT + TO_TOOL)
    assert held(special, calls()).accepts(THOUGHT + FINAL)
