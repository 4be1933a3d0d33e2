"""Chat templates: rendered as transformers renders them, errors that name what was wrong, and tools as text.

Hostile ones find no way out of the sandbox, and one that fails is reported as a fault of the messages.
"""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.front.hf_interface import messages_of
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.model_error import ModelError
from penstock.engine.model_files import ModelFiles
from penstock.engine.text.model_text import load_tokenizer
from penstock.engine.text.prompt import chat_prompt
from penstock.engine.text.template import ChatTemplate, load_template
from penstock.engine.text.tokenizer import Tokenizer
from tests.support import chat_samples
from tests.support import text_samples as samples
from tests.support.chat_samples import CALL, GEMMA, RESULT, SYSTEM, TOOLS, USER
from tests.support.refusals import cases, table

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = messages_of([USER])
ECHO = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"


@pytest.fixture(scope="module")
def transformers_render() -> Callable[..., str]:
    utils = import_module("transformers.utils.chat_template_utils")

    def render(source: str, messages: list[Any], **options: Any) -> str:
        texts, _ = utils.render_jinja_template([messages], chat_template=source, **SPECIAL, **options)
        return str(texts[0])

    return render


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"tools": chat_samples.TOOLS}])
@pytest.mark.parametrize("conversation", chat_samples.CONVERSATIONS)
@pytest.mark.parametrize("family", chat_samples.TEMPLATES)
def test_a_conversation_renders_as_in_transformers(
    transformers_render: Callable[..., str], family: str, conversation: str, options: dict[str, Any]
) -> None:
    source, messages = chat_samples.TEMPLATES[family], chat_samples.CONVERSATIONS[conversation]
    try:
        expected = transformers_render(source, messages, **options)
    except Exception as error:
        with pytest.raises(InvalidRequest, match="the model's chat template refuses them: .{10}"):
            ChatTemplate(source, SPECIAL).render(messages_of(messages), **options)
        assert str(error)
        return
    options = {"add_generation_prompt": False, **options}
    assert ChatTemplate(source, SPECIAL).render(messages_of(messages), **options) == expected


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen3", "gemma", "mistral"])
@pytest.mark.parametrize("words", ["I am", "I am ", "  I am\n\n", "<think>\nso\n</think>\n\nI"])
def test_answers_continue_as_in_transformers(transformers_render: Callable[..., str], family: str, words: str) -> None:
    messages = [chat_samples.USER, {"role": "assistant", "content": words}]
    source = chat_samples.TEMPLATES[family]
    expected = transformers_render(source, messages, continue_final_message=True)
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(source, SPECIAL).render(messages_of(messages), **options) == expected


@pytest.mark.parametrize("source", cases(__file__, "language"))
def test_the_language_is_that_of_transformers_environment(transformers_render: Callable[..., str], source: str) -> None:
    messages = chat_samples.CONVERSATIONS["one"]
    assert ChatTemplate(source, SPECIAL).render(messages_of(messages)) == transformers_render(source, messages)


