"""Builds the grammar for a request's structured_outputs. Checks shape and size, but does not compile the grammar.

Whitespace between JSON tokens is bounded (a space, or a line break with indentation). Otherwise a model sampled at a
high temperature can write whitespace until it reaches max_tokens, and its output is not valid JSON.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.engine.grammar.json_schema import ESCAPES, WHITESPACE, lark_json, parsed, prepared
from penstock.engine.grammar.rules import Rules
from penstock.engine.sampling_params import InvalidRequest, StructuredOutputs

MAX_STRUCTURES = 256


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any] | bool = True
    end: str = ""


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    structures: list[Structure]
    triggers: list[str]
    type: str = "structural_tag"


def grammar_source(
    wanted: StructuredOutputs, special_ids: Mapping[str, int] = MappingProxyType({}), field: str | None = None
) -> str:
    """Return the text of the grammar. `special_ids` maps the tokenizer's special tokens to ids, for tags that begin
    with one; `field` is the client's name for the value if it differs from the one in `wanted`."""
    wanted.check(field)
    kind, field = wanted.kind, field or wanted.field
    value = getattr(wanted, kind)
    if kind == "grammar":
        if "::=" in value:
            raise InvalidRequest(field, "this looks like GBNF or EBNF; a Lark grammar with a rule 'start' is expected")
        return str(value)
    if kind == "structural_tag":
        return _tags(parsed(value, field), special_ids, field, wanted.coerce_one_of)
    if kind in ("json", "json_object"):
        return json_source(parsed(value, field) if kind == "json" else {"type": "object"}, field, wanted.coerce_one_of)
    rules = Rules(special_ids)
    return "\n".join([f"start: {rules.answer(wanted)}", *rules.lines])


def json_source(schema: Any, field: str, coerce_one_of: bool) -> str:
    """Return the grammar for a JSON schema. It is not Lark, within which llguidance takes 1 ms longer to compile it."""
    if schema is False:
        raise InvalidRequest(field, "the schema 'false' accepts no answer at all")
    options = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES, "coerce_one_of": coerce_one_of}
    grammar = {"json_schema": {**prepared(schema, field), "x-guidance": options}}
    return msgspec.json.encode({"grammars": [grammar]}).decode()


def _tags(value: Any, special_ids: Mapping[str, int], field: str, coerce_one_of: bool = False) -> str:
    """Return the Lark grammar for a structural tag: free text in which a trigger starts a constrained piece.

        {"structures": [{"begin": "<f=", "schema": {…}, "end": ">"}], "triggers": ["<f"]}

    A trigger may occur anywhere in the text, any number of times. One of the structures that begin with it must follow.
    A trigger that is a special token of the model is matched as that token.
    """
    try:
        tag = msgspec.convert(value, StructuralTag)
    except msgspec.ValidationError as error:
        raise InvalidRequest(field, str(error)) from None
    if not 1 <= len(tag.structures) <= MAX_STRUCTURES:
        raise InvalidRequest(field, f"{len(tag.structures)} structures; 1 to {MAX_STRUCTURES} are allowed")
    by_trigger: dict[str, list[str]] = {}
    for index, structure in enumerate(tag.structures):
        trigger = next((t for t in tag.triggers if t and structure.begin.startswith(t)), None)
        if trigger is None:
            raise InvalidRequest(field, f"structures[{index}].begin starts with none of the triggers")
        by_trigger.setdefault(trigger, []).append(_after(structure, trigger, field, coerce_one_of))
    rules = Rules({trigger: special_ids[trigger] for trigger in by_trigger if trigger in special_ids})
    blocks = {trigger: f"({' | '.join(pieces)})" for trigger, pieces in by_trigger.items()}
    return rules.lark(f"{rules.until_each('text', blocks)}* TEXT")


def _after(structure: Structure, trigger: str, field: str, coerce_one_of: bool) -> str:
    """Return the Lark expression for the rest of a structure after its trigger."""
    texts = structure.begin[len(trigger) :], structure.end
    rest, end = (f"{json.dumps(text)} " if text else "" for text in texts)
    schema = lark_json(structure.schema, field, coerce_one_of=coerce_one_of, whitespace_pattern=WHITESPACE)
    return f"{rest}{schema} {end}".rstrip()
