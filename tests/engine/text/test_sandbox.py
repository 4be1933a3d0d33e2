"""Hostile chat templates find no way out of the sandbox, and one that fails is reported as a fault of the messages."""

import pytest

from penstock.engine.model_files import ModelRefused
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]

ESCAPES = {
    "a class": "{{ ''.__class__.__mro__ }}",
    "a class of the messages": "{{ messages.__class__.__base__.__subclasses__() }}",
    "changing the messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'system'}) }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "globals of a class": "{{ namespace.__init__.__globals__ }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f._environment.filters }}",
    "the context": "{{ self._TemplateReference__context.parent }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import '/etc/passwd' as x %}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_a_template_that_reaches_out_fails(source: str) -> None:
    with pytest.raises(InvalidRequest, match="SecurityError|UndefinedError|no loader"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ messages['__class__'] }}",
        "{{ ['x'] | map(attribute='__class__') | list }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self._TemplateReference__context }}",
    ],
)
def test_what_a_template_may_not_see_is_undefined(source: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) in ("", "[Undefined]")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for %}", "Expected an expression"),
        ("{{ 1 | nothing }}", "No filter named 'nothing'"),
        ("{% if a %}" * 2000 + "{% endif %}" * 2000, "recursion"),
        ("{% for i in a %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("x" * ((1 << 20) + 1), "1048577 characters; at most 1048576"),
    ],
)
def test_a_template_that_does_not_compile_is_refused_when_it_is_loaded(source: str, sentence: str) -> None:
    with pytest.raises(ModelRefused, match=f"chat template 'default'.*{sentence}"):
        ChatTemplate(source)


def test_endless_recursion_ends() -> None:
    with pytest.raises(InvalidRequest, match="RecursionError"):
        ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").render(MESSAGES)


def test_a_range_beyond_the_sandbox_s_own_limit_fails() -> None:
    with pytest.raises(InvalidRequest, match="OverflowError: Range too big"):
        ChatTemplate("{% for i in range(10 ** 9) %}{% endfor %}").render(MESSAGES)
