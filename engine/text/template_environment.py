"""The Jinja environment in which chat templates run, with the same extensions, filters and globals as in transformers.

A template comes with a model, so it runs in Jinja's immutable sandbox, which blocks access to Python internals. The time
of its loops and macros is limited (render_time.py), and so is the size of powers and repetitions, which C code computes
in one go. Its memory is not limited: an operator who trusts a model's weights also trusts its template.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.engine.http.errors import clip
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.model_error import ModelError
from penstock.engine.text.render_time import RenderTimeout, tick
from penstock.engine.text.tokenizer import MAX_TEMPLATE_BYTES

MAX_ERROR_CHARS = 300
MAX_REPEATED = 1 << 20  # elements of a repeated text or list
MAX_POWER_BITS = 1 << 12
# Errors that a template may raise for unexpected messages, including Jinja's own.
FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


class Refused(TemplateError):
    """Raised when a template calls `raise_exception` because it cannot render the messages."""


class _Generation(Extension):
    """The tag `{% generation %}`, which marks assistant text for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _TickingGenerator(CodeGenerator):
    """Generates code that calls `environment.tick` at the beginning of each loop iteration and each macro call."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        # The code has an attribute as it is named. A call node would go through the sandbox, which takes ten times as long.
        tick = nodes.ExprStmt(nodes.EnvironmentAttribute("tick()"))
        for repeated in [*node.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]:
            repeated.body.insert(0, tick)  # type: ignore[attr-defined]
        super().visit_Template(node, frame)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _TickingGenerator
    intercepted_binops = frozenset(("*", "**"))
    tick = staticmethod(tick)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        is_power = operator == "**" and isinstance(left, int) and isinstance(right, int)
        if is_power and left.bit_length() * right > MAX_POWER_BITS:
            raise OverflowError(f"a power of more than {MAX_POWER_BITS} bits")
        for times, repeated in ((left, right), (right, left)) if operator == "*" else ():
            if isinstance(times, int) and isinstance(repeated, Sequence) and times * len(repeated) > MAX_REPEATED:
                raise OverflowError(f"a repetition of more than {MAX_REPEATED} elements")
        return super().call_binop(context, operator, left, right)


def compile_templates(sources: Mapping[str, str]) -> dict[str, Callable[[dict[str, Any]], str]]:
    """Return a function for each template, by name, that renders it with the given variables. Compiling raises
    ModelError, rendering InvalidRequest."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return {name: partial(_render, _compile(environment, name, source)) for name, source in sources.items()}


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return the value as plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _compile(environment: ImmutableSandboxedEnvironment, name: str, source: str) -> Template:
    if len(source) > MAX_TEMPLATE_BYTES:
        raise ModelError(f"chat template {name!r}: {len(source)} characters; at most {MAX_TEMPLATE_BYTES} are allowed")
    try:
        return environment.from_string(source)
    except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ModelError(
            f"chat template {name!r} does not compile: {_short(error)}; give another one with --chat-template"
        ) from None


def _render(template: Template, variables: dict[str, Any]) -> str:
    try:
        return template.render(variables)
    except RenderTimeout:
        raise
    except Refused as error:
        raise InvalidRequest("messages", f"the model's chat template refuses them: {_short(error)}") from None
    except FAULTS as error:
        raise InvalidRequest(
            "messages", f"the model's chat template cannot render them: {type(error).__name__}: {_short(error)}"
        ) from None


def _short(error: BaseException) -> str:
    return clip(str(error), MAX_ERROR_CHARS)
