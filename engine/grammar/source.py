"""From what a request asks for to a grammar that llguidance compiles. Cheap: a look at shape and size, no compiling.

Whitespace between JSON's tokens is bounded (a space, or a line break with its indent). Where it is free, a hot
model can write blanks until its tokens are used up, and nothing that it wrote is JSON then.
"""

import json
from collections.abc import Collection
from typing import Any

import msgspec
from llguidance import LLMatcher

from penstock.engine.grammar.json_schema import ESCAPES, WHITESPACE, prepared
from penstock.engine.grammar.tags import tags_source
from penstock.engine.sampling_params import InvalidRequest, StructuredOutputs, check_depth


def grammar_source(wanted: StructuredOutputs, special_tokens: Collection[str] = (), field: str | None = None) -> str:
    """The grammar's text. `special_tokens` are those of the tokenizer, for tags that begin with one; `field` is what
    the user called the value, if not by its name in `wanted`."""
    wanted.check(field)
    kind, field = wanted.kind, field or wanted.field
    value = getattr(wanted, kind)
    if kind == "json":
        return json_source(value, field, wanted.coerce_one_of)
    if kind == "json_object":
        return json_source({"type": "object"}, field)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, dict.fromkeys(value))))
    if kind == "grammar":
        if "::=" in value:
            raise InvalidRequest(field, "this looks like GBNF or EBNF; a Lark grammar with a rule 'start' is expected")
        return LLMatcher.grammar_from_lark(value)
    return LLMatcher.grammar_from_lark(tags_source(parsed(value, field), special_tokens, field, wanted.coerce_one_of))


def json_source(schema: str | dict[str, Any] | bool, field: str, coerce_one_of: bool = False) -> str:
    schema = parsed(schema, field)
    if schema is False:
        raise InvalidRequest(field, "the schema 'false' accepts no answer at all")
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest(field, f"{type(schema).__name__} given; a JSON schema is an object, true or false")
    schema = prepared(schema, field, coerce_one_of=coerce_one_of)
    try:
        return LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest(field, f"the schema cannot be read: {error}") from None


def parsed(value: str | dict[str, Any] | bool, field: str) -> Any:
    """JSON that was given as text."""
    if not isinstance(value, str):
        return value
    try:
        found = msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise InvalidRequest(field, f"not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest(field, "the JSON is nested too deeply") from None
    if isinstance(found, (dict, list)):
        check_depth(field, found)
    return found
