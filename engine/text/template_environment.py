"""The Jinja environment in which chat templates run, with the same extensions, filters and globals as in transformers.

A template comes with a model, so it runs in Jinja's immutable sandbox, which blocks access to Python internals. It does
not limit a template's time or memory: an operator who trusts a model's weights also trusts its template.
"""

import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Refused(TemplateError):
    """Raised when a template calls `raise_exception` because it cannot render the messages."""


class _Generation(Extension):
    """The tag `{% generation %}`, which marks assistant text for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def template_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return the value as plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