def seen(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as a template gets them."""
    return [json.loads(line) for line in ChatTemplate(ECHO).render(messages_of(messages)).splitlines()]


def test_text_parts_become_one_string_and_nothing_becomes_an_empty_one() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[Any] = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "user"}]
    assert [message["content"] for message in seen(messages)] == ["a\nb", "", ""]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_read_under_each_of_its_names(name: str) -> None:
    [message] = seen([{"role": "assistant", "content": "x", name: "because", "mood": ["good"], "weight": None}])
    assert message["reasoning_content"] == message["thinking"] == "because"
    assert message["mood"] == ["good"] and "weight" not in message, "other entries reach a template as they are"


def test_the_caller_s_messages_are_not_changed() -> None:
    messages = [USER, CALL, {"role": "assistant", "content": "b"}]
    before = json.dumps(messages)
    ChatTemplate(ECHO).render(messages_of(messages), add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
REFUSED = [(ECHO, messages, {}, *rest) for messages, *rest in table(__file__, "messages")]
REFUSED += [(ECHO, [USER], options, *rest) for options, *rest in table(__file__, "options")]
REFUSED += [(source, [USER, last], CONTINUED, *rest) for source, last, *rest in table(__file__, "not continued")]


@pytest.mark.parametrize(("source", "messages", "options", "field", "sentence"), REFUSED)
def test_a_malformed_message_or_option_is_named(
    source: str, messages: Any, options: Any, field: str, sentence: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, SPECIAL).render(messages_of(messages), **options)
    assert caught.value.field == field
    assert sentence in str(caught.value)


def model(path: Path, **files: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(ModelFiles("m", samples.folder(path, samples.byte_level(), **files), "hf"))


def test_tools_select_the_template_made_for_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    template = load_template(model(tmp_path, tokenizer_config={"chat_template": named}))
    assert template is not None
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=chat_samples.TOOLS) == "with tools"


def test_a_model_without_a_template_has_none_unless_the_operator_gives_one(tmp_path: Path) -> None:
    tokenizer = model(tmp_path, tokenizer_config={"bos_token": "<s>"})
    assert load_template(tokenizer) is None
    (tmp_path / "own.jinja").write_text("{{ bos_token }}!")
    for override in (str(tmp_path / "own.jinja"), "{{ bos_token }}!"):
        template = load_template(tokenizer, override)
        assert template is not None and template.render(HELLO) == "<s>!"


def test_an_operator_s_template_that_is_neither_file_nor_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "long").write_text("x" * ((1 << 20) + 1))
    for override, sentence in table(__file__, "templates of operators", path=tmp_path):
        with pytest.raises(ModelError, match=sentence):
            load_template(model(tmp_path), override)


def test_the_operator_s_variables_hold_unless_a_request_sets_them(tmp_path: Path) -> None:
    tokenizer, source = model(tmp_path), "{{ level }} {{ documents }}"
    plain, template = load_template(tokenizer, source), load_template(tokenizer, source, {"level": 1, "documents": [2]})
    assert plain is not None and template is not None
    assert chat_prompt(template, HELLO) == "1 [2]"
    assert chat_prompt(template, HELLO, chat_template_kwargs={"level": 3}, documents=[]) == "3 []"
    assert template.digest != plain.digest == ChatTemplate(source, tokenizer.special_tokens, {}).digest


@pytest.mark.parametrize(("defaults", "source", "words"), table(__file__, "defaults"))
def test_a_bad_default_is_refused(tmp_path: Path, defaults: dict[str, Any], source: str | None, words: str) -> None:
    tokenizer = model(tmp_path, tokenizer_config={"bos_token": "<s>"})
    with pytest.raises(ModelError, match=f"^default_chat_template_kwargs: {words}"):
        load_template(tokenizer, source, defaults)


@pytest.mark.parametrize(("source", "expected"), cases(__file__, "arguments"))
def test_arguments_are_text_where_a_template_prints_them_as_they_are(source: str, expected: str) -> None:
    template = ChatTemplate("{% for call in messages[0].tool_calls %}" + source + "{% endfor %}{{ tools }}")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "ü", "b": true}'}}
    chat = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert template.render(messages_of(chat)).removesuffix("None") == expected


@pytest.mark.parametrize(("source", "roles", "expected"), cases(__file__, "system messages", chat_samples=chat_samples))
def test_no_developer_or_second_system_message_is_lost(source: str, roles: str, expected: str) -> None:
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": str(place)} for place, role in enumerate(roles)]
    assert ChatTemplate(source, SPECIAL).render(messages_of(messages), add_generation_prompt=False) == expected


LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def rendered(messages: list[Any], source: str = LINES, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": ""}).render(messages_of(messages), tools_as_text=True, **options)


def test_functions_stand_in_the_system_message_or_before_the_first_text() -> None:
    with_system = rendered([SYSTEM, USER], tools=TOOLS)
    assert with_system.startswith("system: Be brief.") and with_system.index('"weather"') < with_system.index("user:")
    without = rendered([USER], tools=TOOLS)
    assert without.startswith("user: ") and without.index('"weather"') < without.index("Hello")
    assert '"weather"' in rendered([USER], GEMMA, tools=TOOLS), "a template that takes no system message gets none"


def test_calls_and_results_become_text_and_results_in_a_row_one_message() -> None:
    assert "</tool_response>\n Hello" in rendered([USER, CALL, RESULT, USER], GEMMA), "with what the user adds to them"
    text = rendered([USER, CALL, RESULT, RESULT])
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>' in text
    assert text.count("user: ") == 2 and text.count('<tool_response>\n{"°C": 7}\n</tool_response>') == 2
    assert "tool: " not in text


FAILS = dict(cases(__file__, "templates that fail"))


@pytest.mark.parametrize(("source", "message"), FAILS.values(), ids=FAILS)
def test_a_template_that_reaches_out_works_without_end_or_refuses_fails_in_bounded_words(
    source: str | dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        ChatTemplate(source).render(HELLO)
    assert caught.value.field == "messages" and len(str(caught.value)) < 400


@pytest.mark.parametrize("source", cases(__file__, "undefined"))
def test_names_that_a_template_may_not_see_are_undefined(source: str) -> None:
    assert ChatTemplate(source).render(HELLO) in ("", "[Undefined]")


@pytest.mark.parametrize(("source", "sentence"), cases(__file__, "not compiled"))
def test_a_template_that_does_not_compile_is_refused_when_it_is_loaded(source: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=f"chat template 'default'.*{sentence}"):
        ChatTemplate(source)


@pytest.mark.parametrize("source", cases(__file__, "endless"))
def test_a_template_that_takes_too_long_is_ended_and_named(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.text.render_time.RENDER_S", 0.2)
    template = ChatTemplate(source)
    with pytest.raises(InvalidRequest, match="chat template takes longer than 0.2 s to render them"):
        template.render(HELLO)
