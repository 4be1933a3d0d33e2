"""Hostile chat templates: no way out of the sandbox, and no way to keep the server busy or fill its memory."""

import resource

import pytest

from penstock.engine.model_files import ModelRefused
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.text import budget
from penstock.engine.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]

GROW = "{%% set ns = namespace(x='aa') %%}{%% for i in range(100) %%}{%% set ns.x = %s %%}{%% endfor %%}"

SPENDTHRIFTS = {
    "nested loops without output": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops that skip all": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops with the counter's name taken": "{% set tick = 1 %}{% set environment = 1 %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion that doubles": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "constant output": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "capture": "{% set x %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endset %}",
    "capture of constants": "{% set x %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
    "repetition": "{{ 'x' * 10 ** 10 }}",
    "repetition of a list": "{{ 10 ** 10 * [1] }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "products": GROW.replace("'aa'", "9") % "ns.x * ns.x",
    "doubling by ~": GROW % "ns.x ~ ns.x",
    "doubling by +": GROW % "ns.x + ns.x",
    "doubling lists": GROW.replace("'aa'", "[1]") % "ns.x + ns.x",
    "doubling by a join": GROW % "[ns.x, ns.x] | join(ns.x)",
    "doubling by a method join": GROW % "ns.x.join([ns.x, ns.x])",
    "doubling by replace": GROW % "ns.x | replace('a', ns.x)",
    "doubling by a method replace": GROW % "ns.x.replace('a', ns.x)",
    "doubling by %": GROW % "'%%s%%s' % (ns.x, ns.x)".replace("%%", "%"),
    "doubling by format": GROW % "'%s%s' | format(ns.x, ns.x)",
    "width": "{{ '%1000000000d' % 1 }}",
    "width as an argument": "{{ '%*d' | format(1000000000, 1) }}",
    "precision": "{{ '%.1000000000f' % 1 }}",
    "indent": "{{ 'a\nb' | indent(10 ** 9) }}",
    "indent of JSON": "{{ [1] | tojson(indent=10 ** 9) }}",
    "separator of JSON": "{{ [1, 2] | tojson(separators=('x' * 10 ** 6, ':')) }}",
    "long dates": "{{ strftime_now('%Y' * 1000) }}",
}

ESCAPES = {
    "a class": "{{ ''.__class__.__mro__ }}",
    "a class of the messages": "{{ messages.__class__.__base__.__subclasses__() }}",
    "a method of an integer": "{{ (1).to_bytes(1000000000) }}",
    "padding": "{{ 'x'.ljust(10 ** 9) }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "changing the messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'system'}) }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "globals of a class": "{{ namespace.__init__.__globals__ }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f._environment.filters }}",
    "the context": "{{ self._TemplateReference__context.parent }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import '/etc/passwd' as x %}",
}


@pytest.mark.parametrize("source", SPENDTHRIFTS.values(), ids=SPENDTHRIFTS)
def test_a_template_that_spends_too_much_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_CPU_S", 0.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match="messages: the model's chat template was stopped: "):
        ChatTemplate(source).render(MESSAGES)
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown_bytes < 600 << 20


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_a_template_that_reaches_out_fails(source: str) -> None:
    with pytest.raises(InvalidRequest, match="SecurityError|UndefinedError|no loader"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ messages['__class__'] }}",
        "{{ ['x'] | map(attribute='__class__') | list }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ lipsum }}{{ cycler }}{{ joiner }}",
    ],
)
def test_what_a_template_may_not_see_is_undefined(source: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) in ("", "[Undefined]")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for %}", "Expected an expression"),
        ("{{ 1 | center(10) }}", "No filter named 'center'"),
        ("{{ '' | attr('__class__') }}", "No filter named 'attr'"),
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


def test_a_long_conversation_is_far_from_the_limits() -> None:
    source = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.t }}"
    )
    messages = [{"role": "user", "content": "x" * 1000}] * 5000
    assert len(ChatTemplate(source).render(messages)) == 5_000_000


def test_one_rendering_does_not_spend_another_s_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_STEPS", 100)
    template = ChatTemplate("{% for i in range(60) %}{% endfor %}ok")
    assert [template.render(MESSAGES) for _ in range(3)] == ["ok"] * 3
