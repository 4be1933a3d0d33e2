"""The Jinja environment in which chat templates run.

A template comes with a model, from anyone, and runs in the server with every user's messages. Jinja's immutable
sandbox keeps it from Python's internals; this one also bounds what it may spend:

- loop rounds and calls (macros recurse) together, and at each of them the thread's CPU time;
- the length of every text or list that operators, joins, captures and the output build, and the size of numbers;
- all that is printed, into macros and captures too.

Filters and methods are lists of what is allowed, without those that pad or repeat to a length. Not bounded is the
work inside one operation on values that a template has nested into themselves on purpose (`[x, x]` forty times
over, then compared), nor memory other than by the CPU time it takes to fill it. The remedy for a model whose
author is not trusted is an operator's own template.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, nodes, pass_context, pass_eval_context
from jinja2.ext import Extension
from jinja2.filters import FILTERS, do_indent, do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from penstock.engine.text import budget

BUDGET = "render budget"  # where a rendering's context keeps it: a name that no template can write

# fmt: off
FILTER_NAMES = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "int",
    "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe",
    "select", "selectattr", "sort", "string", "title", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
)
STRING_METHODS = frozenset((
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "isidentifier", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
    "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip",
    "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
))
# fmt: on
METHODS: dict[type, frozenset[str]] = {
    str: STRING_METHODS,
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    int: frozenset(),
    float: frozenset(),
}


class Refused(TemplateError):
    """The template itself says that it cannot render these messages."""


class Sandbox(ImmutableSandboxedEnvironment):
    """What chat templates expect of transformers' environment, within bounds."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # Without the optimizer nothing is computed while compiling, where no budget applies.
        extensions: list[Any] = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions, finalize=_count_printed
        )
        ours = {"tojson": _tojson, "indent": _indent, "join": _join, "replace": _replace, "format": _format}
        self.filters = {name: FILTERS[name] for name in FILTER_NAMES} | ours
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _dict}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(Parser(self, source, name, filename).parse())
        return tree

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Jinja's hook for joining pieces of output, also of macros and `{% set %}` blocks."""
        pieces, length = [], 0
        for part in parts:
            pieces.append(part)
            length += len(part)
            budget.check_length(length)
        return "".join(pieces)

    @staticmethod
    def tick() -> bool:
        """Called in every loop round; `call` counts it."""
        return True

    @staticmethod
    def join_texts(*values: object) -> str:
        """The operator ~."""
        return Sandbox.concat(map(str, values))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The names are Jinja's, so that a template's keyword arguments cannot collide with them.
        __context.parent[BUDGET].step()
        if __obj is Sandbox.tick:
            return True
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            if __obj.__name__ == "join" and args:
                args = ([*args[0]], *args[1:])
                budget.check_join(__obj.__self__, args[0])
            elif __obj.__name__ == "replace" and len(args) >= 2:
                budget.check_replace(__obj.__self__, *args[:2])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget.BINOP_CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, _value: Any) -> Callable[..., str] | None:
        return None  # str.format is not among METHODS: its widths and repeated fields have no bound


@pass_context
def _count_printed(context: Context, value: object) -> str:
    """What `{{ value }}` prints, before Jinja collects it."""
    text = str(value)
    context.parent[BUDGET].print(len(text))
    return text


class _Counting(NodeTransformer):
    """Puts a counted call into every loop, and routes ~ through `join_texts`. Both are attributes of the environment,
    which no variable of a template can shadow."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick"), lineno=node.lineno))
        if node.test is not None:  # rounds that a loop's own condition skips count too
            node.test = nodes.And(_call("tick"), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("join_texts", node.nodes)


class _Generation(Extension):
    """`{% generation %}` marks an assistant's words for training; for serving it only groups."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it of an instance

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _call(attribute: str, arguments: list[nodes.Expr] | None = None) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(attribute), arguments or [], [], None, None)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON as transformers has it; Jinja's own escapes it for HTML."""
    budget.check_indent(indent)
    for separator in separators or ():
        budget.check_indent(separator)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    budget.check_indent(width)
    budget.check_length(len(text) + text.count("\n") * budget.MAX_INDENT)
    return do_indent(text, width, first, blank)


@pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items, separator = [*value], str(d)
    budget.check_join(separator, items)
    joined: str = do_join(context, items, separator, attribute)
    return joined


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    before = str(text)
    budget.check_replace(before, old, new)
    return before.replace(old, new, -1 if count is None else count)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    values = kwargs or args
    budget.check_format(text, values)
    return text % values


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 200:
        raise budget.TooMuch("a date format of more than 200 characters")
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
