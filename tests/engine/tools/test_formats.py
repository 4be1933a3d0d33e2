"""Which format a model was trained on, from what its chat template says."""

import pytest

from penstock.engine.grammar.tool_calls import grammar
from penstock.engine.text.tools import formats, thinking
from penstock.engine.text.tools.formats import detect, named
from tests.support.chat_samples import CHATML, LLAMA3, QWEN3
from tests.support.tool_samples import CALL, FORMATS


@pytest.mark.parametrize(
    ("source", "has_tools", "name"),
    [
        (CHATML, False, "hermes"),
        (QWEN3, True, "hermes"),
        (LLAMA3, True, "llama3_json"),
        ("{% for t in tools %}<|python_tag|>", True, "llama3_json"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", True, "mistral"),
        ('{{ tools }} like ```json\n{"name": "f", "arguments": {}}\n```', True, "qwen2_5_coder"),
        ("{{ tools }}<｜tool▁sep｜>f\n```json\n", True, None),
        ("{{ tools }}<tool_call>\n<function=f>", True, None),
        ("{{ tools }}<tool_call>f\n<arg_key>", True, None),
        ("{{ tools }}<｜tool▁calls▁begin｜>", True, None),
        ("Respond in the format [f(x=1)] {{ tools }}<|eot_id|>", True, None),
    ],
)
def test_the_format_is_found_in_the_template(source: str, has_tools: bool, name: str | None) -> None:
    found = detect(source, has_tools, False)
    assert (None if found is None else found.name) == name


def test_mistral_s_newer_form_is_written_where_its_mark_is_known() -> None:
    for source, has_args, writes_args in (
        ("[TOOL_CALLS]", False, False),
        ("[TOOL_CALLS][ARGS]", False, True),
        ("[TOOL_CALLS]", True, True),
    ):
        for found in (detect(source, True, has_args), named("mistral", source, has_args)):
            assert found is not None and found.name == "mistral"
            assert ("[ARGS]" in found.written.before_arguments) is writes_args


def test_every_name_is_a_format_and_every_format_has_a_name() -> None:
    assert {named(name, "", False).name for name in formats.NAMES} == set(formats.NAMES)
    assert {form.name for form in FORMATS.values()} == set(formats.NAMES)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_is_made_to_write_is_what_it_is_read_from(name: str) -> None:
    written = FORMATS[name].written
    arguments = '{"city": "Ulm"}'
    call = f"{written.before_name}weather{written.before_arguments}{arguments}{written.after_arguments}"
    assert written.start + call + written.end == CALL[name]


def test_the_marks_of_reasoning_are_found_in_the_template() -> None:
    assert thinking.detect(QWEN3) == thinking.THINK
    assert thinking.detect("{{ x.split('</think>') }}") == thinking.THINK
    assert thinking.detect("[SYSTEM_PROMPT][THINK]") == thinking.MISTRAL
    assert thinking.detect(CHATML) is None


@pytest.mark.parametrize(
    ("prompt", "is_open", "is_over"),
    [
        ("<|im_start|>assistant\n", False, False),
        ("assistant\n<think>", True, False),
        ("assistant\n<think>\n", True, False),
        ("assistant\n<think>\n\n</think>\n\n", False, True),
    ],
)
def test_the_end_of_the_prompt_says_where_the_answer_begins(prompt: str, is_open: bool, is_over: bool) -> None:
    assert thinking.thinking_after(thinking.THINK, prompt) == thinking.Thinking(thinking.THINK, is_open, is_over)


def test_a_grammar_is_for_calls_or_for_an_answer() -> None:
    with pytest.raises(AssertionError):
        grammar({})
