"""Every field that the official packages can send to the agents' APIs is served, refused by its name, or ignored and named in
a header: walked along the packages' own types of parameters."""

import importlib
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

import pytest
from typing_extensions import get_type_hints, is_typeddict

from penstock.engine.server.agents.items_schema import NOT_SERVED, ResponsesRequest
from penstock.engine.server.agents.messages_schema import NOT_SERVED as NOT_SERVED_MESSAGES
from penstock.engine.server.agents.messages_schema import MessagesRequest
from penstock.engine.server.requests import OTHER_FIELDS
from tests.support.refusals import hardest
from tests.support.running_server import MODEL, Running

DEPTH = 2  # fields within fields
CREATE: dict[str, Any] = {"model": MODEL, "input": "Hi"}
MESSAGE: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
COUNT = {name: value for name, value in MESSAGE.items() if name != "max_tokens"}

# The package's type, the route, and a request that is complete without its field.
WALKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "responses": ("openai.types.responses.response_create_params:ResponseCreateParamsBase", "/v1/responses", CREATE),
    "messages": ("anthropic.types.message_create_params:MessageCreateParamsBase", "/v1/messages", MESSAGE),
    "count_tokens": (
        "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
        "/v1/messages/count_tokens",
        COUNT,
    ),
}
# Fields that the server knows.
READ = {*ResponsesRequest.__struct_fields__, *MessagesRequest.__struct_fields__, *OTHER_FIELDS.harmless}
READ |= {*NOT_SERVED, *NOT_SERVED_MESSAGES}
# What goes with a field, where it has no sense alone.
BESIDE = {"stream_options": {"stream": True}, "tool_choice": {}}


def fields_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def plain(kind: Any) -> Any:
    """Without Required, NotRequired and Annotated, and of a type alias what it stands for."""
    while get_origin(kind) in (Required, NotRequired, Annotated):
        kind = get_args(kind)[0]
    return kind


def values(kind: Any, depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Values of a type, each with the place in it that it is about: every member of a union, every field of an object."""
    kind = plain(kind)
    origin, args = get_origin(kind), get_args(kind)
    if kind is type(None):
        yield "", None
    elif origin is Literal:
        yield from (("", value) for value in args)
    elif origin in (Union, types.UnionType):
        for member in args:
            yield from values(member, depth)
    elif is_typeddict(kind):
        base = {name: first(field) for name, field in fields_of(kind).items() if name in kind.__required_keys__}
        yield "", base
        for name, field in fields_of(kind).items() if depth else ():
            for place, value in values(field, depth - 1):
                yield f".{name}{place}", {**base, name: value}
    elif origin is not None and (origin in (list, Iterable, Sequence) or "SequenceNotStr" in str(origin)):
        for place, value in values(args[0], depth):
            yield f"[0]{place}", [value]
    elif kind in (str, int, float, bool):
        yield "", {str: "x", int: 1, float: 0.5, bool: True}[kind]
    elif "IO[" in str(kind) or "PathLike" in str(kind):
        yield "", "x"  # a file, which travels as base64
    elif hasattr(kind, "model_fields"):
        yield "", {"type": "text", "text": "x"}  # a part of an answer, sent back
    else:
        assert origin is dict or kind in (object, Any), f"{kind} is a new kind"
        yield "", {}


def first(kind: Any) -> Any:
    return next(values(kind, 0))[1]


@pytest.mark.parametrize("name", hardest(WALKS, "responses"))
def test_each_field_of_the_package_is_served_refused_or_named_as_ignored(server: Running, name: str) -> None:
    where, path, base = WALKS[name]
    module, _, kind = where.partition(":")
    package = pytest.importorskip(module.partition(".")[0], reason="the package is not installed")
    del package
    server.engine.reply = "Hi."
    num_served, num_refused = 0, 0
    for field, sort in fields_of(getattr(importlib.import_module(module), kind)).items():
        if field == "model":
            continue
        found = list(values(sort))
        for place, value in found[:: len(found) // 150 + 1]:  # some are unions of dozens of objects of dozens of fields
            body = {**base, **BESIDE.get(field, {}), field: value}
            answer = server.post(path, body)
            if answer.status_code == 200:
                num_served += 1
                ignored = answer.headers.get("x-penstock-ignored", "")
                assert field in READ or field in ignored or (field == "tools" and "tools:" in ignored), (field, value)
                continue
            num_refused += 1
            error = answer.json()["error"]
            assert answer.status_code in (400, 404), (field, place, value, answer.text)
            top = (error["param"] or "").partition(".")[0].partition("[")[0]
            assert top == field, (field, place, value, error)
            assert error["message"].startswith(error["param"]), error
    assert num_served > 1 and num_refused > 1, (num_served, num_refused)
