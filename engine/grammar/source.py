"""Builds the grammar for a request's structured_outputs. Checks shape and size, but does not compile the grammar.

Whitespace between JSON tokens is bounded (a space, or a line break with indentation). Otherwise a model sampled at a
high temperature can write whitespace until it reaches max_tokens, and its output is not valid JSON.
"""

import json
from typing import Any

from penstock.engine.grammar.json_schema import ESCAPES, WHITESPACE, parsed, prepared
from penstock.engine.grammar.rules import Rules
from penstock.engine.http.errors import clip
from penstock.engine.sampling_params import InvalidRequest, StructuredOutputs


def grammar_source(wanted: StructuredOutputs) -> str:
    """Return the text of the grammar."""
    wanted.check()
    kind, field = wanted.kind, wanted.field
    value = getattr(wanted, kind)
    if kind == "grammar":
        if "::=" in value:
            raise InvalidRequest(field, "this looks like GBNF or EBNF; a Lark grammar with a rule 'start' is expected")
        return str(value)
    if kind in ("json", "json_object"):
        return json_source(parsed(value, field) if kind == "json" else {"type": "object"}, field, wanted.coerce_one_of)
    rules = Rules({})
    return "\n".join([f"start: {rules.answer(wanted)}", *rules.lines])


def json_source(schema: Any, field: str, coerce_one_of: bool) -> str:
    """Return the grammar for a JSON schema. It is not Lark, within which llguidance takes 1 ms longer to compile it."""
    if schema is False:
        raise InvalidRequest(field, "the schema 'false' accepts no answer at all")
    options = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES, "coerce_one_of": coerce_one_of}
    return json.dumps({"grammars": [{"json_schema": {**prepared(schema, field), "x-guidance": options}}]})


def check_pattern(pattern: str, field: str) -> None:
    """Raise InvalidRequest if llguidance cannot parse a pattern of a schema. Only compiling it shows if it is too large."""
    from llguidance import LLMatcher

    if error := LLMatcher.validate_grammar(json_source({"type": "string", "pattern": pattern}, field, False)):
        what = f"{error.rpartition('error: ')[2]}; a regular expression without look-around is allowed"
        raise InvalidRequest(field, f"{clip(pattern)!r}: {what}")
