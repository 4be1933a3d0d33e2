"""Hostile chat templates find no way out of the sandbox, and one that fails is reported as a fault of the messages."""

import pytest

from penstock.engine.front.python_messages import messages_of
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.model_error import ModelError
from penstock.engine.text.template import ChatTemplate
from tests.support.refusals import cases

MESSAGES = messages_of([{"role": "user", "content": "hi"}])

ESCAPES = dict(cases(__file__, "escapes"))


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_a_template_that_reaches_out_fails(source: str) -> None:
    with pytest.raises(InvalidRequest, match="SecurityError|UndefinedError|no loader"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize("source", cases(__file__, "undefined"))
def test_names_that_a_template_may_not_see_are_undefined(source: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) in ("", "[Undefined]")


@pytest.mark.parametrize(("source", "sentence"), cases(__file__, "not compiled"))
def test_a_template_that_does_not_compile_is_refused_when_it_is_loaded(source: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=f"chat template 'default'.*{sentence}"):
        ChatTemplate(source)


def test_endless_recursion_ends() -> None:
    with pytest.raises(InvalidRequest, match="RecursionError"):
        ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").render(MESSAGES)


@pytest.mark.parametrize("source", cases(__file__, "endless"))
def test_a_template_that_takes_too_long_is_ended_and_named(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.text.render_time.RENDER_S", 0.2)
    template = ChatTemplate(source)
    with pytest.raises(InvalidRequest, match="chat template takes longer than 0.2 s to render them"):
        template.render(MESSAGES)


@pytest.mark.parametrize("source", cases(__file__, "large"))
def test_a_single_operation_of_a_template_cannot_take_long(source: str) -> None:
    with pytest.raises(InvalidRequest, match="OverflowError: a (power|repetition) of more than"):
        ChatTemplate(source).render(MESSAGES)


def test_a_range_beyond_the_sandbox_s_own_limit_fails() -> None:
    with pytest.raises(InvalidRequest, match="OverflowError: Range too big"):
        ChatTemplate("{% for i in range(10 ** 9) %}{% endfor %}").render(MESSAGES)
