"""The format of calls that a model was trained on is detected in its chat template, and so are its marks of reasoning."""

import dataclasses

import pytest

from penstock.engine.sampling_params import StructuredOutputs
from penstock.engine.text.tools import formats, thinking
from penstock.engine.text.tools.formats import detect, named
from tests.support.call_writers import FORMS
from tests.support.chat_samples import CHATML, LLAMA3, QWEN3
from tests.support.refusals import cases
from tests.support.tool_samples import AnswerGrammar


@pytest.mark.parametrize(
    ("source", "has_tools", "name"), cases(__file__, "templates", CHATML=CHATML, QWEN3=QWEN3, LLAMA3=LLAMA3)
)
def test_the_format_is_found_in_the_template(source: str, has_tools: bool, name: str | None) -> None:
    form = detect(source, has_tools, False)
    assert (form and form.name) == name


def test_mistral_s_newer_form_is_written_where_its_mark_is_known() -> None:
    for source, has_args, writes_args in (
        ("[TOOL_CALLS]", False, False),
        ("[TOOL_CALLS][ARGS]", False, True),
        ("[TOOL_CALLS]", True, True),
    ):
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
    assert thinking.detect(QWEN3) == thinking.THINK
    assert thinking.detect("{{ x.split('</think>') }}") == thinking.THINK
    assert thinking.detect("[SYSTEM_PROMPT][THINK]") == thinking.MISTRAL
    assert thinking.detect(CHATML) is None


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
