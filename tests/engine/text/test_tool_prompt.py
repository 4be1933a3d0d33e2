"""Tools written as text, for templates that know none."""

from typing import Any

from penstock.engine.text.template import ChatTemplate
from tests.support.chat_samples import CALL, GEMMA, RESULT, SYSTEM, TOOLS, USER

LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def rendered(messages: list[Any], source: str = LINES, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": ""}).render(messages, tools_as_text=True, **options)


def test_functions_stand_in_the_system_message_or_before_the_first_text() -> None:
    with_system = rendered([SYSTEM, USER], tools=TOOLS)
    assert with_system.startswith("system: Be brief.") and with_system.index('"weather"') < with_system.index("user:")
    without = rendered([USER], tools=TOOLS)
    assert without.startswith("user: ") and without.index('"weather"') < without.index("Hello")


def test_a_template_that_takes_no_system_message_gets_none() -> None:
    assert '"weather"' in rendered([USER], GEMMA, tools=TOOLS)


def test_calls_and_results_become_text_and_results_in_a_row_one_message() -> None:
    text = rendered([USER, CALL, RESULT, RESULT])
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>' in text
    assert text.count("user: ") == 2 and text.count('<tool_response>\n{"°C": 7}\n</tool_response>') == 2
    assert "tool: " not in text


def test_a_conversation_without_tools_stays_as_it_is() -> None:
    plain = ChatTemplate(LINES)
    assert rendered([SYSTEM, USER]) == plain.render([SYSTEM, USER])


def test_without_being_asked_a_template_is_given_what_it_was_given_before() -> None:
    assert "weather" not in ChatTemplate(LINES).render([USER], tools=TOOLS)
